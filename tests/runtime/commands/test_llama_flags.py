"""Flags of llama.cpp, which its users bring along, get an error that says what to write here."""

import re
import shlex
from typing import Any

import pytest
import typer
from support.commands import USAGE
from support.documents import page

pytest.importorskip("starlette")

from pi_runtime import console
from pi_runtime.commands import run, serve
from pi_runtime.commands.options import LLAMA_CPP

APPS = {"pi-run": run.app, "pi-serve": serve.app}


def options(app: typer.Typer) -> set[str]:
    command: Any = typer.main.get_command(app)
    return {name for one in command.params for name in one.opts}


@pytest.mark.parametrize(
    ("program", "name"),
    [(program, name) for program in APPS for name in sorted(LLAMA_CPP.keys() - options(APPS[program]))],
)
def test_what_to_write_is_said(program: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([name, "1"], [f"{name}=1"], ["--threads", "2", name]):
        assert console.run(APPS[program], ["model.gguf", *given]) == USAGE
        assert capsys.readouterr().err == f"error: {name} is a flag of llama.cpp\n  try: {LLAMA_CPP[name]}\n"


def test_what_is_to_be_written_is_there() -> None:
    ours = set().union(*map(options, APPS.values()))
    for said in LLAMA_CPP.values():
        assert set(re.findall(r"(?<!\w)--?[a-z][a-z-]+", said)) <= ours, said


def test_the_page_and_the_table_say_the_same() -> None:
    """Each flag in the page's column of llama.cpp's is ours too, or has its line here."""
    table = page("how-to/from-llama-cpp.md").partition("| llama.cpp | here |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    flags = {word for cell in cells for code in re.findall(r"`(.+?)`", cell) for word in shlex.split(code)}
    flags = {word for word in flags if word.startswith("-")}
    assert len(flags) > 20
    assert flags <= LLAMA_CPP.keys() | set().union(*map(options, APPS.values()))


@pytest.mark.parametrize("arguments", [["-p", "-c"], ["-p", "--temp"], ["--prompt=-ngl"], ["-n", "3", "-p", "-m"]])
def test_a_value_is_no_flag(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(run.app, ["none.pi", *arguments]) != 0
    assert "llama.cpp" not in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "says"), [("-n", "--max-tokens"), ("-p", "--prompt")])
def test_what_one_of_the_programs_has(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(serve.app, ["model.pi", argument, "1"]) == USAGE
    assert says in capsys.readouterr().err
    assert argument in options(run.app)
