"""The benchmark of servers: loops ask what they say, and a peer that is missing or dies is a failure with its name."""

import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "pydantic", "llguidance", "httpx")):
    pytest.skip("needs the extra serve", allow_module_level=True)

from support.scripted import saying, scripted_artifact
from support.serving import serving


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """A server that never ends an answer by itself."""
    from serving.servers import OURS, Server

    artifact = scripted_artifact(tmp_path / "endless.pi", saying("ab", then=ord("a")), context=1 << 12)
    with serving(artifact, slots=2, queue=8) as served:
        yield Server(OURS, served.url, {"model": served.name})


def prompts(*lengths: int) -> Any:
    from serving.load import Prompts

    return Prompts(lengths, 1000, 4)


def test_loops_measure_every_answer(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.load import Prompts, closed, opened

    # Tokens of this model, whatever is asked.
    monkeypatch.setattr(Prompts, "prompt", lambda self, _: [97] * self.lengths[0])
    # So long that a busy machine cannot send all answers in one piece each.
    asked = Prompts((3,), 1000, 60)
    for load in (closed(server, asked, 3, 5, "x"), opened(server, asked, 100.0, 5, "x")):
        assert len(load.first_s) == 5
        assert 1 <= len(load.gaps_s) <= 5 * 59
        assert load.tokens_per_s == pytest.approx(60 * load.requests_per_s)


def test_prompts_are_the_same_for_all_servers() -> None:
    found = prompts(16, 32)
    assert found.prompt(1) == found.prompt("1") != found.prompt(2)
    assert {len(found.prompt(n)) for n in range(20)} == {16, 32}


def test_a_refused_request_is_a_failure_of_the_load(server: Any) -> None:
    from serving.load import closed
    from side_by_side.process import EngineError

    with pytest.raises(EngineError, match="pi-serve: 2 of 2 requests failed, status 400"):
        closed(server, prompts(8), 1, 2, "ids beyond the vocabulary")


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise SystemExit(3)", "llama-server ended with 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", f"llama-server died: {signal.SIGILL.name}"),
        (None, "llama-server is not there"),
    ],
)
def test_a_peer_that_does_not_start_says_why(code: str | None, failure: str, tmp_path: Path) -> None:
    from serving.load import closed
    from serving.servers import llama_server
    from side_by_side.process import EngineError

    program = tmp_path / "llama-server"
    if code is not None:
        program.write_text(f"#!{sys.executable}\n{code}\n")
        program.chmod(0o755)
    with llama_server(program, tmp_path / "x.gguf", 2, 64, 1, tmp_path / "log") as peer:
        assert peer.failure is not None
        assert peer.failure.startswith(failure)
        with pytest.raises(EngineError, match=failure):
            closed(peer, prompts(8), 1, 1, "never sent")


def test_percentiles_and_ratios() -> None:
    from serving.load import Load
    from serving.table import load_row, percentiles

    assert percentiles([float(n) for n in range(1, 101)]) == (50.0, 95.0, 99.0)
    found = [Load(10.0, 1.0, (0.1, 0.3), (0.01,)), Load(30.0, 3.0, (0.2,), (0.03,))]
    row = load_row("pi-serve", "2 clients", found, [2.0, 3.0])
    assert (row.tokens_per_s, row.first_s[0], row.gap_s[2], row.ratios) == (20.0, 0.2, 0.03, (2.0, 3.0))
