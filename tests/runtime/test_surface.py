"""What `pi_runtime` offers: few names, all of them there, nothing loaded before it is used."""

import doctest
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support.paths import GOLDEN, ROOT

import pi_runtime

SURFACE = {"Engine", "Grammar", "Model", "Sampling", "load"}


def test_the_surface_is_complete_and_small() -> None:
    assert set(pi_runtime.__all__) == SURFACE
    assert len(SURFACE) <= 8
    assert sorted(pi_runtime.__all__) == list(pi_runtime.__all__)


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(pi_runtime, name)
    assert found.__name__ == name
    assert found.__doc__


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_the_example_of_every_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(GOLDEN, tmp_path / "artifact.pi")
    monkeypatch.chdir(tmp_path)
    known = {name: getattr(pi_runtime, name) for name in SURFACE}
    (example,) = doctest.DocTestFinder(recurse=False).find(known[name], name, globs=known)
    assert example.examples
    told: list[str] = []
    doctest.DocTestRunner().run(example, out=told.append)
    assert told == []


def test_the_example_of_many_prompts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = spec_from_file_location("many_prompts", ROOT / "docs" / "examples" / "many_prompts.py")
    assert found is not None
    assert found.loader is not None
    example = module_from_spec(found)
    found.loader.exec_module(example)
    example.main(GOLDEN)
    assert "60 tokens in" in capsys.readouterr().out


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'pi_runtime' has no attribute 'lode'"):
        _ = pi_runtime.lode
    with pytest.raises(ImportError):
        from pi_runtime import lode  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pi_runtime", {"numpy", "numba", "torch", "tokenizers", "jinja2", "typer", "rich"}),
        ("pi_runtime.artifact.writer", {"numba", "torch", "tokenizers", "jinja2", "typer", "rich", "zarr"}),
        ("pi_runtime.artifact.verification", {"numba", "torch", "tokenizers", "jinja2", "typer", "rich", "zarr"}),
    ],
)
def test_importing_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
