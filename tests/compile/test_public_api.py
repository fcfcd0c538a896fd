"""What `pi_compile` offers: few names, all of them there, nothing loaded before it is used, and examples that run."""

import doctest
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

import pi_compile
from pi_compile.results import ActivationProfile
from pi_runtime.artifact.verification import verify
from pi_runtime.errors import UsageError

ROAD = ("open_checkpoint", "read_corpus", "profile", "train", "place", "quantise", "pack", "evaluate")
"""The names in the order in which they are used."""
EXAMPLE = ROOT / "docs" / "examples" / "python_api.py"


def test_the_surface_is_complete_and_small() -> None:
    assert sorted(ROAD) == pi_compile.__all__
    assert len(ROAD) <= 8
    for name in ROAD:
        assert getattr(pi_compile, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'pi_compile' has no attribute 'profil'"):
        _ = pi_compile.profil


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, pi_compile; print({'numpy', 'torch', 'scipy', 'numba', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the road; each goes on from those before it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("docs", "recipes"):
        Path(folder).symlink_to(ROOT / folder)
    known = {name: getattr(pi_compile, name) for name in ROAD}
    runner = doctest.DocTestRunner()
    for name in ROAD:
        (example,) = doctest.DocTestFinder(recurse=False).find(known[name], name, globs=known)
        assert example.examples, name
        told: list[str] = []
        runner.run(example, out=told.append, clear_globs=False)
        assert told == []
        known = example.globs


def test_the_example_of_the_docs_runs(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = spec_from_file_location("python_api", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    example = module_from_spec(found)
    found.loader.exec_module(example)
    example.main(original, tmp_path / "a.pi")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layer 0: ")
    assert lines[-1].startswith("perplexity: dense ")
    verify(tmp_path / "a.pi")


def test_the_page_shows_the_example() -> None:
    """Every line of Python in docs/reference/python.md stands in the example."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    lines = [line.strip() for block in page.split("```python\n")[1:] for line in block.partition("```")[0].splitlines()]
    source = {line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()}
    assert [line for line in lines if line not in source] == []
    assert all(f"`{name}`" in page for name in ROAD)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("profile", {"window": 4, "batch": 0}, ["profile.window", "profile.batch"]),
        ("train", {"rungs": ["gates"]}, ["train.rungs.0", "did you mean gate?"]),
        ("place", {"objective": "tim", "vram_gib": [-1.0]}, ["place.objective", "place.vram_gib.0"]),
        ("place", {"solver": "luck"}, ["solver='luck': unknown solver"]),
        ("pack", {"formats": {"ff": "q4", "head": "q3"}}, ["pack.ff: unknown key; did you mean ffn?", "pack.head"]),
    ],
)
def test_mistakes_are_all_named(
    original: Path, tmp_path: Path, name: str, arguments: dict[str, object], said: list[str]
) -> None:
    checkpoint = pi_compile.open_checkpoint(original)
    stages = import_module("pi_compile.pipeline.stages")
    neurons = (checkpoint.decoder.n_layers, checkpoint.decoder.neurons)
    order = np.tile(np.arange(neurons[1], dtype=np.uint32), (neurons[0], 1))
    counts = ActivationProfile(
        decoder=checkpoint.decoder, tokens=1, counts=np.zeros(neurons, np.uint64), order=order, inputs=""
    )
    given = {
        "profile": (checkpoint, counts.order[0]),
        "train": (checkpoint, counts, None),
        "place": (checkpoint, counts, None, "stand-in"),
        "pack": (checkpoint, tmp_path / "a.pi"),
    }
    with pytest.raises(UsageError) as error:
        getattr(stages, name)(*given[name], **arguments)
    assert all(words in str(error.value) for words in said), error.value
