"""What the pages claim of tests, messages, keys and pictures is so."""

import re
import runpy
import shlex
from typing import Any

import pytest
import typer
from support.documents import DOCS, blocks, commands, page
from support.paths import ROOT

TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_limit_names_its_tests() -> None:
    for part in re.split(r"^## ", page("questions.md"), flags=re.M)[1:]:
        assert TEST.search(part), part.splitlines()[0]


@pytest.mark.parametrize(("path", "name"), sorted(set(TEST.findall(page("questions.md")))))
def test_a_named_test_exists(path: str, name: str) -> None:
    assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_messages_that_are_explained_exist() -> None:
    sources = "".join(
        p.read_text(encoding="utf-8") for room in ("pi_compile", "pi_runtime") for p in ROOT.glob(f"{room}/**/*.py")
    )
    messages = re.findall(r"^\| `([^`]+)`", page("how-to/troubleshoot.md"), re.M)
    assert len(messages) > 20
    # Whoever shows a message spells its settings: the source has the words between them.
    words = {message: re.split(r"--[a-z-]+(?: cpu)?", message.removeprefix(": ")) for message in messages}
    assert [message for message in messages if not all(part in sources for part in words[message])] == []


def test_the_keys_of_a_machine_profile_are_documented() -> None:
    pytest.importorskip("pydantic")
    from pi_compile.machine.profile import Cpu, Disk, Gpu, Link, Machine

    rows = dict(re.findall(r"^\| (`.+?) \| ([\w, ]+) \| ", page("how-to/write-a-machine-profile.md"), re.M))
    found = {
        (key, part)
        for keys, parts in rows.items()
        for key in re.findall(r"`(\w+)`", keys)
        for part in parts.split(", ")
    }
    sections = {"cpu": Cpu, "gpu": Gpu, "link": Link, "disk": Disk}
    own = {(key, "the file") for key in Machine.model_fields if key not in sections}
    assert found == own | {(key, part) for part, section in sections.items() for key in section.model_fields}


def test_exit_codes_are_those_of_the_errors() -> None:
    from pi_runtime import errors
    from pi_runtime.errors import exit_codes

    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page("reference/output.md"), re.M)}
    assert listed == codes | {0, 1, 5, exit_codes.INTERRUPTED}


def test_flags_are_those_of_the_pages() -> None:
    """A new flag is a decision: a page tells of it. And no command on a page has a flag that is not there."""
    for name in ("torch", "transformers", "starlette"):
        pytest.importorskip(name)
    from pi_compile.cli.main import app as pi_compile
    from pi_runtime.commands import run, serve

    told = "\n".join(path.read_text(encoding="utf-8") for path in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    programs: dict[str, Any] = {"pi-compile": pi_compile, "pi-run": run.app, "pi-serve": serve.app}
    for program, app in programs.items():
        command = typer.main.get_command(app)
        options = [p for one in (command, *getattr(command, "commands", {}).values()) for p in one.params]
        options = [one for one in options if one.param_type_name == "option" and "completion" not in one.opts[0]]
        untold = [one.opts for one in options if not any(re.search(rf"{flag}\b(?!-)", told) for flag in one.opts)]
        assert untold == []
        named = {one.envvar: max(one.opts, key=len) for one in options if one.envvar}
        assert named == {f"PI_{flag[2:].upper().replace('-', '_')}": flag for flag in named.values()}
        flags = {flag for one in options for flag in one.opts} | {"--help", "--install-completion"}
        lines = [line for block in blocks(told) for line in commands(block.text) if line.startswith(program + " ")]
        named = {flag for line in lines for flag in re.findall(r" (--[a-z][a-z-]*)", line.partition(" -- ")[0])}
        assert named - flags == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_first_screen_has_the_figures_of_one_file() -> None:
    """`python docs/pictures/gain.py` writes the table and the picture."""
    gain = runpy.run_path(str(DOCS / "pictures" / "gain.py"))
    found, readme = gain["figures"](), (ROOT / "README.md").read_text(encoding="utf-8")
    assert gain["written"](readme, found) == readme
    assert gain["drawing"](found) == (DOCS / "pictures" / "gain.svg").read_text(encoding="utf-8")
    bars = [value for panel in found["panel"] for _, value in panel["bars"]]
    assert min(bars) < 1, "what is slower than llama.cpp is drawn too"


def test_values_of_flags_are_named_in_one_way() -> None:
    """`-h` and the commands' page say FILE, FOLDER, N, SIZE or TEXT, or the words that a flag takes."""
    for name in ("torch", "transformers", "starlette"):
        pytest.importorskip(name)
    from pi_compile.cli.main import app as pi_compile
    from pi_runtime import console
    from pi_runtime.commands import flood, model_cache, run, serve

    for app in (pi_compile, run.app, serve.app, model_cache.app, flood.app):
        program: Any = typer.main.get_command(app)
        for one in getattr(program, "commands", {"": program}).values():
            assert "-h" in program.context_settings["help_option_names"]
            records = [console.help_record(parameter, typer.Context(one)) for parameter in one.params]
            values = [record[0].partition(" --")[2] or record[0] for record in records if record is not None]
            kinds = {value.split(" ")[1] for value in values if " " in value}
            assert {kind for kind in kinds if "|" not in kind} <= {"FILE", "FOLDER", "N", "SIZE", "TEXT"}


def test_every_help_ends_with_examples_and_a_page() -> None:
    """Three at most, which parse; the page is there."""
    for name in ("torch", "transformers", "starlette"):
        pytest.importorskip(name)
    from pi_compile.cli.main import app as pi_compile
    from pi_runtime.commands import flood, model_cache, run, serve

    for program, apps in {
        "pi-compile": [pi_compile],
        "pi-run": [run.app, model_cache.app, flood.app],
        "pi-serve": [serve.app],
    }.items():
        commands: list[Any] = [typer.main.get_command(app) for app in apps]
        known = {name: one for command in commands for name, one in getattr(command, "commands", {}).items()}
        known |= {one.name: one for one in commands if one.name == "flood"}
        for one in [*commands[:1], *known.values()]:
            lines = re.findall(rf"^  {program} (.+)$", one.epilog.partition("Examples:")[2], re.M)
            assert 1 <= len(lines) <= 3, one.name
            for name, *arguments in map(shlex.split, lines):
                called = known.get(name, commands[0])
                parser = called.make_parser(typer.Context(called))
                parser.parse_args(arguments if name in known else [name, *arguments])
            pages = re.findall(r"docs/[\w/-]+\.md", one.epilog.partition("More: ")[2])
            assert pages
            assert all((ROOT / path).is_file() for path in pages)


def test_every_flag_of_the_server_has_a_variable() -> None:
    pytest.importorskip("starlette")
    from pi_runtime.commands.serve import app

    options = [one for one in typer.main.get_command(app).params if one.param_type_name == "option"]
    without = {one.name for one in options if not one.envvar}
    assert without == {"version", "install_completion", "show_completion"}
