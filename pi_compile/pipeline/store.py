"""Results of stages on disk: nothing is computed twice, nothing stale is used, a killed stage resumes.

A result's name holds the digest of everything it depends on, so a result of that name is the right one. A stage
that is running works in a scratch folder of the same name. One process at a time works in a store; another waits.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import pi_compile
import pi_runtime
from pi_compile.checkpoint.families import registry

Result = TypeVar("Result")
_ROOTS = {"pi_compile": pi_compile, "pi_runtime": pi_runtime}
_MODULE = re.compile(r"pi_(compile|runtime)(\.\w+)+(:\w+)?")
"""A string that names a module, or something in it."""


def key_of(**inputs: Any) -> str:
    """Digest of a stage's inputs: plain values and digests of files."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def token_digest(tokens: np.ndarray[Any, Any]) -> str:
    """sha256 of token ids, whatever integers hold them."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


def code_digest(module: str) -> str:
    """sha256 of all code that a module may run: its own source and everything of ours that it imports.

    Where it reads checkpoints, the families of installed packages are included, with their versions and files. The
    digest keys this local store only; no artifact depends on it.
    """
    sources = sources_of(module)
    digest = hashlib.sha256()
    for name, path in sources.items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    if registry.__name__ in sources:
        for point in registry.installed():
            digest.update(f"{point.value} {point.dist and point.dist.version}".encode())
            for path in _files_of(point.module):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def sources_of(module: str) -> dict[str, Path]:
    """Source files by module name: `module` and what it imports of our two packages, in order of name.

    A string that names a module, as in a registry of what is loaded later, counts as an import of it.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if path is not None and name not in found:
            found[name] = path
            # An `__init__` only re-exports: what is imported from it is followed by name.
            waiting += _imports(path) if path.name != "__init__.py" or name == module else []
    return dict(sorted(found.items()))


def _source(name: str) -> Path | None:
    package, *rest = name.split(".")
    if package not in _ROOTS:
        return None
    stem = Path(_ROOTS[package].__file__ or "").parent.joinpath(*rest)
    return next((p for p in (stem / "__init__.py", stem.with_suffix(".py")) if p.is_file()), None)


def _files_of(module: str) -> list[Path]:
    """Python files of the package that an installed module belongs to, or of the module alone."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    if folders:
        return sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [Path(spec.origin)] if spec and spec.origin else []


def _imports(path: Path) -> Iterator[str]:
    """Modules that a source file imports, anywhere in it, or names in a string."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value.partition(":")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (_home(node.module, alias.name) for alias in node.names)


def _home(module: str, name: str) -> str:
    """The module that defines a name: re-exports in an `__init__` are followed."""
    path = _source(module)
    if path is not None and path.name == "__init__.py":
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
                return _home(node.module, name)
    submodule = f"{module}.{name}"
    return module if _source(submodule) is None else submodule


class Store:
    """One recipe's results in one folder. Use inside `with store.exclusive(…)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def exclusive(self, waiting: Callable[[str], None]) -> Iterator[None]:
        """Hold the store. `waiting` gets a message, once, if another process holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as handle:
            _lock(handle, lambda: waiting(f"another run works in {self.folder}; waiting for it"))
            yield

    def result(
        self,
        stage: str,
        key: str,
        *,
        make: Callable[[Path], Result],
        save: Callable[[Result, Path], None],
        load: Callable[[Path], Result],
        suffix: str = ".npz",
    ) -> tuple[Result, bool]:
        """The result, and whether it was made now. `make` gets a scratch folder, which may hold a killed run's work."""
        path = self.folder / f"{stage}-{key[:16]}{suffix}"
        scratch = self.folder / f"{stage}-{key[:16]}.work"
        if path.exists():
            shutil.rmtree(scratch, ignore_errors=True)  # a kill after saving left it
            return load(path), False
        # Scratch folders of other keys are no longer of use, and may be large.
        for other in self.folder.glob(f"{stage}-*.work"):
            if other != scratch:
                shutil.rmtree(other)
        scratch.mkdir(exist_ok=True)
        result = make(scratch)
        save(result, path)
        shutil.rmtree(scratch)
        for older in self.folder.glob(f"{stage}-*{suffix}"):
            if older != path:
                older.unlink()
        return result, True


def _lock(handle: Any, waiting: Callable[[], None]) -> None:
    if os.name == "nt":
        return  # Windows has no such locks: results still appear whole, but two runs may do the same work
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(handle, fcntl.LOCK_EX)
