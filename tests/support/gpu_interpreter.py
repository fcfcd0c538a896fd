"""A device in a GPU's place: Triton's interpreter on torch's CPU device, one operation after the other."""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.devices import Event, Op, translated_errors

INTERPRETED = Tiling(
    dot_rows=128, dot_width=256, word_rows=64, row_words=256, sum_rows=64, sum_width=256, sum_words=256, sum_unroll=1,
    splits=3, parts=2,
)  # fmt: skip
"""Large tiles: under the interpreter a program costs milliseconds whatever its size."""


WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@cache
def _make_quicker() -> None:
    """Replace what takes two thirds of a launch's time under the interpreter; what it does is the same."""
    patch_lang, scalar_dtype = interpreter._patch_lang, cache(interpreter._get_np_dtype)

    def patch_once(kernel: Any) -> Any:
        """Put NumPy in the place of Triton's language, unless the kernel that calls this one has done so."""
        languages = [value for value in kernel.__globals__.values() if value is tl or value is tl.core]
        if any(map(tl.core.is_builtin, (language.load for language in languages))):
            return patch_lang(kernel)
        return interpreter._LangPatchScope()

    def assert_no_overflow(one: Any, two: Any, operation: Callable[..., Any]) -> None:
        """A sum, a difference or a product of integers of at most 32 bits is one of them."""
        scalar, name = one.type.scalar, operation.__name__
        if scalar.int_bitwidth < 64:
            found = WIDE[name](one.handle.data.astype(np.int64), two.handle.data.astype(np.int64))
            low, high = scalar.get_int_min_value(), scalar.get_int_max_value()
            assert low <= found.min() <= found.max() <= high, f"{scalar} overflow detected for operation {name}"

    def numpy_dtype(dtype: Any) -> Any:
        """NumPy's dtype for one of Triton's: Triton builds the table anew at each look-up."""
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else scalar_dtype(element)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_dtype
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = assert_no_overflow


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
        _make_quicker()
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
