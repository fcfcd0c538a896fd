"""The mistakes a user of `pi-run` makes: exit code and message of each, and never a traceback unasked."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from support.scripted import scripted_artifact

from pi_runtime import console
from pi_runtime.cli import app
from pi_runtime.generation import Generation

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompt TEXT or --chat"),
        (["-p", "a", "--chat"], "give either --prompt TEXT or --chat"),
        (["--chat", "--json"], "--chat does not go with --json"),
        (["-p", "a", "--mode", "sparse"], "--mode sparse: unknown mode\n  expected: auto, dense, gate, predicted"),
        (["-p", "a", "--mode", "predicted"], "the artifact has no predictors"),
        (["-p", "a", "--device", "cuda:0"], "--device cuda:0"),
        (["-p", "a", "--device", "gpu"], "--device gpu: unknown device"),
        (["-p", "a", "--vram-budget", "much"], "--vram-budget much: not a size"),
        (["-p", "a", "--vram-budget", "1GiB", "--device", "cpu"], "--vram-budget does not go with --device cpu"),
        (["-p", "a", "--temperature", "-1"], "--temperature -1"),
        (["-p", "a", "--temperature", "nan"], "--temperature nan"),
        (["-p", "a", "--temperature", "warm"], "'--temperature'"),
        (["-p", "a", "--top-p", "1.5"], "--top-p 1.5"),
        (["-p", "a", "--top-k", "-3"], "--top-k -3"),
        (["-p", "a", "--min-p", "2"], "--min-p 2"),
        (["-p", "a", "--repetition-penalty", "0"], "--repetition-penalty 0"),
        (["-p", "a", "--seed", "-1"], "--seed -1"),
        (["-p", "a", "--max-tokens", "0"], "--max-tokens 0"),
        (["-p", "a", "--ctx-size", "65"], "--ctx-size 65\n  expected: 2 to 64"),
        (["-p", "a", "--ctx-size", "1"], "--ctx-size 1"),
        (["-p", "a", "--threads", "0"], "--threads 0"),
        (["-p", "a", "--threads", str(numba.config.NUMBA_NUM_THREADS + 1)], "NUMBA_NUM_THREADS sets the most"),
        (["-p", "a", "--stop", ""], "--stop: an empty stop string"),
        (["-p", "a", "--promt", "b"], "No such option"),
        (["-p"], "requires an argument"),
        (["-p", "a", "b.pi"], "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage(run: Run, alphabet: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(alphabet, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")


@pytest.mark.parametrize("arguments", [["--device", "stand-in"], ["--vram-budget", "1GiB"]], ids=" ".join)
def test_without_a_placement_nothing_fits(run: Run, alphabet: Path, arguments: list[str]) -> None:
    code, out, err = run(alphabet, "-p", "a", *arguments)
    assert (code, out) == (4, "")
    assert "holds no placement" in err


def test_no_artifact_named(run: Run) -> None:
    code, _, err = run("-p", "a")
    assert code == 2
    assert "missing argument 'artifact'" in err.lower()


def damaged(good: Path, bad: Path, how: str) -> Path:
    data = good.read_bytes()
    bad.write_bytes({"text": b"no artifact", "empty": b"", "cut": data[:-500], "headless": data[500:]}[how])
    return bad


@pytest.mark.parametrize("how", ["text", "empty", "cut", "headless"])
def test_what_is_no_artifact(run: Run, alphabet: Path, tmp_path: Path, how: str) -> None:
    path = damaged(alphabet, tmp_path / "bad.pi", how)
    code, out, err = run(path, "-p", "a")
    assert (code, out) == (3, "")
    assert err.startswith(f"error: {path}: ")


def test_no_such_file(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "none.pi", tmp_path / "none" / "none.pi", tmp_path):
        code, out, err = run(path, "-p", "a")
        assert (code, out) == (3, "")
        assert str(path) in err


def test_the_name_meant_is_named(run: Run, alphabet: Path) -> None:
    assert f"did you mean {alphabet}?" in run(alphabet.with_name("alfabet.pi"), "-p", "a")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "a" * 64], "the prompt has 64 tokens\n  expected: fewer than the context of 64"),
        (["-p", "abc", "--ctx-size", "3"], "raise --ctx-size"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "\udcff"], "not Unicode text"),
    ],
    ids=["long", "long for --ctx-size", "empty", "not Unicode"],
)
def test_prompts_that_cannot_be_run(run: Run, alphabet: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(alphabet, *arguments)
    assert (code, out) == (3, "")
    assert message in err


@pytest.mark.parametrize("flags", [("-p", "-"), ("--chat",)])
def test_stdin_that_is_no_text(
    alphabet: Path,
    flags: tuple[str, ...],
    no_variables: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert console.run(app, [str(alphabet), *flags]) == 3
    assert "stdin cannot be decoded" in capsys.readouterr().err


def test_a_talk_without_a_template(run: Run, random_path: Path) -> None:
    code, _, err = run(random_path, "--chat", stdin="hi\n")
    assert code == 3
    assert "has no chat template" in err


def test_a_template_that_fails(run: Run, tmp_path: Path) -> None:
    files = {"chat_template.jinja": b"\n{{ raise_exception('no system message please') }}"}
    path = scripted_artifact(tmp_path / "a.pi", {}, files=files)
    code, _, err = run(path, "--chat", stdin="hi\n")
    assert code == 3
    assert "the chat template failed at line 2" in err
    assert "no system message please" in err


def broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("division by zero")


def test_a_fault_of_our_own(run: Run, alphabet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_runtime.model.load", broken)
    code, out, err = run(alphabet, "-p", "a")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: internal error: ZeroDivisionError: division by zero",
        "  try: run again with --debug",
    ]


@pytest.mark.parametrize("value", ["--debug", "PI_DEBUG=1", "PI_DEBUG=0"])
def test_a_traceback_on_demand(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    flags = [value] if value == "--debug" else []
    if not flags:
        monkeypatch.setenv(*value.split("=", 1))
    code, _, err = run(tmp_path / "none.pi", "-p", "a", *flags)
    assert code == 3
    assert ("Traceback" in err) == (value != "PI_DEBUG=0")
    assert "no such file" in err


def test_interrupted(run: Run, alphabet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Generation) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "__next__", interrupt)
    code, _, err = run(alphabet, "-p", "a")
    assert code == 130
    assert err.endswith("interrupted\n")
