"""The CPU benchmark: ratios and shares are taken within a round, and a peer that fails becomes a row."""

import argparse
import contextlib
import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
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


FAKE_ENGINE = """
import os, signal, time

def reach(stage):
    at, _, deed = os.environ["FAKE_ENGINE"].partition(":")
    if stage == at:
        if deed == "hang":
            time.sleep(60)
        if deed == "raise":
            raise ValueError("no such model\\nand more")
        if deed == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, deed))

rounds = 0

def describe():
    return {"build": "AVX2 FMA"}

def open_model(**_):
    reach("load")

def decode(context, tokens):
    global rounds
    rounds += 1
    if rounds == 3:
        reach("decode")
    return {"seconds": [0.1] * tokens, "bytes_per_token": 1e9, "density": 1.0, "read": 1.0, "cache_bytes": 0.0}

def prefill(tokens):
    return {"seconds": 0.1, "bytes_per_token": 1e9}

reach("start")
HANDLERS = {f.__name__: f for f in (describe, open_model, decode, prefill)}
"""


@pytest.fixture
def compare(rounds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Rows of ours beside a fake llama.cpp that lives until a stage, as in "load:SIGILL"."""
    from side_by_side import peers

    (tmp_path / "fake_engine.py").write_text(FAKE_ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(rounds, "read_bandwidth", lambda *_: 10e9)

    def compare(fate: str, *, module: str = "fake_engine", limit_s: float = 60) -> list[Any]:
        monkeypatch.setenv("FAKE_ENGINE", fate)
        # Some package that is installed stands for the peer's.
        monkeypatch.setitem(peers.PEERS, "llama.cpp", (module, "pytest"))
        ours = rounds.Contender("pi", "q4", "dense", "avx2", Scripted(lambda: 10e9, 1e9, 1.0))
        with ExitStack() as stack:
            both = [ours, peers.open_peer("llama.cpp", "q4", stack, limit_s=limit_s, path="x", context=64)]
            sizes = {"rounds": 3, "parameters": 1}
            decoded = rounds.decode_rows(both, context=64, tokens=2, **sizes)
            return decoded + rounds.prefill_rows(both, tokens=64, **sizes)

    return compare


def test_a_peer_that_lives_is_a_base_for_ratios_and_tells_its_build(compare: Callable[..., list[Any]]) -> None:
    own, peer, _, prompt = compare("never")
    assert (own.ratio_to_llama_cpp, peer.ratio_to_llama_cpp) == (pytest.approx(1), 1)
    assert (peer.version, peer.build) == (f"pytest {pytest.__version__}", "AVX2 FMA")
    assert prompt.tokens_per_s == pytest.approx(640)


@pytest.mark.parametrize(
    ("fate", "failure"),
    [
        ("start:SIGILL", "llama.cpp died: SIGILL (illegal instruction) at start"),
        ("load:SIGILL", "llama.cpp died: SIGILL (illegal instruction) at load"),
        ("decode:SIGILL", "llama.cpp died: SIGILL (illegal instruction) at decode"),
        ("load:SIGKILL", "llama.cpp died: SIGKILL (killed) at load"),
        ("load:exit", "llama.cpp ended with code 3 at load"),
        ("load:raise", "llama.cpp failed at load: ValueError: no such model"),
    ],
)
def test_a_peer_that_dies_is_a_row_and_ours_are_kept(
    compare: Callable[..., list[Any]], fate: str, failure: str
) -> None:
    own, peer, own_prompt, peer_prompt = compare(fate)
    # The third request dies after a round that was measured: what it gave before is no base for a ratio.
    assert (own.tokens_per_s, own.ratio_to_llama_cpp) == (pytest.approx(10), None)
    assert (own_prompt.tokens_per_s, own_prompt.ratio_to_llama_cpp) == (pytest.approx(10), None)
    assert (peer.failure, peer.phase, peer.tokens, peer.engine) == (failure, "decode", 64, "llama.cpp")
    assert (peer_prompt.failure, peer_prompt.phase) == (failure, "prefill")
    assert peer.version == f"pytest {pytest.__version__}"
    assert peer.build == (None if fate.startswith("start") else "AVX2 FMA")


def test_a_peer_that_is_not_installed_is_a_row(compare: Callable[..., list[Any]]) -> None:
    _, peer, _, _ = compare("never", module="no_such_engine")
    assert peer.failure == "llama.cpp failed at start: ModuleNotFoundError: No module named 'no_such_engine'"


@pytest.mark.parametrize("stage", ["start", "load", "decode"])
def test_a_peer_that_hangs_is_ended_at_the_limit(compare: Callable[..., list[Any]], stage: str) -> None:
    began = time.monotonic()
    own, peer, _, _ = compare(f"{stage}:hang", limit_s=2)
    assert time.monotonic() - began < 30
    assert peer.failure == f"llama.cpp was ended: no answer within 2 s at {stage}"
    assert own.tokens_per_s == pytest.approx(10)


def test_a_failed_peer_stands_in_the_table_and_in_the_file(
    compare: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from side_by_side.table import print_rows, write_json

    rows = compare("load:SIGILL")
    capsys.readouterr()
    print_rows(rows)
    table = capsys.readouterr().out
    assert re.search(r"^pi +q4 +avx2 +dense .* decode +64 +10\.0 ", table, re.MULTILINE)
    assert re.search(r"^llama\.cpp +q4 +dense +decode +64  llama\.cpp died: SIGILL .* at load$", table, re.MULTILINE)
    assert table.count(f"llama.cpp: pytest {pytest.__version__}, build: AVX2 FMA\n") == 1
    write_json(tmp_path / "rows.json", rows)
    own, peer, *_ = json.loads((tmp_path / "rows.json").read_text())
    assert (own["tokens_per_s"], own["ratio_to_llama_cpp"]) == (pytest.approx(10), None)
    assert (peer["failure"], peer["build"]) == ("llama.cpp died: SIGILL (illegal instruction) at load", "AVX2 FMA")
    assert "tokens_per_s" not in peer


def test_where_ours_fails_there_is_nothing_to_compare(rounds: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from side_by_side.process import EngineError, Worker

    monkeypatch.setattr(rounds, "read_bandwidth", lambda *_: 10e9)
    with Worker("pi", "no_such_engine") as worker:
        contender = rounds.Contender("pi", "q4", "dense", "avx2", worker)
        with pytest.raises(EngineError, match="pi failed at decode: ModuleNotFoundError"):
            rounds.decode_rows([contender], context=64, rounds=3, tokens=2, parameters=1)


def test_a_child_that_died_before_it_was_asked_is_closed_quietly(
    rounds: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    from side_by_side.process import EngineError, Worker

    with Worker("pi", "no_such_engine") as worker:
        worker._process.wait()
        for _ in range(2):
            with pytest.raises(EngineError, match="no_such_engine"):
                worker.ask("decode", tokens=1)
    assert "no_such_engine" in capfd.readouterr().err


class Batched:
    """An engine whose steps take a second and a tenth more for each sequence, each round twice as long as the last."""

    def __init__(self, speed: float, dies_at: int | None = None) -> None:
        self._speed, self._dies_at, self._asked = speed, dies_at, dict[int, int]()

    def ask(self, do: str, batch: int, tokens: int, **_: Any) -> dict[str, Any]:
        from side_by_side.process import EngineError

        assert do == "decode_batch"
        if batch == self._dies_at:
            raise EngineError("died")
        self._asked[batch] = self._asked.get(batch, 0) + 1
        return {"seconds": [2 ** self._asked[batch] * (0.9 + 0.1 * batch) / self._speed] * tokens}


def batched(rounds: ModuleType, peer: Batched) -> list[Any]:
    from side_by_side.batches import batch_rows

    contenders = [
        rounds.Contender("pi", "q4", "dense", "avx2", Batched(2), {"name": "dense"}),
        rounds.Contender("pi", "q4", "predicted 1.5", "avx2", Batched(8), {"name": "predicted 1.5"}),
        rounds.Contender("llama.cpp", "q4", "dense", None, peer, may_fail=True),
    ]
    listed = {"predicted 1.5": [{"own": 0.1, "union": share, "least": 0.1, "most": 0.9} for share in (0.1, 0.3)]}
    return batch_rows(contenders, (1, 8), listed, context=64, tokens=2, rounds=3)


def test_rates_of_batches_are_compared_within_a_round(rounds: ModuleType) -> None:
    rows = batched(rounds, Batched(1))
    assert [(row.engine, row.mode, row.batch) for row in rows] == [
        ("pi", "dense", 1), ("pi", "dense", 8), ("pi", "predicted 1.5", 1), ("pi", "predicted 1.5", 8),
        ("llama.cpp", "dense", 1), ("llama.cpp", "dense", 8),
    ]  # fmt: skip
    for row, speed in zip(rows, (2, 2, 8, 8, 1, 1), strict=True):
        assert row.to_llama_cpp == (speed,) * 3
        # The first of four rounds is not counted.
        rate = row.batch * speed / (0.9 + 0.1 * row.batch)
        assert row.tokens_per_s == pytest.approx((rate / 4, rate / 8, rate / 16))
        assert row.to_alone == pytest.approx((1.0 if row.batch == 1 else 8 / 1.7,) * 3)
        assert row.to_smaller == (() if row.batch == 1 else row.to_alone)
    assert [row.shares and row.shares["union"] for row in rows] == [None, None, 0.1, 0.3, None, None]


def test_targets_of_batches(rounds: ModuleType) -> None:
    from side_by_side.batches import PairRow, targets

    pair = PairRow(what="ours ÷ theirs", format="q4", tokens_per_s=(9.0, 8.0, 10.0), base_tokens_per_s=(10.0,) * 3)
    found = list(targets(batched(rounds, Batched(1)), [pair], {"ours ÷ theirs": 0.97}))
    assert [(t.what.removeprefix("q4, "), t.wanted, t.reached) for t in found] == [
        ("dense, B = 1 ÷ llama.cpp dense", 1.0, True),
        ("predicted 1.5, B = 1 ÷ llama.cpp dense", 2.5, True),
        ("predicted 1.5, B = 8 ÷ alone", 3.0, True),
        ("predicted 1.5, B = 8 ÷ llama.cpp, B = 8", 1.5, True),
        ("dense, B = 8 ÷ B = 1", 1.0, True),
        ("predicted 1.5, B = 8 ÷ B = 1", 1.0, True),
        ("ours ÷ theirs", 0.97, False),
    ]


def test_a_peer_that_dies_in_a_batch_is_a_row(rounds: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    from side_by_side.batches import print_batch_rows, print_targets, targets

    rows = batched(rounds, Batched(1, dies_at=8))
    assert [row.failure for row in rows] == [None, None, None, None, None, "died"]
    assert [len(row.to_llama_cpp) for row in rows] == [3, 0, 3, 0, 3, 0]
    assert rows[1].to_alone == pytest.approx((8 / 1.7,) * 3)
    print_batch_rows(rows)
    print_targets(list(targets(rows, [], {})))
    out = capsys.readouterr().out
    assert re.search(r"^llama\.cpp +q4 +dense +8  died$", out, re.MULTILINE)
    assert "  not measured q4, predicted 1.5, B = 8 ÷ llama.cpp, B = 8: ≥ 1.5, found nothing\n" in out
    assert "  reached      q4, predicted 1.5, B = 8 ÷ alone: ≥ 3, found 4.71 (4.71–4.71)\n" in out


def test_a_worker_runs_another_checkout(rounds: ModuleType, tmp_path: Path) -> None:
    from side_by_side.process import Worker

    theirs = tmp_path / "tests" / "benchmarks"
    shutil.copytree(Path(__file__).parent / "side_by_side", theirs / "side_by_side")
    (tmp_path / "pi_runtime").mkdir()
    (tmp_path / "pi_runtime" / "__init__.py").write_text("who = 'theirs'\n")
    (theirs / "engine.py").write_text("import pi_runtime\nHANDLERS = {'who': lambda: pi_runtime.who}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with Worker("theirs", "engine", python=str(python)) as worker:
        assert worker.ask("who") == "theirs"


COMMON = {"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"}
AVX512 = {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        pytest.param({"sse2", "sse4_2", "avx"}, {"SSE42", "AVX"}, id="Sandy Bridge"),
        pytest.param(COMMON, {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"}, id="Haswell"),
        pytest.param(
            COMMON | {"avx_vnni"}, {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX_VNNI"}, id="Alder Lake"
        ),
        pytest.param(
            COMMON | AVX512 | {"avx512vbmi", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8"},
            {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX_VNNI"}
            | {"AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AMX_TILE", "AMX_INT8"},
            id="Sapphire Rapids",
        ),
        # VNNI's flag alone would bring AVX-512 with it.
        pytest.param(
            COMMON | {"avx512f", "avx512_vnni"}, {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"}, id="in part"
        ),
    ],
)
def test_llama_cpp_is_built_with_what_the_processor_has(rounds: ModuleType, flags: set[str], on: set[str]) -> None:
    from side_by_side.llama_cpp_build import cmake_arguments

    first, *switches = cmake_arguments(flags)
    assert first == "-DGGML_NATIVE=OFF"
    named = dict(switch.removeprefix("-DGGML_").split("=") for switch in switches)
    assert {name for name, value in named.items() if value == "ON"} == on
    # What is missing is switched off by name: ggml's default for it is on.
    assert {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"} <= named.keys()
    assert set(named.values()) <= {"ON", "OFF"}


def test_llama_cpp_keeps_its_tile_configuration(rounds: ModuleType, tmp_path: Path) -> None:
    from side_by_side.llama_cpp_build import patch

    source = tmp_path / "mmq.cpp"
    source.write_text("    tc.rows[0] = 8;\n\n    _tile_loadconfig(&tc);\n    done = true;\n")
    patch(source)
    barrier, call = source.read_text().splitlines()[2].split(") : ")[0], "_tile_loadconfig(&tc);"
    assert barrier.strip() == '__asm__ volatile("" : : "r"(&tc'
    assert call in source.read_text()
    source.write_text("_tile_loadconfig(&other);")
    with pytest.raises(RuntimeError, match="26954"):
        patch(source)


def test_off_x86_the_compiler_chooses(rounds: ModuleType) -> None:
    from side_by_side.llama_cpp_build import cmake_arguments

    assert cmake_arguments(set()) == ["-DGGML_NATIVE=ON"]


def test_llama_cpp_is_built_again_where_the_arguments_or_the_version_changed(
    rounds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from side_by_side import llama_cpp_build as build

    builds: list[tuple[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> None:
        if "--force-reinstall" in command:
            builds.append((command[-1], env["CMAKE_ARGS"].split()[-1]))

    monkeypatch.setattr(build, "sources_of", contextlib.nullcontext)
    monkeypatch.setattr(build.subprocess, "run", run)
    monkeypatch.setattr(build.sys, "prefix", str(tmp_path))
    for package, flags in [("x==1", {"avx512f"}), ("x==1", {"avx512f"}), ("x==1", set()), ("x==2", set())]:
        monkeypatch.setattr(build, "processor_flags", lambda flags=flags: flags)
        build.install(package)
    assert builds == [
        ("x==1", "-DGGML_AMX_INT8=OFF"),
        ("x==1", "-DGGML_NATIVE=ON"),
        ("x==2", "-DGGML_NATIVE=ON"),
    ]


def test_a_published_shape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sizes are the options' defaults; what stands behind it changes one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from side_by_side.shape import add_shape, decoder_of, head_share

    parser = argparse.ArgumentParser()
    add_shape(parser)
    found = decoder_of(parser.parse_args(["--shape", "Qwen3-0.6B"]))
    assert (found.n_layers, found.d_model, found.d_ff, found.vocab_size) == (28, 1024, 3072, 151936)
    assert (found.n_heads, found.n_kv_heads, found.head_dim) == (16, 8, 128)
    assert decoder_of(parser.parse_args(["--shape", "Qwen3-0.6B", "--layers", "2"])).n_layers == 2
    assert decoder_of(parser.parse_args([])).head_dim == 64
    one_layer = 1024 * (48 * 128 + 3 * 3072 * 0.5)
    head = 1024 * 151936
    assert head_share(found, 0.5) == pytest.approx(head / (head + 28 * one_layer))
    for name, why in (("Nobody-1B", "no published configuration"), ("Qwen3-30B-A3B", "mixture of experts")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--shape", name])
        assert why in capsys.readouterr().err
