"""Functions for kernels whose LLVM code Python emits."""

import inspect
from collections.abc import Callable
from typing import Any

from numba.extending import intrinsic


def emits(types: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels of one that emits its code: `emit(b, *arguments)`, with LLVM's builder and values.

    `types` is numba's signature; what is called with something else is converted. What `emit` returns is the value of
    the call; it returns None where that has none.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(_typing_context: Any, *_given: Any) -> Any:
            def generate(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
                value = emit(b, *arguments)
                return context.get_dummy_value() if value is None else value

            return types, generate

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba takes names from there
        return intrinsic(typed)

    return decorate
