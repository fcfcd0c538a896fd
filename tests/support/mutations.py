"""Plants small faults at random places of both packages, one at a time, and runs the tests of the room: which notice?

python tests/support/mutations.py [--seed N] [--count 60] [--seconds 60] [--minutes 60] [--jobs N] [--within FOLDER …]
    [--record FILE]

A fault is another operator, another bound, another constant, or a call that is dropped. Each is tried in a copy of the
tree, whose own tests must pass. Prints the seed, each fault with what came of it, and the share that was caught. With a
record, a session that ended goes on with its seed, and tries no fault again. tests/mutations/harmless.toml lists faults
that change nothing a test could see, each with its reason: they are printed and not counted.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

PACKAGES = {"pi_runtime": "runtime", "pi_compile": "compile"}
"""Each package, and where its tests are."""
WANTED = 0.85
"""Least share that is caught."""
SWAPPED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "+"), ast.BitAnd: ("&", "|"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
BOUNDS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
HARMLESS = Path("tests/mutations/harmless.toml")
NAMING = 6
"""Most files of tests that are run because they name what is changed."""
SILENT = {"strict", "help", "stacklevel"}
"""Keyword arguments of which nothing depends on the value in code that works."""


@dataclass(frozen=True)
class Mutation:
    """One fault: bytes [start, end) of a file, and what stands there instead."""

    path: Path
    kind: str
    line: int
    start: int
    end: int
    instead: bytes

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.instead + source[self.end :]

    def lines(self, root: Path) -> tuple[str, str]:
        """The line, or lines, without the fault and with it."""
        source = (root / self.path).read_bytes()
        one, two = source[: self.start].rfind(b"\n") + 1, source.find(b"\n", self.end)
        was, now = source[one:two], self.applied(source)[one : two + len(self.instead) - (self.end - self.start)]
        return " ".join(was.decode().split()), " ".join(now.decode().split())

    def described(self, root: Path) -> str:
        return f"{self.path}:{self.line} {self.kind}: {' → '.join(self.lines(root))}"

    def harmless(self, root: Path, known: Sequence[Mapping[str, str]]) -> str | None:
        """The reason why no test can see it; None where none is known."""
        was, now = self.lines(root)
        found = {"path": self.path.as_posix(), "was": was, "now": now}
        return next((one["reason"] for one in known if found.items() <= one.items()), None)


def mutations(path: Path, source: bytes) -> Iterator[Mutation]:
    """Every fault that can be planted in a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutation(kind: str, begin: tuple[int, int], end: tuple[int, int], was: str, now: str) -> Iterator[Mutation]:
        low, high = (starts[line - 1] + column for line, column in (begin, end))
        pattern = rb"\s+".join(re.escape(part).encode() for part in was.split())
        if found := re.compile(pattern).search(source, low, high):
            yield Mutation(path, kind, begin[0], found.start(), found.end(), now.encode())

    for node in _nodes(ast.parse(source)):
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPPED:
                kind = "bound" if isinstance(op, BOUNDS) else "operator"
                yield from mutation(kind, _end(node.left), _begin(node.comparators[0]), *SWAPPED[type(op)])
            case ast.BinOp() if type(node.op) in SWAPPED:
                yield from mutation("operator", _end(node.left), _begin(node.right), *SWAPPED[type(node.op)])
            case ast.BoolOp():
                yield from mutation("operator", _end(node.values[0]), _begin(node.values[1]), *SWAPPED[type(node.op)])
            case ast.UnaryOp(op=ast.Not()):
                yield from mutation("operator", _begin(node), _begin(node.operand), "not", "")
            case ast.Constant(value=bool(value)):
                yield from mutation("constant", _begin(node), _end(node), str(value), str(not value))
            case ast.Constant(value=int() | float()):
                text = source[starts[node.lineno - 1] + node.col_offset :][: node.end_col_offset - node.col_offset]  # type: ignore[operator]
                yield from mutation("constant", _begin(node), _end(node), text.decode(), f"({text.decode()} + 1)")
            case ast.Expr(value=ast.Call() | ast.Await()):
                low, high = (starts[line - 1] + column for line, column in (_begin(node), _end(node)))
                yield Mutation(path, "dropped call", node.lineno, low, high, b"pass")


def _begin(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node whose change a user could notice: no annotations, assertions, texts of errors, or decorators."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg in SILENT:
                continue
            if isinstance(child, ast.AST) and not isinstance(child, ast.Assert | ast.JoinedStr):
                yield from _nodes(child)


def room_of(path: Path) -> str:
    """The package's room: a folder or a module."""
    return "/".join(path.with_suffix("").parts[:2])


def chosen_tests(root: Path, path: Path, line: int = 0) -> list[list[str]]:
    """A module's tests, then those of the package that name what the line is in, then all of the room's.

    Of those that name it, files with the innermost name come first; all of the package's tests where none is found.
    Each list is collected for itself, because that may take longer than the tests of a module.
    """
    package, *folders, name = path.with_suffix("").parts
    base, own, room = root / "tests" / PACKAGES[package], f"test_{name.strip('_')}.py", (*folders, name)[0]
    names = [*reversed(_definitions(ast.parse((root / path).read_bytes()), line)), ".".join((package, *folders, name))]
    texts = {p: p.read_text(encoding="utf-8") for p in sorted(base.rglob("test_*.py"))}
    groups = (
        [base.joinpath(*folders, own), base / own],
        [p for one in names for p, text in texts.items() if re.search(rf"\b{re.escape(one)}\b", text)][:NAMING],
        # The disk tier's executor is tested beside its rows.
        [base / room, base / f"test_{room}.py", *(base / word for word in name.split("_"))],
    )
    found, seen = [], set[Path]()
    for group in groups:
        found.append([p.relative_to(root).as_posix() for p in dict.fromkeys(group) if p.exists() and p not in seen])
        seen.update(group)
    return [group for group in found if group] or [[base.relative_to(root).as_posix()]]


def _definitions(tree: ast.AST, line: int) -> list[str]:
    """Names of the functions and classes around a line, outermost first."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        found += _definitions(node, line)
    return [name for name in found if not name.startswith("__")]


def drawn(root: Path, within: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """Room after room in random order; in a room a kind of fault, and then one of these."""
    rng, rooms = random.Random(seed), dict[str, dict[str, list[Mutation]]]()
    for file in sorted(file for folder in within for file in _files(root / folder)):
        path = file.relative_to(root)
        for m in mutations(path, file.read_bytes()):
            rooms.setdefault(room_of(path), {}).setdefault(m.kind, []).append(m)
    found: list[Mutation] = []
    while rooms and len(found) < count:
        for room in rng.sample(sorted(rooms), len(rooms)):
            kinds = rooms[room]
            own = kinds[rng.choice(sorted(kinds))]
            found.append(own.pop(rng.randrange(len(own))))
            rooms[room] = kinds = {kind: left for kind, left in kinds.items() if left}
            if not kinds:
                del rooms[room]
    return found[:count]


def _files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else [p for p in folder.rglob("*.py") if p.name != "__main__.py"]


class Copies:
    """Copies of the tree, one for each job, in which faults are planted one at a time."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self._free: Queue[Path] = Queue()
        names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(names, cwd=root, capture_output=True, check=True)
        for job in range(jobs):
            copy = folder / str(job)
            for name in filter(None, listed.stdout.decode().split("\0")):
                if (root / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, copy / name)
            self._free.put(copy)

    def caught(self, m: Mutation, tests: Sequence[str], seconds: float) -> bool | None:
        """Whether tests fail with it; None: they took too long."""
        until = time.monotonic() + seconds
        with self.one() as copy:
            file = copy / m.path
            before = file.read_bytes()
            try:
                file.write_bytes(m.applied(before))
                groups = [list(tests)] if tests else chosen_tests(copy, m.path, m.line)
                for chosen, group in itertools.product(("not slow", "slow"), groups):
                    arguments = ["--timeout", str(seconds / 2), "-m", chosen, *group]
                    code = run_tests(arguments, copy, until - time.monotonic())
                    if code is None:
                        return None
                    if code not in (0, 5):  # 5: there are no such tests
                        return True
                return False
            finally:
                file.write_bytes(before)

    @contextlib.contextmanager
    def one(self) -> Iterator[Path]:
        """A copy that nobody else uses meanwhile."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def run_tests(
    arguments: Sequence[str], folder: Path, seconds: float, more: Mapping[str, str] | None = None
) -> int | None:
    """Exit code of pytest in a copy, with `more` in its environment; None: it took too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    paths = os.pathsep.join([str(folder), str(folder / "tests")])
    env = {**os.environ, **(more or {}), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    # A session of its own: processes that tests start end with it.
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


class Record:
    """What came of the faults of one seed, as lines of JSON in a file; without a file it keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = [] if path is None or not path.exists() else path.read_text().splitlines()
        head, *found = [json.loads(line) for line in lines] or [None]
        self.seed: int | None = head
        self.found: dict[str, bool | None] = dict(found)

    def begin(self, seed: int) -> None:
        """Keep the seed; faults of another one are forgotten."""
        if self.seed != seed:
            self.seed, self.found = seed, {}
            if self._path is not None:
                self._path.write_text(f"{seed}\n")

    def add(self, fault: str, caught: bool | None) -> None:
        self.found[fault] = caught
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([fault, caught]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="the record's, or any")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60, help="of a room's tests for each fault")
    parser.add_argument("--minutes", type=float, default=60, help="after which no fault is begun")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--within", nargs="+", default=list(PACKAGES), help="folders or files to plant faults in")
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run in place of the room's")
    parser.add_argument("--record", type=Path, help="a file of what came of each fault, to go on from")
    a = parser.parse_args()
    root, until, record = Path.cwd(), time.monotonic() + 60 * a.minutes, Record(a.record)
    seed = next(s for s in (a.seed, record.seed, random.randrange(1 << 32)) if s is not None)
    record.begin(seed)
    chosen = drawn(root, a.within, a.count, seed)
    print(f"seed {seed}, {len(chosen)} faults", flush=True)
    said = {True: "caught", False: "NOT CAUGHT", None: "NOT CAUGHT in time"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(a.jobs) as pool:
        copies = Copies(root, Path(folder), a.jobs)
        known = (
            tomllib.loads((root / HARMLESS).read_text(encoding="utf-8"))["fault"] if (root / HARMLESS).exists() else []
        )

        def one(m: Mutation) -> None:
            fault = m.described(root)
            if (reason := m.harmless(root, known)) is not None:
                print(f"harmless, {reason}: {fault}", flush=True)
                return
            if fault not in record.found and time.monotonic() < until:
                record.add(fault, copies.caught(m, a.tests, a.seconds))
            if fault in record.found:
                print(f"{said[record.found[fault]]}: {fault}", flush=True)

        list(pool.map(one, chosen))
    found = list(record.found.values())
    share = found.count(True) / max(1, len(found))
    print(f"{found.count(True)} of {len(found)} faults were caught: {share:.0%}; wanted {WANTED:.0%}")
    sys.exit(share < WANTED)


if __name__ == "__main__":
    main()
