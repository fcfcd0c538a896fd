"""What tests of the running model share: `pi-run` within this process, and models whose words are known."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.scripted import saying, scripted_artifact
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, console, load
from pi_runtime.artifact.schema import Text
from pi_runtime.commands.run import app
from pi_runtime.execution.pages import PagePool

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that stands in for a flag."""
    for name in [name for name in os.environ if name.startswith("PI_") and name != "PI_CACHE_DIR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(no_variables: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """pi-run with arguments and a text on stdin → exit code, stdout, stderr."""

    def run(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = console.run(app, [str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err or "--debug" in arguments or "PI_DEBUG" in os.environ
        return code, out, err

    return run


@pytest.fixture(scope="session")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Goes on with the alphabet; a talk's text is the last message alone."""
    path = tmp_path_factory.mktemp("scripted") / "alphabet.pi"
    files = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    return scripted_artifact(path, saying("abcdefghijklmnopqrstuvwxyz"), files=files)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says abab… until its context of a million is full."""
    path = tmp_path_factory.mktemp("scripted") / "endless.pi"
    return scripted_artifact(path, saying("ab", then=ord("a")), context=1 << 20)


@pytest.fixture(scope="session")
def random_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, two of them with predictors that pass about half, and no end of text."""
    decoder = small_decoder(d_ff=150, n_layers=3, context_length=96)
    text = Text(prefix_ids=(), end_ids=())
    path = tmp_path_factory.mktemp("random") / "random.pi"
    return random_artifact(path, decoder, ranks=[4, None, 6], seed=5, scale=3.0, text=text)


@pytest.fixture
def model(random_path: Path) -> Iterator[Model]:
    """The random model, dense."""
    with load(random_path, mode="dense") as model:
        yield model


@pytest.fixture
def loop(endless: Path) -> Iterator[Model]:
    """Says abab… until its context of 8 is full."""
    with load(endless, context=8) as model:
        yield model


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a page that was given back reads NaN."""
    release = PagePool._release

    def poison(pool: PagePool, page: int) -> None:
        release(pool, page)
        if pool._references[page] == 0:
            pool.values(page).view(np.uint8)[...] = 255

    monkeypatch.setattr(PagePool, "_release", poison)
