"""A GPU refuses by name what its kernels do not compute."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from support.synthetic import FACTS, bare_manifest, small_decoder

from pi_runtime.artifact.features import COMPUTED_BY
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.cuda.executor import check_features
from pi_runtime.errors import DoesNotFitError


def test_what_the_gpu_tier_lacks_is_refused_by_name() -> None:
    refused = {}
    for name, facts in FACTS.items():
        decoder = small_decoder(**facts)
        manifest = bare_manifest(decoder, dict.fromkeys(PARTS, "f32"), [None] * decoder.n_layers, 0)
        try:
            check_features(manifest)
        except DoesNotFitError as error:
            refused[name] = str(error)
    assert all(
        any(feature in message for message in refused.values())
        for feature, bodies in COMPUTED_BY.items()
        if "gpu" not in bodies
    )
    assert {*refused} == {
        "windows, experts by sigmoid of what enters",
        "norms before and after, two kinds of angles",
        "sinks, a window, clamped experts with biases",
        "shared experts, dense layers, a bias for choosing in groups",
        "latents of keys and of queries, experts of groups by their largest",
        "norms of what the last matrices read",
    }
