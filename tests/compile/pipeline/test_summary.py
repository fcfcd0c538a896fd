"""Stage results as values."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.placeable import machine, workload
from support.synthetic import random_artifact, small_decoder

from pi_compile.machine import Cpu, Machine
from pi_compile.pipeline import summary
from pi_compile.placement.formulation import Problem
from pi_compile.placement.stage import place
from pi_compile.results import LayerWork
from pi_compile.results.activation_profile import ActivationProfile
from pi_runtime.artifact.schema import Layer

GATHER = dict.fromkeys(("f32", "f16", "bf16", "q8", "q4"), 1.0)


def profile() -> ActivationProfile:
    decoder = small_decoder(n_layers=1, d_ff=100)
    counts = np.zeros((1, 100), np.uint64)
    counts[0, :20] = 40
    counts[0, 20:] = 10
    order = np.arange(100, dtype=np.uint32)[None]
    return ActivationProfile(decoder=decoder, tokens=40, counts=counts, order=order, inputs="x")


def test_profile_figures() -> None:
    (layer,) = summary.profile_report(profile())["layers"]
    assert layer == {"layer": 0, "density": 0.4, "top_20_share": 0.5, "neurons_for_80_percent": 0.68}


@pytest.mark.parametrize("kind", ["gate", "threshold"])
def test_a_forecast_has_both(kind: str, tmp_path: Path) -> None:
    """Without a GPU dense layers are whole matrices, at their rate; other rungs are by neuron, and slower here."""
    layer = Layer(rung=kind, threshold=0.1 if kind == "threshold" else 0.0)
    path = random_artifact(tmp_path / "a.pi", profile().decoder, format="f16", layers=(layer,))
    rates = {"format_gb_per_s": {"f16": 40.0}, "neurons_gb_per_s": {"f16": 1.0}, "gather_gb_per_s": GATHER}
    alone = Cpu(name="c", cores=2, ram_gib=8.0, bandwidth_gb_per_s=40.0, launch_us=0.0, **rates)
    of_layer = replace(profile(), layers=(LayerWork(rung=kind),))
    found = summary.forecast_line(path, of_layer, 16, Machine(name="m", source="t", cpu=alone))
    own, whole = (float(word) for word in re.findall(r"([\d.e-]+) ms", found))
    assert own > 2 * whole
    assert found.endswith("with whole matrices alone")
    operations = {"format_gflop_per_s": {"f16": 4.0}, "neurons_gflop_per_s": {"f16": 2.0}}
    slow = Machine(name="m", source="t", cpu=alone.model_copy(update=operations))
    late = float(
        re.findall(
            r"one of a prompt takes ([\d.e-]+) ms longer than there$", summary.forecast_line(path, of_layer, 16, slow)
        )[0]
    )
    weights = 3 * profile().decoder.d_ff * profile().decoder.d_model
    assert late == pytest.approx(2 * weights * (1 / 2e9 - 1 / 4e9) * 1000, rel=0.01)
    of_layer = replace(of_layer, layers=(LayerWork(rung="dense"),))
    own, whole = re.findall(r"([\d.e-]+) ms", summary.forecast_line(path, of_layer, 16, machine(gpu=None, link=None)))
    assert own == whole


def test_place_figures() -> None:
    work = workload(np.random.default_rng(0).integers(1, 1000, (2, 128)))
    placement = place(Problem.of(work, machine()), 1 << 30, 1 << 40)
    (row,) = summary.place_report([placement])["plans"]
    assert row["used_bytes"] == sum(row["gpu_bytes_by_part"].values())
    assert row["predicted_tokens_per_s"] == 1e9 / placement.time.ns
    assert (row["activations_on_gpu"], row["gap"], row["attention_layers_on_gpu"], row["smallest_cut"]) == (
        1.0,
        0.0,
        2,
        128,
    )
    assert summary.place_report([]) == {"plans": []}
