"""A GPU refuses by name what its kernels do not compute, before anything else."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from support.synthetic import FACTS, counted_artifact, random_artifact, small_decoder

from pi_runtime.artifact.features import COMPUTED_BY, lacking
from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda.executor import open_on_gpu
from pi_runtime.errors import DoesNotFitError


def test_what_the_gpu_tier_lacks_is_refused_by_name(tmp_path: Path) -> None:
    found: dict[str, list[str]] = {name: lacking(small_decoder(**facts), "gpu") for name, facts in FACTS.items()}
    # A last expert of its own width is in whole matrices alone.
    assert {name for names in found.values() for name in names} | {"decoder.last_ff"} == {
        feature for feature, bodies in COMPUTED_BY.items() if "gpu" not in bodies
    }
    assert {name for name, names in found.items() if not names} >= {
        *("norms after each part", "scaled, capped, not rotated", "experts weighed among all"),
    }
    for name in (name for name, names in found.items() if names):
        path = random_artifact(tmp_path / "a.pi", small_decoder(**FACTS[name]))
        with Artifact.open(path) as artifact, pytest.raises(DoesNotFitError) as caught:
            open_on_gpu(artifact, "auto", 64, 1, index=0, vram_budget=0)
        told = f"the GPU tier does not compute what this model does\n  found: {', '.join(found[name])}\n"
        assert str(caught.value).startswith(f"{told}  try: run it on the CPU: ")


def test_formats_with_scales_of_groups_are_refused_by_name(tmp_path: Path) -> None:
    path = counted_artifact(tmp_path / "a.pi", small_decoder(d_model=256, n_heads=8, head_dim=32, d_ff=256), "q6_k")
    with Artifact.open(path) as artifact, pytest.raises(DoesNotFitError, match=r"found: formats\.apart, formats\.q6_k"):
        open_on_gpu(artifact, "auto", 64, 1, index=0, vram_budget=0)
