"""The CPU benchmark's arithmetic: ratios and shares are taken within a round, and a dead engine is told."""

import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from side_by_side import rounds

    return rounds


class Scripted:
    """An engine on a machine whose memory is `speed()` times as fast; `bytes_per_token` bytes at `share` of it."""

    def __init__(self, speed: Callable[[], float], nbytes: float, share: float) -> None:
        self._speed, self._nbytes, self._share = speed, nbytes, share

    def ask(self, do: str, tokens: int, **_: Any) -> dict[str, Any]:
        second = self._nbytes / (self._share * self._speed())
        told = {"bytes_per_token": self._nbytes, "density": 0.5, "read": 0.5, "cache_bytes": self._nbytes}
        return told | {"seconds": [second] * tokens if do == "decode" else second * tokens}


def test_ratios_do_not_depend_on_the_memory_speed_of_a_round(
    rounds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds: list[float] = []

    def read_bandwidth(nbytes: int, threads: int) -> float:
        speeds.append(30e9 if len(speeds) % 3 else 60e9)
        return speeds[-1]

    monkeypatch.setattr(rounds, "read_bandwidth", read_bandwidth)
    contenders = [
        rounds.Contender("pi", "f16", "predicted", "portable", Scripted(lambda: speeds[-1], 1e9, 0.9)),
        rounds.Contender("llama.cpp", "f16", "dense", None, Scripted(lambda: speeds[-1], 2e9, 0.6)),
    ]
    own, peer = rounds.decode_rows(contenders, context=64, rounds=5, tokens=3, parameters=1)
    assert own.ratio_to_llama_cpp == pytest.approx(3)
    assert peer.ratio_to_llama_cpp == 1
    assert own.share_of_limit == pytest.approx(0.9)
    assert own.share_with_cache == pytest.approx(1.8)
    # The first round is not counted.
    assert own.bandwidth == statistics.median(speeds[1:])
    assert own.tokens_per_s == pytest.approx(0.9 * own.bandwidth / 1e9)
    assert (own.density, own.phase, own.tokens) == (0.5, "decode", 64)


def test_prefill_counts_all_tokens_of_a_prompt(rounds: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "read_bandwidth", lambda *_: 10e9)
    alone = rounds.Contender("pi", "q8", "dense", "avx2", Scripted(lambda: 10e9, 1e8, 1.0))
    (row,) = rounds.prefill_rows([alone], tokens=64, rounds=2, parameters=1)
    assert row.tokens_per_s == pytest.approx(100)
    assert (row.ratio_to_llama_cpp, row.density, row.phase) == (None, 1.0, "prefill")


def test_an_engine_that_dies_is_named(rounds: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    from side_by_side.process import Worker

    with Worker("no_such_engine") as worker, pytest.raises(RuntimeError, match="no_such_engine: ended with code 1"):
        worker.ask("decode", tokens=1)
    assert "no_such_engine" in capfd.readouterr().err
