"""Yardstick placements: their rules, and their predicted rates against the published ones."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.published import ROWS, errors, rivals, workload
from support.synthetic import small_decoder

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import costs_of, token_time
from pi_compile.cost_model.workload import LayerWork, Workload
from pi_compile.machine.profile import Cpu, Gpu, Link, Machine
from pi_compile.placement.formulation import Sizes
from pi_compile.planning.baselines import layer_split, powerinfer
from pi_runtime.artifact.sizes import PARTS

MACHINE = Machine(
    name="m",
    source="test",
    cpu=Cpu(name="c", cores=2, ram_gib=8.0, bandwidth_gb_per_s=40.0),
    gpu=Gpu(name="g", vram_gib=8.0, bandwidth_gb_per_s=400.0),
    link=Link(pcie_gb_per_s=16.0, sync_us=0.0),
)


def work(layers: int = 4, tied: bool = False) -> Workload:
    shape = replace(small_decoder("llama", tied_head=tied), n_layers=layers, d_ff=256)
    counts = np.tile(np.arange(256, 0, -1), (layers, 1)) + np.arange(layers)[:, None]
    return Workload(
        shape=shape,
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
    one = sizes.block(0) + 256 * sizes.parts.neuron
    found = layer_split(w, MACHINE, 3 * one - 1)
    assert (found.choice.sides, found.choice.cuts) == ((CPU, CPU, GPU, GPU), (0, 0, 256, 256))
    assert (found.choice.head, found.gpu_bytes) == (CPU, 2 * one)
    assert found.token_ps == token_time(costs_of(dense, MACHINE), found.choice.sides, found.choice.cuts, 0, 0).total
    everything = layer_split(w, MACHINE, 1 << 30)
    assert (everything.choice.sides, everything.choice.head) == ((GPU,) * 4, GPU)
    assert everything.token_ps < found.token_ps < layer_split(w, MACHINE, 0).token_ps


def test_attention_comes_first_then_the_head_then_the_hottest_neurons() -> None:
    w = work()
    sizes = Sizes.of(replace(w, context=0))
    block, head, group = sizes.block(0), sizes.parts.head + sizes.parts.final_norm, 64 * sizes.parts.neuron
    few = powerinfer(w, MACHINE, 3 * block)
    assert (few.choice.sides, few.choice.head, few.choice.cuts) == ((GPU, GPU, GPU, CPU), CPU, (0,) * 4)
    more = powerinfer(w, MACHINE, 4 * block + head + 3 * group)
    assert (more.choice.sides, more.choice.head, more.choice.cuts) == ((GPU,) * 4, GPU, (0, 64, 64, 64))
    assert more.gpu_bytes == 4 * block + head + 3 * group


def test_keys_and_values_stay_in_ram() -> None:
    """Twice the cache costs the same with all of it on the GPU as with nothing there: it is the CPU's to read."""
    w, longer = work(), replace(work(), context=128)
    cost = [powerinfer(longer, MACHINE, v).token_ps - powerinfer(w, MACHINE, v).token_ps for v in (0, 1 << 30)]
    assert cost[0] == cost[1] > 0


def test_a_tied_head_is_put_on_the_gpu_once_more() -> None:
    w = work(tied=True)
    sizes = Sizes.of(replace(w, context=0))
    found = powerinfer(w, MACHINE, 4 * sizes.block(0) + sizes.parts.embedding + sizes.parts.final_norm)
    assert (found.choice.embedding, found.choice.head) == (CPU, GPU)


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    alone = MACHINE.model_copy(update={"gpu": None, "link": None})
    for found in (layer_split(work(), alone, 0), powerinfer(work(), alone, 0)):
        assert (set(found.choice.sides), sum(found.choice.cuts), found.gpu_bytes) == ({CPU}, 0, 0)


def test_published_rates_are_met_without_a_constant_for_a_model() -> None:
    """Medians over all FP16 rows: at most 20 % for the split by layers, 30 % for PowerInfer."""
    found = [rivals(row) for row in ROWS]
    split = errors([(f[0], row.layer_split) for f, row in zip(found, ROWS, strict=True)])
    power = errors([(f[1], row.powerinfer) for f, row in zip(found, ROWS, strict=True)])
    assert statistics.median(split) < 0.06
    assert max(split) < 0.30
    assert statistics.median(power) < 0.22


@pytest.mark.parametrize("row", ROWS[8:12:2], ids=lambda row: row.model)
def test_four_bits_are_read_faster(row: object) -> None:
    (split, power), (split4, power4) = rivals(row), rivals(row, "q4")  # type: ignore[arg-type]
    assert split4 > 2 * split
    assert power4 > power
    assert workload(row.model, 64, "q4").formats["ffn"] == "q4"  # type: ignore[attr-defined]
