"""A mixture of experts on GPU and CPU gives by any plan what the CPU alone gives."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu_running import (
    CONTEXT,
    assert_same,
    assert_same_answers,
    decoded,
    model,
    plan_of,
    read,
    running,
    weight_bytes,
)
from support.long_form import marked_long
from support.steps import examined

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Plan
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.host_executor import in_memory
from pi_runtime.kernels import reference

EXPERTS, WIDTH = 4, 70
SHAPE: dict[str, Any] = {"n_layers": 2, "d_ff": WIDTH, "n_experts": EXPERTS, "experts_per_token": 2}
NONE, ALL, SOME = (0,) * EXPERTS, (WIDTH,) * EXPERTS, (64, 0, WIDTH, 7)
"""Cuts of one layer; with the last one experts are on the CPU, on the GPU, or on both sides."""
PREDICTED = (Layer(rung="predicted", rank=7), Layer(rung="gate"))
OTHERS = (Layer(rung="predicted", rank=3), Layer(rung="threshold", threshold=0.1))
DENSE = (Layer(rung="dense"), Layer(rung="predicted", rank=5))
RUNGS = {"predicted, gate": PREDICTED, "predicted, threshold": OTHERS, "dense, predicted": DENSE}
PROMPT, GOING_ON = [5, 9, 250, 3, 77, 130], [7, 11, 200]
CASES = {
    "all on the GPU": plan_of(["gpu", "gpu"], ALL + ALL),
    "all on the CPU": plan_of(["cpu", "cpu"], NONE + NONE, "cpu-cpu"),
    "attention on the GPU": plan_of(["gpu", "gpu"], NONE + NONE),
    "neurons on the GPU": plan_of(["cpu", "cpu"], ALL + ALL, "cpu-cpu"),
    "split, residual on the GPU": plan_of(["gpu", "gpu"], SOME + SOME[::-1]),
    "split, residual on the CPU": plan_of(["cpu", "cpu"], SOME + SOME[::-1]),
    "either side": plan_of(["gpu", "cpu"], SOME + ALL, "cpu-gpu"),
}


def both(path: Path, plan: Plan, gpu: Device, mode: str = "auto", **more: Any) -> None:
    """A prompt, then some tokens, on the CPU alone and by the plan."""
    one = in_memory(Artifact.open(path), mode, CONTEXT, 1)
    with running(path, plan, gpu, mode, **more) as two:
        decoder = two.device_ops.decoder
        wanted_rows, rows = assert_same_answers(one, two, PROMPT, GOING_ON)
    one.close()
    # The GPU's kernels drop a neuron of drelu on either factor, the CPU's list holds those that pass the first.
    counted = slice(1 if decoder.activation == "drelu" else 2)
    np.testing.assert_array_equal(rows[..., counted], wanted_rows[..., counted])
    assert (rows[..., 0] > 0).all()


PAIRS = list(product(CASES, RUNGS))
FURTHER = {pair for n, pair in enumerate(PAIRS) if n // len(RUNGS) % len(RUNGS) != n % len(RUNGS)}
"""All but one rung of each plan; each rung has some plans left."""


@pytest.mark.parametrize("pair", marked_long(PAIRS, FURTHER), ids=" by ".join)
def test_any_plan_and_rung_give_what_the_cpu_gives(pair: tuple[str, str], tmp_path: Path, gpu: Device) -> None:
    plan, layers = pair
    both(model(tmp_path / "a.pi", layers=RUNGS[layers], **SHAPE), CASES[plan], gpu)


SPLIT = CASES["split, residual on the GPU"]
FORMS: dict[str, dict[str, Any]] = {
    "plain with biases, one expert a token": {
        "family": "opt", "experts_per_token": 1, "layers": (Layer(rung="predicted", rank=7), Layer(rung="dense")),
    },
    "drelu, all experts": {"activation": "drelu", "experts_per_token": EXPERTS},
    "silu above a threshold": {"activation": "silu", "layers": OTHERS},
    "parallel": {"block": "parallel", "shared_norm": True},
    "weights of a softmax over all experts": {"router_normalised": False},
    "norms after each part": {"block": "reordered"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms_of_a_decoder(form: dict[str, Any], tmp_path: Path, gpu: Device) -> None:
    both(model(tmp_path / "a.pi", **{"layers": PREDICTED, **SHAPE, **form}), SPLIT, gpu)


@pytest.mark.parametrize("mode", ["dense", "gate"])
def test_modes(mode: str, tmp_path: Path, gpu: Device) -> None:
    both(model(tmp_path / "a.pi", layers=PREDICTED, **SHAPE), SPLIT, gpu, mode)


@pytest.mark.parametrize("fmt", marked_long(["f16", "bf16", "q8", "q4"], ["f16", "q8"]))
def test_number_formats(fmt: str, tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU inputs are not rounded to bytes; prompts are multiplied in 16 bits."""
    monkeypatch.setattr(reference, "rounded", lambda x_TD: x_TD)
    path = model(tmp_path / "a.pi", fmt=fmt, layers=PREDICTED, **SHAPE)
    with Artifact.open(path) as artifact, running(path, CASES["all on the GPU"], gpu) as executor:
        found, _ = decoded(executor, executor.new_cache(), GOING_ON)
        assert_same(found, reference.forward(artifact, GOING_ON, "predicted"))
        prompt = read(executor, executor.new_cache(), PROMPT)
        wanted = reference.forward(artifact, PROMPT, "dense")[-1]
        assert np.abs(prompt - wanted).max() <= 0.02 * np.abs(wanted).max()


def test_cold_weights_are_streamed_for_experts_with_enough_tokens(tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi", layers=PREDICTED, **SHAPE)
    found = []
    for stream_from in (1, 3, 1000):
        with running(path, SPLIT, gpu, stream_from=min(stream_from, 512)) as executor:
            found.append(read(executor, executor.new_cache(), PROMPT))
    assert_same(found[0], found[2])
    assert_same(found[1], found[2])
    assert (found[0] != found[2]).any(), "other additions, other bits"


def test_weights_are_what_was_counted(tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi", fmt="q4", layers=PREDICTED, **SHAPE)
    with running(path, SPLIT, gpu) as executor, Artifact.open(path) as artifact:
        assert executor.device_ops.weights.nbytes == weight_bytes(artifact.manifest, SPLIT)
        every = sum(e.nbytes for name, e in artifact.manifest.arrays.items() if not name.endswith(("order", "counts")))
        assert weight_bytes(artifact.manifest, CASES["all on the GPU"]) == every


BOTH_SIDES = [pair for pair in PAIRS if pair[0] in ("split, residual on the GPU", "either side")]


@pytest.mark.parametrize("pair", marked_long(BOTH_SIDES, BOTH_SIDES[1::2]), ids=" by ".join)
def test_what_decoding_computes_and_what_fires(pair: tuple[str, str], tmp_path: Path, gpu: Device) -> None:
    plan, layers = pair
    path = model(tmp_path / "a.pi", layers=RUNGS[layers], **SHAPE)
    one = in_memory(Artifact.open(path), "auto", CONTEXT, 1)
    with running(path, CASES[plan], gpu) as two:
        caches = [two.new_cache() for _ in range(2)]
        assert_same(decoded(two, caches[1], GOING_ON[:1])[0], decoded(one, caches[0], GOING_ON[:1])[0])
        (wanted, wanted_L3), (found, found_L3) = (
            examined(e, path, "auto", GOING_ON, c) for e, c in zip((one, two), caches, strict=True)
        )
        assert_same(found, wanted)
        np.testing.assert_array_equal(found_L3, wanted_L3)
        assert (found_L3 > 0).all()
    one.close()
