"""Commands in child processes whose n-th write, sync, rename or opening of a file fails, or ends them.

The children are forks of one server that has everything imported and `faults.c` loaded before libc.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.paths import ROOT

OPERATIONS = {"write": 1, "sync": 2, "rename": 3, "open": 4}
SHORT, KILL = -1, -2
FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES, "short": SHORT, "kill": KILL}
SECONDS = 900.0
"""A command that takes longer hangs; the first one may have kernels to compile."""


@dataclass(frozen=True)
class Fault:
    """What fails: an operation by its name, the n-th of its kind; 0 counts them only. `lasts`: all later ones too."""

    operation: str
    number: int
    kind: str = "ENOSPC"
    lasts: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.operation} {self.number}{' and all after' if self.lasts else ''}"


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, or minus a signal's number; what it wrote; and how often it was hit."""

    code: int
    err: str
    calls: int
    hits: int


class Server:
    """The process that forks. `under` is the folder whose files fail."""

    def __init__(self, process: "subprocess.Popen[str]", under: Path) -> None:
        self._process, self.under = process, under

    def run(self, app: str, arguments: list[str], fault: Fault | None = None, kill_after: float = 0) -> Outcome:
        """Run `pi-compile` or `pi-run` with arguments in the folder; kill it after some seconds, if there are any."""
        assert self._process.stdin
        assert self._process.stdout
        request = {"app": app, "arguments": arguments, "fault": fault and asdict(fault), "kill_after": kill_after}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, "the server of faults ended"
        return Outcome(**json.loads(reply))


@contextmanager
def server(under: Path) -> Iterator[Server]:
    """A server for commands that work in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        source = Path(__file__).with_name("faults.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PI_WORKERS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "support.fuzz.faults", str(under), str(library)],
            env={**os.environ, **threads, "LD_PRELOAD": str(library), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            yield Server(process, under)
            assert process.stdin
            process.stdin.close()


def has_compiler() -> bool:
    """Whether the library can be made here."""
    return sys.platform == "linux" and shutil.which("cc") is not None


def _serve(under: Path, library: Any) -> None:
    """Answer requests until there are none."""
    import torch

    import support.imported  # noqa: F401

    torch.set_num_threads(1)
    torch.manual_seed(0)
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints is an answer
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile("w+") as counts:
            child = os.fork()
            if child == 0:
                os.dup2(err.fileno(), 2)
                _child(under, library, request, counts.fileno())
            code = _waited(child, request["kill_after"] or SECONDS)
            err.seek(0)
            counts.seek(0)
            calls, hits = map(int, (counts.read() or "0 1").split())
            found = Outcome(code, err.read(), calls, hits)
        os.write(answers, (json.dumps(asdict(found)) + "\n").encode())


def _child(under: Path, library: Any, request: dict[str, Any], counts: int) -> None:
    code = 70
    try:
        from pi_compile.cli.main import app as pi_compile
        from pi_runtime import console
        from pi_runtime.commands.run import app as pi_run

        os.chdir(under)
        if request["fault"]:
            fault = Fault(**request["fault"])
            operation, kind = OPERATIONS[fault.operation], FAULTS[fault.kind]
            library.fault_arm(os.fsencode(f"{under}/"), operation, fault.number, kind, fault.lasts)
        code = console.run({"pi-compile": pi_compile, "pi-run": pi_run}[request["app"]], request["arguments"])
    except BaseException as error:
        print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os.write(counts, f"{library.fault_calls()} {library.fault_count()}".encode())
        os._exit(code)


def _waited(child: int, seconds: float) -> int:
    """The exit code of a child, or minus the signal that ended it; it is killed when its time is over."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(Path(sys.argv[1]), ctypes.CDLL(sys.argv[2]))
