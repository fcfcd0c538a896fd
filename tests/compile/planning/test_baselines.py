"""Yardstick placements: their rules, and their predicted rates against the published ones."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.published import FP16, INT4, Published, baselines, errors, workload
from support.synthetic import small_decoder

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import costs_of, token_time
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Cpu, Gpu, Link, Machine
from pi_compile.placement.formulation import Sizes
from pi_compile.planning.baselines import Baselines
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.artifact.sizes import PARTS

MACHINE = Machine(
    name="m",
    source="test",
    cpu=Cpu(name="c", cores=2, ram_gib=8.0, bandwidth_gb_per_s=40.0),
    gpu=Gpu(name="g", vram_gib=8.0, bandwidth_gb_per_s=400.0),
    link=Link(pcie_gb_per_s=16.0, sync_us=0.0),
)


def work(layers: int = 4, tied: bool = False) -> Workload:
    decoder = replace(small_decoder("llama", tied_head=tied), n_layers=layers, d_ff=256)
    counts = np.tile(np.arange(256, 0, -1), (layers, 1)) + np.arange(layers)[:, None]
    return Workload(
        decoder=decoder,
        formats=dict.fromkeys(PARTS, "f16"),
        tokens=1000,
        counts=counts.astype(np.int64),
        layers=(LayerWork(rung="predicted", rank=8),) * layers,
        context=64,
    )


def test_whole_layers_from_the_last_one_on() -> None:
    w = work()
    dense = replace(w, layers=(LayerWork(rung="dense"),) * 4)
    sizes = Sizes.of(dense)
    one = sizes.attention(0) + 256 * sizes.parts.neuron
    found = Baselines(w, MACHINE).layer_split(3 * one - 1)
    assert (found.assignment.sides, found.assignment.cuts) == ((CPU, CPU, GPU, GPU), (0, 0, 256, 256))
    assert (found.assignment.head, found.gpu_bytes) == (CPU, 2 * one)
    assert (
        found.token_ps
        == token_time(costs_of(dense, MACHINE), found.assignment.sides, found.assignment.cuts, 0, 0).total
    )
    everything = Baselines(w, MACHINE).layer_split(1 << 30)
    assert (everything.assignment.sides, everything.assignment.head) == ((GPU,) * 4, GPU)
    assert everything.token_ps < found.token_ps < Baselines(w, MACHINE).layer_split(0).token_ps


def test_attention_comes_first_then_the_head_then_the_hottest_neurons() -> None:
    w = work()
    sizes = Sizes.of(replace(w, context=0))
    attention, head, group = sizes.attention(0), sizes.parts.head + sizes.parts.final_norm, 64 * sizes.parts.neuron
    few = Baselines(w, MACHINE).powerinfer(3 * attention)
    assert (few.assignment.sides, few.assignment.head, few.assignment.cuts) == ((GPU, GPU, GPU, CPU), CPU, (0,) * 4)
    more = Baselines(w, MACHINE).powerinfer(4 * attention + head + 3 * group)
    assert (more.assignment.sides, more.assignment.head, more.assignment.cuts) == ((GPU,) * 4, GPU, (0, 64, 64, 64))
    assert more.gpu_bytes == 4 * attention + head + 3 * group


def test_keys_and_values_stay_in_ram() -> None:
    """Twice the cache costs the same with all of it on the GPU as with nothing there: it is the CPU's to read."""
    short, long = Baselines(work(), MACHINE), Baselines(replace(work(), context=128), MACHINE)
    cost = [long.powerinfer(v).token_ps - short.powerinfer(v).token_ps for v in (0, 1 << 30)]
    assert cost[0] == cost[1] > 0


def test_a_tied_head_is_put_on_the_gpu_once_more() -> None:
    w = work(tied=True)
    sizes = Sizes.of(replace(w, context=0))
    found = Baselines(w, MACHINE).powerinfer(4 * sizes.attention(0) + sizes.parts.embedding + sizes.parts.final_norm)
    assert (found.assignment.embedding, found.assignment.head) == (CPU, GPU)


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    alone = MACHINE.model_copy(update={"gpu": None, "link": None})
    for found in (Baselines(work(), alone).layer_split(0), Baselines(work(), alone).powerinfer(0)):
        assert (set(found.assignment.sides), sum(found.assignment.cuts), found.gpu_bytes) == ({CPU}, 0, 0)


def test_published_rates_are_met_without_a_constant_for_a_model() -> None:
    split, power = published_errors(FP16, "f16")
    assert statistics.median(split) < 0.06
    assert max(split) < 0.30
    assert statistics.median(power) < 0.22


def test_published_rates_in_int4_are_met_by_rates_of_q4() -> None:
    split, power = published_errors(INT4, "q4")
    assert statistics.median(split) < 0.08
    assert max(split) < 0.20
    assert statistics.median(power) < 0.16
    assert max(power) < 0.70


def published_errors(rows: tuple[Published, ...], fmt: str) -> tuple[list[float], list[float]]:
    """Errors of the split by layers and of PowerInfer."""
    found = [baselines(row, fmt) for row in rows]
    split = errors([(f[0], row.layer_split) for f, row in zip(found, rows, strict=True)])
    return split, errors([(f[1], row.powerinfer) for f, row in zip(found, rows, strict=True)])


@pytest.mark.parametrize("row", FP16[8:12:2], ids=lambda row: row.model)
def test_four_bits_are_read_faster(row: object) -> None:
    (split, power), (split4, power4) = baselines(row), baselines(row, "q4")  # type: ignore[arg-type]
    assert split4 > 2 * split
    assert power4 > power
    assert workload(row.model, 64, "q4").formats["ffn"] == "q4"  # type: ignore[attr-defined]
