"""llama.cpp beside an artifact runs in a process of its own, and what ends that ends no other."""

import os
import sys
from pathlib import Path

import pytest

from pi_runtime.commands.bench.beside import LlamaCpp
from pi_runtime.commands.bench.sequences import LEAD, STEPS
from pi_runtime.errors import InputError, MissingExtraError

FAKE = """
import json, os, sys
from pathlib import Path

assert not [name for name in sys.modules if name.startswith(("pi_runtime", "numba", "llvmlite", "torch"))]

class Llama:
    def __init__(self, model_path, n_ctx, **settings):
        if "none" in model_path:
            raise ValueError("Failed to load model from file")
        self.n_tokens, self.log = 0, Path(model_path).with_name("calls")
        print("llama.cpp says something", flush=True)
        self._note("open", os.getpid(), n_ctx, settings["n_threads"])

    def _note(self, *what):
        with self.log.open("a") as file:
            file.write(json.dumps(what) + "\\n")

    def n_vocab(self):
        return 7

    def reset(self):
        self.n_tokens = 0

    def eval(self, tokens):
        assert all(0 <= token < 7 for token in tokens)
        self.n_tokens += len(tokens)
        self._note("eval", len(tokens), self.n_tokens)
        if "illegal" in str(self.log):
            os.kill(os.getpid(), 4)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama_cpp that notes what it is asked."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "llama_cpp.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return tmp_path


def test_it_is_asked_in_another_process(fake: Path) -> None:
    peer = LlamaCpp(fake / "a.gguf", 300, 3)
    peer.grow(1)
    assert peer.seconds_a_step(1) > 0
    assert peer.read_prompt(40) > 0
    peer.close()
    calls = [line.strip("[]").split(", ") for line in (fake / "calls").read_text().splitlines()]
    assert calls[0][0] == '"open"'
    assert int(calls[0][1]) != os.getpid()
    assert calls[0][2:] == ["300", "3"]
    steps = [f'"eval", 1, {LEAD + n + 1}'.split(", ") for n in range(STEPS)]
    assert calls[1:] == [['"eval"', str(LEAD), str(LEAD)], *steps, ['"eval"', "40", "40"]]
    assert "llama_cpp" not in sys.modules


def test_what_it_cannot_open_is_refused(fake: Path) -> None:
    with pytest.raises(InputError, match="cannot open or run it\n  found: Failed to load model from file"):
        LlamaCpp(fake / "none.gguf", 300, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_illegal_instruction_there_is_an_error_here(fake: Path) -> None:
    (fake / "illegal").mkdir()
    peer = LlamaCpp(fake / "illegal" / "a.gguf", 300, 3)
    with pytest.raises(InputError, match="found: its process was ended by SIGILL"):
        peer.grow(1)
    with pytest.raises(InputError, match="ended by SIGILL"):
        peer.read_prompt(3)
    peer.close()


def test_without_it_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_runtime.commands.bench.beside.find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match="needs llama-cpp-python"):
        LlamaCpp(tmp_path / "a.gguf", 300, 3)
