"""The models in the recipes' folders are what their descriptions say."""

import json

import pytest
from support.paths import ROOT


@pytest.mark.parametrize("name", ["demo", "relu2"])
def test_a_readme_has_the_figures_of_the_training(name: str) -> None:
    folder = ROOT / "recipes" / name
    made, text = json.loads((folder / "training.json").read_text()), (folder / "README.md").read_text()
    found = made["held_out"]
    for figure in (f" {found['perplexity']:.1f} ", ", ".join(f"{d:.3f}" for d in found["density"])):
        assert figure in " ".join(text.split()), figure
    assert f"{made['trained_tokens'] / 1e6:.1f}".removesuffix(".0") + " million tokens" in " ".join(text.split())
