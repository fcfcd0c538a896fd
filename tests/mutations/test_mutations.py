"""Faults are planted where they count, and the session tells which ones tests notice."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.mutations import HARMLESS, Mutation, chosen_tests, drawn, mutations
from support.paths import ROOT

SCRIPT = ROOT / "tests/support/mutations.py"


def planted(text: str) -> list[tuple[str, str]]:
    """(kind, text with the fault)"""
    source = text.encode()
    return [(m.kind, m.applied(source).decode()) for m in mutations(Path("a.py"), source)]


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("é = a < b", "bound", "é = a <= b"),
        ("x = (a\n  >= b)", "bound", "x = (a\n  > b)"),
        ("x = a is  not b", "operator", "x = a is b"),
        ("x = a - b", "operator", "x = a + b"),
        ("x = a and b", "operator", "x = a or b"),
        ("x = not a", "operator", "x =  a"),
        ("x = 0x10", "constant", "x = (0x10 + 1)"),
        ("x = True", "constant", "x = False"),
        ("f(a)", "dropped call", "pass"),
        ("async def f():\n  await g()", "dropped call", "async def f():\n  pass"),
    ],
)
def test_kinds_of_faults(text: str, kind: str, wanted: str) -> None:
    assert (kind, wanted) in planted(text)


@pytest.mark.parametrize(
    "text",
    ["x: Literal[1] = a", "assert a < 1", "raise E(1)", "zip(a, b, strict=True)[x]", "'text'", "@f(1)\ndef g(): ..."],
)
def test_what_nobody_would_notice_stays(text: str) -> None:
    assert planted(text) == []


def tree(root: Path) -> Path:
    """A package with a room whose tests look at one of two functions."""
    for path, text in {
        "pi_runtime/__init__.py": "",
        "pi_runtime/room.py": "def seen(a, b):\n    return a < b\n\n\ndef unseen(a, b):\n    return a + b\n",
        "tests/runtime/test_room.py": "from pi_runtime.room import seen\n\n\n"
        "def test_seen():\n    assert not seen(1, 1)\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert drawn(root, ["pi_runtime"], 9, 1) == drawn(root, ["pi_runtime"], 9, 1)
    assert all(isinstance(m, Mutation) for m in drawn(root, ["pi_runtime"], 9, 1))
    assert len(drawn(root, ["pi_runtime"], 1, 2)) == 1


def test_a_modules_tests_come_first_then_those_that_name_what_is_changed() -> None:
    path = Path("pi_runtime/text/grammar.py")
    line = (ROOT / path).read_text().splitlines().index("    def of(") + 1
    own, naming, room = chosen_tests(ROOT, path, line)
    assert (own, room) == (["tests/runtime/test_grammar.py"], ["tests/runtime/text"])
    assert naming
    assert all(re.search(r"\b(Grammar|of)\b", (ROOT / name).read_text()) for name in naming)
    assert chosen_tests(ROOT, Path("pi_compile/recipe.py"))[0] == ["tests/compile/test_recipe.py"]


def test_a_fault_that_changes_nothing_has_a_reason() -> None:
    """A line that is listed stands in the code as it is written there, or the list is out of date."""
    listed = tomllib.loads((ROOT / HARMLESS).read_text())["fault"]
    assert all(set(fault) == {"path", "was", "now", "reason"} for fault in listed)
    for fault in listed:
        source = (ROOT / fault["path"]).read_bytes()
        found = [m.harmless(ROOT, [fault]) for m in mutations(Path(fault["path"]), source)]
        assert fault["reason"] in found, fault


@pytest.mark.slow
def test_it_tells_what_is_not_caught_and_goes_on_from_its_record(tmp_path: Path, long: bool) -> None:
    command = [sys.executable, str(SCRIPT), "--jobs", "1", "--within", "pi_runtime", "--record", "record.jsonl"]
    root = tree(tmp_path)
    done = subprocess.run([*command, "--seed", "1"], cwd=root, capture_output=True, text=True, check=False)
    assert "\ncaught: pi_runtime/room.py:2 bound: return a < b → return a <= b\n" in done.stdout, done.stderr
    assert "\nNOT CAUGHT: pi_runtime/room.py:6 operator: return a + b → return a - b\n" in done.stdout
    assert done.stdout.endswith("1 of 2 faults were caught: 50%; wanted 85%\n")
    assert done.returncode == 1
    assert (root / "pi_runtime/room.py").read_text().count("a < b") == 1
    shutil.rmtree(root / "tests")  # what is tried now is not caught
    again = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout
    if not long:
        return
    other = subprocess.run([*command, "--seed", "2"], cwd=root, capture_output=True, text=True, check=False)
    assert other.stdout.startswith("seed 2, 2 faults\n")
    assert other.stdout != done.stdout.replace("seed 1", "seed 2")
