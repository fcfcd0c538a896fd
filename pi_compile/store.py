"""Results of stages on disk: nothing is made twice, nothing stale is used, a killed stage goes on.

A result's name holds the digest of everything it depends on: a result that is there is the one that is wanted. A stage
that is under way works in a scratch folder of the same name. One process at a time works in a store; another waits.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pi_compile
import pi_runtime

Result = TypeVar("Result")


def key_of(**inputs: Any) -> str:
    """Digest of a stage's inputs: plain values and digests of files."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def code_digest(*modules: str) -> str:
    """Digest of source files or folders, named from the package: `pi_compile/profiling.py`, `pi_runtime/artifact`.

    It keys this local store only; no artifact or lock depends on it.
    """
    roots = {"pi_compile": Path(pi_compile.__file__).parent, "pi_runtime": Path(pi_runtime.__file__).parent}
    digest = hashlib.sha256()
    for module in sorted(modules):
        package, _, rest = module.partition("/")
        path = roots[package] / rest
        assert path.exists(), module
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.relative_to(roots[package]).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


class Store:
    """One recipe's results in one folder. Use inside `with store.exclusive(…)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def exclusive(self, waiting: Callable[[str], None]) -> Iterator[None]:
        """Hold the store; `waiting` is told once if another process holds it."""
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
        """(result, whether it was made now). `make` gets the stage's scratch folder, which it may find half done."""
        path = self.folder / f"{stage}-{key[:16]}{suffix}"
        scratch = self.folder / f"{stage}-{key[:16]}.work"
        if path.exists():
            shutil.rmtree(scratch, ignore_errors=True)  # a kill after saving left it
            return load(path), False
        # Scratch of other keys is of no use to anyone any more, and may be large.
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
        return  # no advisory locks there: results still appear whole, but two runs may do the same work
    import fcntl  # noqa: PLC0415

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(handle, fcntl.LOCK_EX)
