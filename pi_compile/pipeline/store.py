"""Results of stages on disk: nothing is computed twice, nothing stale is used, a killed stage resumes.

A result's name holds the digest of everything it depends on, so a result of that name is the right one. A stage that
is running has a folder of the same name, in which any number of workers share its tasks. What other builds left is
removed while no worker of another build is there.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import pi_runtime
from pi_compile import files
from pi_compile.checkpoint.families import registry
from pi_compile.workers import StageDoneError, Worker, WorkFolder

Result = TypeVar("Result")
_ROOTS = {"pi_compile": Path(__file__).parents[1], "pi_runtime": Path(pi_runtime.__file__).parent}
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
    stem = _ROOTS[package].joinpath(*rest)
    return next((p for p in (stem / "__init__.py", stem.with_suffix(".py")) if p.is_file()), None)


def _files_of(module: str) -> list[Path]:
    """Python files of the package that an installed module belongs to, or of the module alone."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    if folders:
        return sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [Path(spec.origin)] if spec and spec.origin else []


@cache
def _nodes(source: bytes) -> tuple[ast.AST, ...]:
    """The parts of a source that may name a module."""
    kinds = (ast.Constant, ast.Import, ast.ImportFrom)
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))


def _imports(path: Path) -> Iterator[str]:
    """Modules that a source file imports, anywhere in it, or names in a string."""
    for node in _nodes(path.read_bytes()):
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
        for node in _nodes(path.read_bytes()):
            if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
                return _home(node.module, name)
    submodule = f"{module}.{name}"
    return module if _source(submodule) is None else submodule


WORKERS = "workers"
"""Folder in a store where workers show that they are alive."""


class Store:
    """One recipe's results in one folder, as one worker sees them."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        self.folder, self.worker = folder, worker

    def result(
        self,
        stage: str,
        key: str,
        *,
        make: Callable[[WorkFolder], Result],
        save: Callable[[Result, Path], None],
        load: Callable[[Path], Result],
        alone: bool = False,
        suffix: str = ".npz",
    ) -> tuple[Result, bool]:
        """The result, and whether it was made now.

        All workers `make` it together, in a folder that may hold a killed run's work, and one of them saves it. A stage
        that has no tasks is made by one worker `alone`.
        """
        path = self.folder / f"{stage}-{key[:16]}{suffix}"
        if files.exists(path) or self._link(path):
            self.clear(stage, key)  # a kill after saving left it
            return load(path), False

        def work(folder: WorkFolder) -> None:
            result = None if alone else make(folder)
            folder.run({"result": lambda: save(make(folder) if result is None else result, path)})

        self.share(stage, key, work, path.exists)
        for older in self._of_other_keys(path):
            files.remove(older)
        return load(path), True

    def _link(self, path: Path) -> bool:
        """Whether another recipe beside this one has the result of this name: what is made from the same is the same.

        It becomes this recipe's too. Where the file system has no links, it is made again.
        """
        for other in files.names_in(self.folder.parent):
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(self.folder.parent / other / path.name, path)
                return True
        return False

    def share(self, stage: str, key: str, work: Callable[[WorkFolder], object], finished: Callable[[], bool]) -> None:
        """Have a stage `finished` by all workers that `work` in its folder; then the folder is removed."""
        folder = self.folder / f"{stage}-{key[:16]}.work"
        for other in self._of_other_keys(folder):  # no longer of use, and may be large
            shutil.rmtree(other, ignore_errors=True)
        files.tried_again(folder.mkdir)(parents=True, exist_ok=True)
        self.worker.at(stage=stage)
        self.worker.call_help()
        try:
            work(WorkFolder(folder, self.worker, finished))
        except StageDoneError:
            pass
        except Exception:
            # Others may have finished the stage, and removed what this worker was about to read.
            if not finished():
                raise
        self.clear(stage, key)

    def clear(self, stage: str, key: str) -> None:
        """Remove the work folder of a stage that is finished."""
        shutil.rmtree(self.folder / f"{stage}-{key[:16]}.work", ignore_errors=True)

    def _of_other_keys(self, path: Path) -> list[Path]:
        """What other builds left of the same kind, if no worker of theirs is there."""
        if self.worker.strangers():
            return []
        begins = path.name.partition("-")[0] + "-"
        names = (name for name in files.names_in(self.folder) if name.startswith(begins))
        return [self.folder / name for name in names if name.endswith(path.suffix) and name != path.name]
