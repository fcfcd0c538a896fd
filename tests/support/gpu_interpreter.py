"""A device in a GPU's place: Triton's interpreter on torch's CPU device, one operation after the other."""

import contextlib
import os
from collections.abc import Sequence

import torch

from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.devices import Event, Op
from pi_runtime.cuda.memory.driver_errors import translated_errors

INTERPRETED = Tiling(
    dot_rows=128, dot_width=256, word_rows=64, row_words=256, sum_rows=64, sum_width=256, sum_words=256, sum_unroll=1,
    splits=3, parts=2,
)  # fmt: skip
"""Large tiles: under the interpreter a program costs milliseconds whatever its size."""


class _CompletedEvent:
    """An event of a device that has always finished."""

    def record(self) -> None:
        pass

    wait = synchronize = record


class Interpreted:
    """A device under the interpreter; it has as much memory as it is told."""

    name, tiling = "Triton's interpreter", INTERPRETED

    def __init__(self, memory: int = 1 << 40) -> None:
        assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"
        self.device = torch.device("cpu")
        self._memory = memory

    def free_bytes(self) -> int:
        return self._memory

    def limit(self, nbytes: int | None) -> None:
        pass

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def event(self) -> Event:
        return _CompletedEvent()

    def stream(self) -> contextlib.AbstractContextManager[None]:
        return translated_errors()

    def copy_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def capture(self, ops: Sequence[Op]) -> Op:
        def replay() -> None:
            for op in ops:
                op()

        replay()
        return replay

    def synchronize(self) -> None:
        pass
