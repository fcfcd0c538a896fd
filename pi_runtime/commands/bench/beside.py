"""llama.cpp beside an artifact: the same tests of a GGUF file, by llama-cpp-python where that is installed."""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pi_runtime.commands.bench.sequences import LEAD, STEPS
from pi_runtime.errors import InputError, MissingExtraError, Setting


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU. It decodes one sequence."""

    mode, most, held = "llama.cpp", 1, 1

    def __init__(self, path: Path, context: int, threads: int) -> None:
        try:
            llama_cpp: Any = import_module("llama_cpp")
        except ImportError:
            what = (Setting("beside"), " needs llama-cpp-python")
            raise MissingExtraError(what, remedy="pip install llama-cpp-python") from None
        settings = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0, "verbose": False}
        try:
            self._llama: Any = llama_cpp.Llama(model_path=str(path), n_ctx=context, **settings)
        except ValueError as error:
            found = Setting("beside", path)
            remedy = "name a GGUF file of a model that this llama.cpp knows"
            raise InputError(setting=found, what="llama.cpp cannot open it", found=error, remedy=remedy) from None

    def bytes_for(self, _batch: int) -> int:
        """None beyond what it holds."""
        return 0

    def grow(self, _batch: int) -> None:
        """Read the tokens that the sequence holds before it is timed."""
        self._llama.reset()
        self._llama.eval(self._tokens(LEAD))

    def seconds_a_step(self, _batch: int) -> float:
        """Mean time of a step."""
        self._llama.n_tokens = LEAD
        began = time.perf_counter()
        for token in self._tokens(STEPS):
            self._llama.eval([token])
        return (time.perf_counter() - began) / STEPS

    def read_prompt(self, tokens: int) -> float:
        """Read a prompt of random tokens; returns the time."""
        self._llama.reset()
        began = time.perf_counter()
        self._llama.eval(self._tokens(tokens))
        return time.perf_counter() - began

    def shares(self, _batch: int) -> tuple[None, None]:
        """It does not say."""
        return None, None

    def close(self) -> None:
        """Free it."""
        self._llama.close()

    def _tokens(self, count: int) -> list[int]:
        return [*np.random.default_rng(0).integers(0, self._llama.n_vocab(), count).tolist()]
