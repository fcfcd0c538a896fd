"""Calls by address: a kernel is compiled once, however many others call it.

numba compiles a function into each kernel that calls it, and that again into its caller. With each level the whole tree
is optimised anew, and most of a cold start is spent on code that is there already. A function called by address stays
out of its callers. They read the address from a slot: a number in this process that LLVM knows by name. While it is 0,
the slot's `bind` is called first. It compiles the function or loads it from the kernel cache, and returns the address;
or, if an exception was raised, the exception's address as a negative number. So nothing is compiled before it is
needed, and kernels in the cache hold no address.
"""

import ctypes
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_SCALARS = {int: types.intp, float: types.float64, bool: types.boolean, np.float32: types.float32}


@dataclass(frozen=True)
class _Kernel:
    """A function that is called by address. Machine code refers to slot and `bind` as long as the process lives."""

    slot: ctypes.c_int64
    bind: Any
    compile: Callable[[], None]


_KERNELS: list[_Kernel] = []
"""All, those that call others behind them."""
_WATCHERS: list[Callable[[int, int], None]] = []


def compile_all() -> None:
    """Compile all functions that are called by address into the kernel cache, callers last."""
    for kernel in _KERNELS:
        kernel.compile()


@contextmanager
def watched(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Call `progress` with (ready, all) whenever another function is ready. No model needs all of them."""
    _WATCHERS.append(progress)
    try:
        yield
    finally:
        _WATCHERS.remove(progress)


def by_address(dispatcher: Any, bodies: Sequence[Any] = ()) -> Any:
    """Wrap a compiled function that returns nothing, so that kernels call it by address. Python cannot call the result.

    `bodies`: functions by address that are compiled before this one is called.
    Arguments are converted to the types that the function's annotations name. Arrays are C-contiguous, with as many
    dimensions as the shape at the end of their name has letters (`x_TD`: two), or one without such an end.
    """
    function = dispatcher.py_func
    name = f"{function.__module__}.{function.__qualname__}"
    wanted_types = cache(lambda: tuple(_numba_type(p.annotation, p.name) for p in _parameters(function)))

    def compile_it() -> None:
        dispatcher.compile(wanted_types())

    def bind() -> None:
        """Put the function's address into its slot."""
        if slot.value:
            return
        compile_it()
        for body in bodies:
            body.bind()
        compiled = dispatcher.overloads[wanted_types()]
        slot.value = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        for progress in _WATCHERS:
            progress(sum(kernel.slot.value != 0 for kernel in _KERNELS), len(_KERNELS))

    def bound() -> int:
        try:
            bind()
        except BaseException as error:  # Ctrl-C, a full disk: the caller raises it again
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
            return -id(error)
        return slot.value

    slot, callback = ctypes.c_int64(0), ctypes.CFUNCTYPE(ctypes.c_int64)(bound)
    _KERNELS.append(_Kernel(slot, callback, compile_it))
    llvmlite.binding.add_symbol(f"{name} address", ctypes.addressof(slot))
    llvmlite.binding.add_symbol(f"{name} bind", ctypes.cast(callback, ctypes.c_void_p).value)

    @intrinsic
    def call(typing_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
            address = _address(context, b, name)
            _call(context, b, address, list(signature.args[0]), cgutils.unpack_tuple(b, values[0]))
            return context.get_dummy_value()

        _check(typing_context, name, arguments, wanted_types())
        return types.none(types.Tuple(wanted_types())), generate

    call.bind = bind
    return call


def _check(typing_context: Any, name: str, given: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Check the arguments of a call. Raises TypingError; numba's own cast would only assert, and not for all arrays."""
    if len(given) != len(wanted):
        raise TypingError(f"{name} takes {len(wanted)} arguments, found {len(given)}")
    for n, (one, other) in enumerate(zip(given, wanted, strict=True)):
        if typing_context.can_convert(one, other) is None:
            raise TypingError(f"{name}: argument {n} must be {other}, found {one}")


def _address(context: Any, b: Any, name: str) -> Any:
    """Emit code that reads a function's slot and, while that holds 0, calls its `bind`; it raises what `bind` meets."""
    known = b.module.globals.get(f"{name} address")
    slot = ir.GlobalVariable(b.module, _WORD, f"{name} address") if known is None else known
    address = cgutils.alloca_once_value(b, b.load(slot))
    with cgutils.if_unlikely(b, b.icmp_signed("==", b.load(address), _WORD(0))):
        bind = cgutils.get_or_insert_function(b.module, ir.FunctionType(_WORD, []), f"{name} bind")
        found = b.call(bind, [])
        b.store(found, address)
        with cgutils.if_unlikely(b, b.icmp_signed("<", found, _WORD(0))):
            python = context.get_python_api(b)
            lock = python.gil_ensure()  # kernels run without it
            python.raise_object(b.inttoptr(b.neg(found), python.pyobj))
            python.gil_release(lock)
            context.call_conv.return_exc(b)
    return b.load(address)


def _call(context: Any, b: Any, address: Any, given: list[Any], values: Any) -> None:
    """Emit code that calls the function at an address as numba calls its own; its exceptions are the caller's."""
    convention = context.call_conv
    callee = b.inttoptr(address, convention.get_function_type(types.none, given).as_pointer())
    status, _ = convention.call_function(b, callee, types.none, given, values)
    with cgutils.if_unlikely(b, status.is_error):
        convention.return_status_propagate(b, status)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def record_dtype(fields: type) -> np.dtype[Any]:
    """The record whose fields a class names with its annotations: float32 where they say so, else int64."""
    kinds = inspect.get_annotations(fields).items()
    return np.dtype([(name, np.float32 if kind is np.float32 else np.int64) for name, kind in kinds], align=True)


def _numba_type(annotation: Any, name: str) -> Any:
    """The numba type of an argument."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    record = None
    if get_origin(annotation) is Annotated:  # an array of records: their class stands beside
        annotation, record = get_args(annotation)
    # From Python 3.12 on NumPy's NDArray is a `type` statement's alias, which stands for what it is.
    if alias := getattr(get_origin(annotation), "__value__", None):
        annotation = alias[get_args(annotation)]
    if get_origin(annotation) is np.ndarray:
        shape = name.rpartition("_")[2]
        dtype = record_dtype(record) if record else np.dtype(get_args(get_args(annotation)[1])[0])
        return types.Array(from_dtype(dtype), 1 if shape.islower() else len(shape), "C")
    if not issubclass(annotation, tuple):
        return from_dtype(record_dtype(annotation))
    fields = [_numba_type(kind, field) for field, kind in annotation.__annotations__.items()]
    return types.BaseTuple.from_types(fields, annotation)
