"""Stage results as values."""

import numpy as np
from support.placeable import machine, workload
from support.synthetic import small_decoder

from pi_compile.pipeline import summary
from pi_compile.placement.formulation import Problem
from pi_compile.placement.stage import place
from pi_compile.results.activation_profile import ActivationProfile


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
