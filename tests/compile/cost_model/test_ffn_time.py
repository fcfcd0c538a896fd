"""The time of rungs against the model of time that places them."""

import numpy as np
import pytest
from support.synthetic import small_decoder

from pi_compile.cost_model.processors import CPU, Reads, processors_of
from pi_compile.cost_model.token_time import costs_of
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Machine
from pi_compile.results.activation_profile import MILLION, LayerWork
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes

FORMATS = dict.fromkeys(("embedding", "attention", "head"), "f32") | {"ffn": "q4", "predictor": "q8"}
MACHINE = Machine.model_validate(
    {
        "name": "a", "source": "b",
        "cpu": {
            "name": "c", "cores": 2, "ram_gib": 8.0, "bandwidth_gb_per_s": 40.0, "launch_us": 3.0,
            "format_gb_per_s": {"q4": 20.0, "q8": 30.0},
            "gather_gb_per_s": {"f32": 40.0, "f16": 40.0, "bf16": 40.0, "q8": 11.0, "q4": 7.0},
        },
    }
)  # fmt: skip
PROCESSOR = processors_of(MACHINE)[CPU]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("ffn", ["gated", "plain"])
def test_it_is_the_time_of_the_layer_on_the_processor(rung: str, ffn: str) -> None:
    d = small_decoder(n_layers=1, d_model=64, d_ff=192, ffn=ffn)
    tokens = 1000
    counts = np.full((1, 192), 100)
    rank = 64 if rung == "predicted" else None
    work = Workload(
        decoder=d, formats=FORMATS, tokens=tokens, counts=counts, context=64,
        layers=(LayerWork(rung=rung, rank=rank, read_ppm=3 * MILLION),),
    )  # fmt: skip
    cost = costs_of(work, MACHINE).layers[0]
    neuron = FfnBytes(d, "q4", "q8")
    reads = Reads.of(neuron, work.layers[0], 0.3, 0.1)
    assert reads.ps(work.layers[0], PROCESSOR, neuron) == pytest.approx(
        int(cost.cpu_ffn[0]) + cost.predictor[CPU], rel=1e-6
    )


def test_each_rung_pays_for_what_it_reads() -> None:
    d = small_decoder(d_model=128, d_ff=1000, ffn="gated")
    neuron = FfnBytes(d, "q4", "q8")
    first, rest, launches = neuron.first, neuron.rest, 2 * 3e6
    threshold = Layer(rung="threshold")
    found = Reads.of(neuron, threshold, 1.0, 0.2).ps(threshold, PROCESSOR, neuron)
    assert found == pytest.approx(launches + 1000 * first / 20e9 * 1e12 + 200 * rest / 7e9 * 1e12)


def test_prompts_take_longer_by_neuron_than_by_matrix() -> None:
    """By the rates of the profile, where both are there and there is no GPU: a multiplication is two operations."""
    d = small_decoder(d_model=128, d_ff=1000, ffn="gated")
    neuron, rates = FfnBytes(d, "q4", "q8"), {"format_gflop_per_s": {"q4": 400.0}, "neurons_gflop_per_s": {"q4": 250.0}}
    processor = processors_of(MACHINE.model_copy(update={"cpu": MACHINE.cpu.model_copy(update=rates)}))[CPU]
    late = 2 * 3 * 128 * 1000 * (1 / 250e9 - 1 / 400e9) * 1e12
    assert processor.prompt_ps(Layer(rung="threshold"), neuron) == pytest.approx(late)
    assert processor.prompt_ps(Layer(rung="dense"), neuron) == 0
    assert PROCESSOR.prompt_ps(Layer(rung="threshold"), neuron) == 0
    experts = FfnBytes(small_decoder(d_model=64, d_ff=100, n_experts=4, experts_per_token=2), "q4", "q8")
    assert processor.prompt_ps(Layer(rung="gate"), experts) == 0


def test_of_experts_a_token_reads_those_it_goes_to() -> None:
    d = small_decoder(d_model=64, d_ff=100, n_experts=4, experts_per_token=2)
    neuron = FfnBytes(d, "f16", "f16")
    assert Reads.of(neuron, Layer(rung="dense"), 1.0, 1.0).total == 200 * (neuron.first + neuron.rest)
    assert Reads.of(neuron, Layer(rung="gate"), 1.0, 0.1).total == 200 * neuron.first + 40 * neuron.rest
    predicted = Reads.of(neuron, Layer(rung="predicted", rank=32), 0.2, 0.1)
    assert predicted.total == 2 * neuron.predictor(32) + 80 * neuron.first + 40 * neuron.rest
