"""What can be known of Windows and macOS on Linux: all modules import there, and nothing asks for what they lack.

Neither system has run these programs: the workflow in `.github` does, once somebody runs it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.engine import loading
from pi_runtime.errors import DoesNotFitError

PACKAGES = ("pi_runtime", "pi_compile")
LACKING: dict[str, dict[str, tuple[str, ...]]] = {
    "win32": {
        "modules": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog"),
        "os": ("fork", "killpg", "getpgid", "setsid", "getuid", "geteuid", "sched_getaffinity", "sched_setaffinity",
               "posix_fadvise", "preadv", "O_DIRECT", "O_NOFOLLOW", "statvfs", "waitid", "nice", "register_at_fork",
               "sysconf", "uname", "chown", "fchmod", "mkfifo", "getloadavg"),
        "signal": ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGSTOP", "alarm", "setitimer"),
        "mmap": ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MADV_HUGEPAGE", "MADV_DONTNEED", "MADV_WILLNEED",
                 "PROT_READ", "PROT_WRITE"),
        "select": ("poll", "epoll"),
        "time": ("tzset",),
        "socket": ("AF_UNIX",),
    },
    "darwin": {
        "modules": ("winreg", "msvcrt"),
        "os": ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "O_DIRECT", "memfd_create"),
        "signal": (),
        "mmap": ("MADV_HUGEPAGE", "MAP_POPULATE"),
        "select": ("epoll",),
        "time": (),
        "socket": (),
    },
}  # fmt: skip
"""What Python has not on a system, of what it has on Linux."""
WALK = """
import importlib, pkgutil, sys
def walk():
    for package in {packages}:
        for found in pkgutil.walk_packages([package], package + "."):
            if found.name.rpartition(".")[2] not in ("__main__", "_template_worker", "_grammar_worker"):
                yield found.name
def load(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in {packages}:
            raise
        return error.name
there = [name for name in walk() if load(name) is None]  # with what they import of others, which knows this system
for name in [name for name in sys.modules if name.partition(".")[0] in {packages}]:
    del sys.modules[name]
lacking = {lacking}
for name in lacking.pop("modules"):
    sys.modules[name] = None
for module, names in lacking.items():
    for name in names:
        if hasattr(importlib.import_module(module), name):
            delattr(sys.modules[module], name)
sys.platform = {system!r}
for name in there:
    importlib.import_module(name)
print(len(there))
"""


@pytest.mark.parametrize("system", LACKING)
def test_all_modules_import_there(system: str) -> None:
    program = WALK.format(packages=PACKAGES, lacking=LACKING[system], system=system)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 150


LINUX_ALONE = {
    "pi_runtime/disk/reader.py": "reading rows from disk is refused elsewhere",
    "pi_runtime/disk/ring.py": "io_uring is Linux's",
}
"""Files whose code runs on Linux alone, with what keeps it there."""


def asked_without_care(path: Path) -> Iterator[str]:
    """Uses of what a system lacks, in functions that do not ask which system it is or whether the thing is there."""
    names = {(module, name) for lacking in LACKING.values() for module, own in lacking.items() for name in own}
    tree = ast.parse(path.read_text("utf-8"))
    places = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if (node.value.id, node.attr) in names:
            around = [place for place in places if place.lineno <= node.lineno <= (place.end_lineno or 0)]
            text = " ".join(ast.unparse(place) for place in around)
            if not any(care in text for care in ("sys.platform", "hasattr(", "AttributeError")):
                yield f"{path.relative_to(ROOT).as_posix()}:{node.lineno}: {node.value.id}.{node.attr}"


def test_rows_come_from_disk_on_linux_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_artifact(tmp_path / "random.pi", small_decoder())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(DoesNotFitError, match="on Linux alone"):
        load(path, ram_budget=1 << 30)
    monkeypatch.setattr(loading, "ram_budget_for", lambda _: 1 << 30)  # as where a model is larger than memory
    with load(path) as model:
        assert next(iter(model.generate("a", max_tokens=1))) is not None


def test_what_a_system_lacks_is_asked_for_first() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [use for path in files for use in asked_without_care(path)]
    assert [use for use in found if use.partition(":")[0] not in LINUX_ALONE] == []
    assert {use.partition(":")[0] for use in found} == LINUX_ALONE.keys()
