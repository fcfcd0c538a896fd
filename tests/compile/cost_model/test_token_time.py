"""The model of time: by hand on small numbers, and its shape."""

import numpy as np
import pytest
from support.placeable import machine, random_machine, random_workload, workload

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import costs_of, token_time
from pi_compile.cost_model.workload import rows_read
from pi_compile.machine.profile import Cpu, Link
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.artifact.buffers import kv_bytes
from pi_runtime.artifact.formats import ROW_FORMATS
from pi_runtime.artifact.sizes import PARTS

PICKED = dict.fromkeys(ROW_FORMATS, 20.0)
COUNTS = np.repeat([[1000, 500, 10, 0]], 64, axis=1)


def test_rows_read_by_rung() -> None:
    """256 neurons of which groups fire always, half the time, 1 % and never, over 1000 tokens."""
    layers = (LayerWork(rung="dense"), LayerWork(rung="gate"), LayerWork(rung="predicted", rank=4, read_ppm=1_500_000))
    work = workload(np.repeat(COUNTS, 3, axis=0), layers)
    every = [0, 64_000, 128_000, 192_000, 256_000]
    fired = [0, 64_000, 96_000, 96_640, 96_640]
    predicted = [0, 64_000, 112_000, 112_960, 112_960]
    found = [[a.tolist() for a in rows_read(work, layer)] for layer in range(3)]
    assert found == [[every, every], [every, fired], [predicted, fired]]


def test_a_gate_layer_by_hand() -> None:
    """d_model 32 in f16 is 64 bytes a row; `rest` of a gated neuron has two. 40 GB/s are 25 ps a byte, 400 are 2.5."""
    work = workload(COUNTS)
    layer = costs_of(work, machine()).layers[0]
    assert layer.gpu_ffn[1] == 64 * (64 + 128) * 25 // 10
    assert layer.cpu_ffn[1] == 192 * 64 * 25 + 32_640 * 128 * 25 // 1000
    assert (layer.gpu_ffn[0], layer.cpu_ffn[-1]) == (0, 0)


def test_formats_and_gathered_rows_run_at_their_own_rates() -> None:
    cpu = Cpu(
        name="c",
        cores=2,
        ram_gib=8.0,
        bandwidth_gb_per_s=40.0,
        format_gb_per_s={"f16": 25.0},
        neurons_gb_per_s={"f16": 20.0},
        gather_gb_per_s=PICKED | {"f16": 10.0},
        predictor_gb_per_s={"f16": 5.0},
        launch_us=1.0,
    )
    work = workload(COUNTS, (LayerWork(rung="predicted", rank=4),))
    layer = costs_of(work, machine(cpu=cpu)).layers[0]
    assert layer.cpu_ffn[0] == 2 * 10**6 + (96_640 * 64 + 96_640 * 128) * 100 // 1000
    assert layer.predictor[CPU] == 2 * 10**6 + work.predictor_bytes[0] * 200
    layer = costs_of(workload(COUNTS), machine(cpu=cpu)).layers[0]
    assert layer.cpu_ffn[0] == 2 * 10**6 + 256 * 64 * 50 + 96_640 * 128 * 100 // 1000
    assert layer.predictor[CPU] == 0


@pytest.mark.parametrize("side", [CPU, GPU])
@pytest.mark.parametrize("changed", ROW_FORMATS)
def test_a_rate_of_picking_is_that_of_its_format_on_its_processor(changed: str, side: int) -> None:
    cpu = machine().cpu.model_copy(update={"gather_gb_per_s": PICKED})
    gpu = machine().gpu.model_copy(update={"gather_gb_per_s": PICKED})  # type: ignore[union-attr]
    before = machine(cpu=cpu, gpu=gpu)
    name, section = (("cpu", cpu), ("gpu", gpu))[side]
    after = before.model_copy(
        update={name: section.model_copy(update={"gather_gb_per_s": PICKED | {changed: 10.0}})},
    )
    for fmt in ROW_FORMATS:
        work = workload(COUNTS, (LayerWork(rung="predicted", rank=4),), formats=dict.fromkeys(PARTS, fmt))
        old, new = (costs_of(work, m).layers[0] for m in (before, after))
        factors = [2 if fmt == changed and side == of else 1 for of in (CPU, GPU)]
        assert new.cpu_ffn[0] == factors[CPU] * old.cpu_ffn[0] > 0
        assert new.gpu_ffn[-1] == factors[GPU] * old.gpu_ffn[-1] > 0
        assert (new.attention, new.predictor) == (old.attention, old.predictor)


def test_attention_launches_three_times_and_takes_the_longer_of_reading_and_computing() -> None:
    work = workload(COUNTS)
    parts, cache = work.parts, kv_bytes(work.decoder, "f16", work.context // 2)
    queries = work.decoder.n_heads // work.decoder.n_kv_heads
    for rate, computing in ((None, 0), (80.0 * queries, cache * 25 // 2), (10.0 * queries, cache * 100)):
        cpu = Cpu(name="c", cores=2, ram_gib=8.0, bandwidth_gb_per_s=40.0, launch_us=1.0, attention_gb_per_s=rate)
        found = costs_of(work, machine(cpu=cpu)).layers[0].attention[CPU]
        assert found == 3 * 10**6 + (parts.attention + parts.ffn_bias) * 25 + max(cache * 25, computing)


def test_a_hand_over_is_paid_where_a_neuron_is_elsewhere_and_a_crossing_where_the_side_changes() -> None:
    work = workload(np.repeat(COUNTS, 2, axis=0))
    costs = costs_of(work, machine(link=Link(pcie_gb_per_s=1.0, sync_us=3.0)))
    assert costs.crossing == 3_000_000 + 4 * 32 * 1000
    assert costs.handover == 3_000_000 + 2 * 4 * 32 * 1000
    time = token_time(costs, (CPU, GPU), (0, 256), CPU, GPU)
    assert [(layer.handover, layer.crossing > 0) for layer in time.layers] == [(0, False), (0, True)]
    split = token_time(costs, (CPU, GPU), (64, 192), CPU, CPU)
    assert [layer.handover for layer in split.layers] == [costs.handover] * 2
    assert split.head == costs.head[CPU] + costs.crossing
    assert time.total == time.embedding + sum(layer.total for layer in time.layers) + time.head
    assert time.ns == -(-time.total // 1000)


def test_experts_that_are_not_routed_are_not_read() -> None:
    from dataclasses import replace

    work = workload(COUNTS // 4)
    routed = replace(work, decoder=replace(work.decoder, n_experts=4, d_ff=64, experts_per_token=1))
    assert rows_read(routed, 0)[0].tolist() == [n // 4 for n in rows_read(work, 0)[0].tolist()]


def test_a_larger_cut_never_slows_the_cpu_nor_quickens_the_gpu() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        costs = costs_of(random_workload(rng, groups=5), random_machine(rng))
        for layer in costs.layers:
            assert (np.diff(layer.gpu_ffn) >= 0).all()
            assert (np.diff(layer.cpu_ffn) <= 0).all()
