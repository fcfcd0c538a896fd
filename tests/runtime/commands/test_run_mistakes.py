"""Mistakes of a user of `pi-run` that no table of messages can hold, and never a traceback unasked."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripted import scripted_artifact

from pi_runtime import console
from pi_runtime.commands.options import MODEL_FLAGS
from pi_runtime.commands.run import app
from pi_runtime.engine.generation import Generation

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "a", "--temperature", "warm"], "'--temperature'"),
        (["-p", "a", "--device", "cuda:0"], "--device cuda:0"),
        (["-p", "a", "--promt", "b"], "No such option"),
        (["-p"], "requires an argument"),
        (["-p", "a", "b.pi"], "unexpected extra argument"),
        (["-p", "a", "--system", "Be brief."], "--system goes with --chat alone"),
        (["-p", "a", "--slots", "8"], "--slots goes with --prompts alone"),
        (["--chat", "--piece", "64"], "--piece goes with --prompts alone"),
        (["-p", "a", "--prompt-tokens", "8"], "--prompt-tokens goes with --bench alone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_messages_of_libraries_and_machines(run: Run, alphabet: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(alphabet, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")


def test_prompts_that_are_not_there(run: Run, alphabet: Path, tmp_path: Path) -> None:
    code, out, err = run(alphabet, "--prompts", tmp_path / "none.jsonl")
    assert (code, out) == (3, "")
    assert f"--prompts {tmp_path / 'none.jsonl'}: no such file\n  try: " in err


def test_no_artifact_named(run: Run) -> None:
    code, _, err = run("-p", "a")
    assert code == 2
    assert "missing argument 'model'" in err.lower()


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
    monkeypatch.setattr("pi_runtime.engine.loading.open_model", broken)
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


def test_an_error_beside_json_is_json(run: Run) -> None:
    code, out, err = run("nowhere.pi", "-p", "x", "--json")
    found = json.loads(err.splitlines()[-1])
    assert (code, out, found["exit_code"]) == (3, "", 3)
    assert found["error"].startswith("nowhere.pi: no such file\n  try: ")


def test_options_are_shown_by_group_and_values_completed(run: Run) -> None:
    text = run("-h")[1]
    assert text == run("--help")[1]
    assert text.splitlines()[0].endswith(" [OPTIONS] MODEL")
    assert text.endswith("docs/tutorials/larger-than-memory.md\n")
    assert all(f"\n{title}:\n" in text for title in ("Commands", "Examples"))
    places = [
        text.index(words)
        for words in ("Arguments:", "What to do:", "--chat", "--bench:", "--batches", "--verify", "  --json ")
    ]
    assert places == sorted(places)
    complete = MODEL_FLAGS["mode"].autocompletion
    assert complete is not None
    assert complete() == ["auto", "dense", "gate", "predicted"]
