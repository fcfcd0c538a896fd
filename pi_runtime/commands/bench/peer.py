"""llama.cpp in a process of its own, run as a script: a line of JSON in is a call, a line out its result.

Two libraries in one process share threads and what the system allows these, of which the other knows nothing. The
script imports nothing of this project, so that none of its libraries is loaded.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np


class Peer:
    """A GGUF file in llama.cpp, on the CPU, with one sequence."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        settings = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0, "verbose": False}
        self._llama: Any = llama_cpp.Llama(model_path=path, n_ctx=context, **settings)

    def grow(self, lead: int) -> None:
        """Read the tokens that the sequence holds before it is timed."""
        self._llama.reset()
        self._llama.eval(self._tokens(lead))

    def seconds_a_step(self, lead: int, steps: int) -> float:
        """Mean time of a step behind so many tokens."""
        self._llama.n_tokens = lead
        began = time.perf_counter()
        for token in self._tokens(steps):
            self._llama.eval([token])
        return (time.perf_counter() - began) / steps

    def read_prompt(self, tokens: int) -> float:
        """Read a prompt of random tokens; returns the time."""
        self._llama.reset()
        began = time.perf_counter()
        self._llama.eval(self._tokens(tokens))
        return time.perf_counter() - began

    def _tokens(self, count: int) -> list[int]:
        return [*np.random.default_rng(0).integers(0, self._llama.n_vocab(), count).tolist()]


def main() -> None:
    """Open what the arguments name, and answer calls until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(**found: object) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    path, context, threads = sys.argv[1:]
    try:
        peer = Peer(path, int(context), int(threads))
    except ValueError as error:
        answer(error=str(error))
        return
    answer(result=None)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer(result=getattr(peer, name)(*arguments))


if __name__ == "__main__":
    main()
