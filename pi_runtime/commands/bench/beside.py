"""llama.cpp beside an artifact: the same tests of a GGUF file, by llama-cpp-python where that is installed."""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pi_runtime.commands.bench.sequences import LEAD, STEPS
from pi_runtime.errors import InputError, MissingExtraError, Setting

_PEER = Path(__file__).with_name("peer.py")


class LlamaCpp:
    """A GGUF file in llama.cpp, in a process of its own (`peer`). It decodes one sequence."""

    mode, most, held = "llama.cpp", 1, 1

    def __init__(self, path: Path, context: int, threads: int) -> None:
        if find_spec("llama_cpp") is None:
            what = (Setting("beside"), " needs llama-cpp-python")
            raise MissingExtraError(what, remedy="pip install llama-cpp-python")
        self._path = path
        # -P: nothing is imported from the working folder, or from the script's.
        command = [sys.executable, "-P", str(_PEER), str(path), str(context), str(threads)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def bytes_for(self, _batch: int) -> int:
        """None beyond what it holds."""
        return 0

    def grow(self, _batch: int) -> None:
        """Read the tokens that the sequence holds before it is timed."""
        self._call("grow", LEAD)

    def seconds_a_step(self, _batch: int) -> float:
        """Mean time of a step."""
        return float(self._call("seconds_a_step", LEAD, STEPS))

    def read_prompt(self, tokens: int) -> float:
        """Read a prompt of random tokens; returns the time."""
        return float(self._call("read_prompt", tokens))

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.communicate()

    def _call(self, name: str, *arguments: int) -> Any:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # its answer is missing too, and that says why
        return self._answer()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        found = json.loads(line) if line else {"error": self._end()}
        if "error" in found:
            remedy = "name a GGUF file of a model that this llama.cpp knows"
            what = "llama.cpp cannot open or run it"
            raise InputError(setting=Setting("beside", self._path), what=what, found=found["error"], remedy=remedy)
        return found["result"]

    def _end(self) -> str:
        """How its process ended."""
        code = self._child.wait()
        return (
            f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        )
