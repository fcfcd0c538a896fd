"""How errors are spelled: one setting, in the words of whoever reads of it."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import pi_compile
import pi_runtime
from pi_runtime.errors import DoesNotFitError, PiError, Setting, UsageError, keyword, read_error
from pi_runtime.errors.exit_codes import code_and_message, flag

FLAG = re.compile(r"(?:^|[\s`])--[a-z…]")
COMMAND = re.compile(
    r"\b(pi-compile|pi-run|pi-serve|accelerate launch|llama-gguf-split|ray start|start the server with|python -m) "
)
"""What stands before the flags of a whole command, which a remedy may quote."""


def error() -> PiError:
    return DoesNotFitError(
        "too small",
        setting=Setting("kv_budget", 9),
        expected=("at most ", Setting("ram_budget"), ", 7 bytes"),
        remedy=(Setting("context", 64), ", or a smaller ", Setting("max_tokens")),
    )


def test_python_reads_keywords() -> None:
    assert str(error()) == (
        "kv_budget=9: too small\n  expected: at most ram_budget, 7 bytes\n  try: context=64, or a smaller max_tokens"
    )
    assert keyword(Setting("mode", "sparse")) == "mode='sparse'"
    assert keyword(Setting("output", Path("a.pi"))) == "output='a.pi'"


def test_the_command_line_reads_flags() -> None:
    assert code_and_message(error()) == (
        4,
        "error: --kv-budget 9B: too small\n  expected: at most --ram-budget, 7 bytes\n"
        "  try: --ctx-size 64, or a smaller --max-tokens",
    )
    assert flag(Setting("top_p")) == "--top-p"
    assert flag(Setting("output", "a.pi")) == "-o a.pi"
    assert flag(Setting("vram_budget", 3 << 20)) == "--vram-budget 3MiB"


def test_a_setting_may_stand_alone() -> None:
    found = UsageError(setting=Setting("slots", 0), expected="1 or more")
    assert found.message(flag) == "--slots 0\n  expected: 1 or more"
    assert found.setting == Setting("slots", 0)
    assert UsageError("no setting is wrong").setting is None


def test_braces_and_long_texts_stay_as_they_are() -> None:
    found = PiError(("{a} ", Setting("stop", "{b}")), found="x" * 30_000)
    assert found.message(flag).startswith("{a} --stop {b}\n  found: xxx")
    assert found.message(flag).endswith("… (30,000 characters)")


def test_a_file_is_named_by_its_path_or_by_its_setting() -> None:
    gone = FileNotFoundError()
    assert str(read_error(Path("a.txt"), gone, "name one")) == "a.txt: no such file\n  try: name one"
    by_setting = read_error(Setting("prompts", Path("a.txt")), gone, "name one")
    assert by_setting.message(flag) == "--prompts a.txt: no such file\n  try: name one"


def test_an_error_crosses_processes_as_its_message() -> None:
    assert str(pickle.loads(pickle.dumps(error()))) == str(error())  # noqa: S301  our own


def _texts(path: Path) -> list[str]:
    """The string literals of a module, without its docstrings; an f-string has `…` for its values."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            found.append(node.value)
    return found


@pytest.mark.parametrize("package", [pi_runtime, pi_compile], ids=lambda package: package.__name__)
def test_the_library_knows_no_flag(package: object) -> None:
    root = Path(package.__file__).parent  # type: ignore[attr-defined]
    knows = {"cli", "commands", "console.py", "exit_codes.py", "__main__.py"}
    modules = [path for path in root.rglob("*.py") if not knows & set(path.relative_to(root).parts)]
    assert len(modules) > 100
    found = {
        f"{path.relative_to(root)}: {text}"
        for path in modules
        for text in _texts(path)
        if FLAG.search(text) and not COMMAND.search(text)
    }
    assert found == set()
