"""What fires by an observer of FFNs is what fires by the definition."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.execution.firing import Firing
from pi_runtime.kernels import reference

PREDICTED, THRESHOLD = Layer(rung="predicted", rank=4), Layer(rung="threshold", threshold=0.3)
CASES: dict[str, tuple[dict[str, Any], Layer]] = {
    "gate": ({}, Layer(rung="gate")),
    "dense": ({}, Layer(rung="dense")),
    "both factors fire": ({"activation": "drelu"}, Layer(rung="gate")),
    "no up": ({"activation": "relu", "ffn": "plain", "ffn_bias": True}, PREDICTED),
    "predicted": ({}, PREDICTED),
    "threshold": ({"activation": "silu"}, THRESHOLD),
    "experts": ({"n_experts": 4, "experts_per_token": 2, "d_ff": 70}, PREDICTED),
    "whole matrices": ({"activation": "silu"}, Layer(rung="dense")),
    "whole matrices, relu": ({"activation": "relu"}, Layer(rung="dense")),
}


@pytest.mark.parametrize("case", CASES)
def test_counts_are_those_of_the_definition(case: str, tmp_path: Path) -> None:
    shape, layer = CASES[case]
    decoder = small_decoder(**{"n_layers": 1, "d_ff": 150, **shape})
    layout = {"ffn_layout": "matrices"} if "matrices" in case else {}
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[layer.rank], layers=(layer,), scale=3.0, **layout)
    x_TD = np.random.default_rng(1).standard_normal((20, decoder.d_model), np.float32)
    with Artifact.open(path) as artifact:
        firing = Firing(artifact, "auto")
        for block_TD in (x_TD[:3], x_TD[3:]):
            firing.see(0, block_TD, None)
        wanted_3 = counted(decoder, reference.ArtifactWeights(artifact, "layers/0/"), layer, x_TD)
        found_3 = firing.counts_L3[0].tolist()
        del firing
    assert found_3 == wanted_3
    assert 0 < wanted_3[2] <= wanted_3[0]


def counted(d: Decoder, w: reference.ArtifactWeights, layer: Layer, x_TD: np.ndarray) -> list[int]:
    """Neurons of the experts taken that fire, rows of `first` that are read, and neurons that fire and are kept."""
    z_TF = w.product("ffn/first", x_TD) + (w["ffn/first_bias"] if d.ffn_bias else np.float32(0))
    a_TF = reference.activate(d, z_TF)
    fire_TF = a_TF != 0
    if d.activation == "drelu":
        fire_TF = fire_TF & (w.product("ffn/rest", x_TD)[..., 0] > 0)
    taken_TF = np.repeat(reference.routing(d, w, x_TD) > 0, d.d_ff, axis=1)
    chosen = reference.selected(w, layer, x_TD)
    read_TF = taken_TF & (True if chosen is None else chosen)
    kept_TF = read_TF & (np.abs(a_TF) > layer.threshold)
    return [int(flags.sum()) for flags in (fire_TF & taken_TF, read_TF, fire_TF & kept_TF)]
