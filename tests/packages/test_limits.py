"""How large files, classes and functions are, and how many arrows there are between rooms: limits that only fall.

Each list below names what is still above a limit. What is no longer above it is taken off its list, or the test fails.
"""

import ast
from collections.abc import Iterator

import pytest
from support.paths import ROOT

PACKAGES = ("pi_compile", "pi_runtime")
FILE_LINES, CLASS_LINES, FUNCTION_LINES, PARAMETERS = 700, 300, 60, 10
ROOMS = {"pi_compile": (22, 82), "pi_runtime": (16, 47)}
"""Most rooms of each package, and most arrows between them."""
ROOM_LINES = {
    ("pi_runtime/server",): 7100,
    ("pi_runtime/engine",): 6250,
    ("pi_runtime/execution", "pi_runtime/disk"): 5500,
    ("pi_runtime/kernels",): 9810,
    ("pi_runtime/cuda",): 4300,
    ("pi_compile/checkpoint",): 8240,
    ("pi_compile/sparsification",): 2650,
}
"""Most lines of rooms: what they had when this was written, rounded up to 50."""

LONG_FILES = set[str]()
LONG_CLASSES = set[str]()
LONG_FUNCTIONS = set[str]()
MANY_PARAMETERS = {
    # Keywords of the Python API and of commands, each with a default.
    "pi_compile/cli/artifact.py: evaluate",
    "pi_compile/pipeline/stages.py: pack",
    "pi_compile/pipeline/stages.py: place",
    "pi_compile/pipeline/stages.py: profile",
    "pi_compile/pipeline/stages.py: quantise",
    "pi_compile/pipeline/stages.py: train",
    "pi_runtime/commands/run.py: run",
    # To be mended.
    "pi_compile/checkpoint/families/fields.py: usual_decoder",
}
"""Functions with more than `PARAMETERS`, Triton's kernels apart."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees = dict[str, tuple[int, ast.Module]]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Lines and syntax of every file, by path."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found[path.relative_to(ROOT).as_posix()] = text.count("\n"), ast.parse(text)
    return found


def nodes(trees: Trees, *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path, (_, tree) in trees.items():
        yield from (
            (f"{path}: {getattr(node, 'name', '')}", node) for node in ast.walk(tree) if isinstance(node, kinds)
        )


def lines(node: ast.AST) -> int:
    assert isinstance(node, ast.ClassDef | Function)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def parameters(function: ast.AST) -> int:
    """How many a caller sees; those of Triton's kernels are the kernel's own affair."""
    assert isinstance(function, Function)
    if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    a = function.args
    names = [one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_files(trees: Trees) -> None:
    assert {path for path, (count, _) in trees.items() if count > FILE_LINES} == LONG_FILES


def test_classes(trees: Trees) -> None:
    found = nodes(trees, ast.ClassDef)
    assert {name for name, node in found if lines(node) > CLASS_LINES} == LONG_CLASSES


def test_functions(trees: Trees) -> None:
    found = nodes(trees, ast.FunctionDef, ast.AsyncFunctionDef)
    assert {name for name, node in found if lines(node) > FUNCTION_LINES} == LONG_FUNCTIONS


def test_parameters(trees: Trees) -> None:
    found = nodes(trees, ast.FunctionDef, ast.AsyncFunctionDef)
    assert {name for name, node in found if parameters(node) > PARAMETERS} == MANY_PARAMETERS


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_and_arrows(trees: Trees, package: str) -> None:
    rooms, arrows = set(), set()
    for path, (_, tree) in trees.items():
        if not path.startswith(f"{package}/"):
            continue
        room = path.split("/")[1].removesuffix(".py")
        rooms.add(room)
        arrows |= {(room, other) for other in imported(tree, package) if other != room}
    most_rooms, most_arrows = ROOMS[package]
    assert len(rooms - {"__init__", "__main__", "py"}) <= most_rooms
    assert len(arrows) <= most_arrows, sorted(arrows)


@pytest.mark.parametrize("rooms", ROOM_LINES, ids=" + ".join)
def test_lines_of_rooms(trees: Trees, rooms: tuple[str, ...]) -> None:
    inside = tuple(f"{room}/" for room in rooms)
    assert sum(count for path, (count, _) in trees.items() if path.startswith(inside)) <= ROOM_LINES[rooms]


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The rooms of a package that a module imports from, also where it is typed or run only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == package else [node.module]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith(f"{package}."))
