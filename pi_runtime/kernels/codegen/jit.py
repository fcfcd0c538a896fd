"""How kernels are compiled: options all share, and a kernel cache that never goes stale.

Every operation rounds as written: a compiler that may order sums anew orders them by the width of its vectors.

numba notices an edit only in the file of the function it compiles, not in what that function calls. So the cache
folder is named after a digest of every kernel source, numba's version, the processor and the instruction set; an edit
means a new folder.

Machine code from the kernel cache, without what numba reads beside it for compiling.

numba parses the intermediate code of each kernel that it loads, so that it could be compiled into others, and holds
it: half of a warm start, and 22 of 85 MiB. Here it is parsed when a kernel is compiled that calls this one.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.runtime import rtsys

from pi_runtime.artifact import decoder, footprint, formats, rungs, sizes
from pi_runtime.errors import UsageError
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.prefetch import AHEAD


class LoadedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """numba's library of a kernel; from the cache it holds machine code and unparsed intermediate code."""

    _machine_code = _bitcode = b""

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        name, kind, data = state
        if kind != "object":
            return super()._unserialize(codegen, state)
        library = codegen.create_library(name)
        library._machine_code, library._bitcode = data
        library.enable_object_caching()
        library._set_compiled_object(library._machine_code)
        library._finalize_final_module()
        return library

    def get_pointer_to_function(self, name: str) -> Any:
        """The address of one of its functions; 0 for a name that it does not define."""
        if f"\0{name}\0".encode() in self._machine_code:  # among the object's symbols
            self._codegen._engine._defined_symbols.add(name)
        return super().get_pointer_to_function(name)

    def _get_module_for_linking(self) -> Any:
        if self._bitcode:
            self._shared_module = llvmlite.binding.parse_bitcode(self._bitcode)
            self._codegen._engine._load_defined_symbols(self._shared_module)
            self._machine_code = self._bitcode = b""
        return super()._get_module_for_linking()


@contextmanager
def loaded_lightly(target: Any) -> Iterator[None]:
    """Have numba load kernels so within the block."""
    codegen = target.codegen()
    codegen._library_class = LoadedLibrary
    try:
        yield
    finally:
        del codegen._library_class


_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,  # nothing in C calls kernels
}


def cache_folder() -> Path:
    """Folder of compiled kernels for these sources on this machine: `$PI_CACHE_DIR`, else the user's cache folder,
    else (read-only home) the temporary folder. Raises UsageError where none can be written."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()} {ISA.name} {AHEAD}".encode())
    digest.update(llvmlite.binding.get_host_cpu_features().flatten().encode())
    digest.update(repr(formats.FORMATS).encode())
    # Kernels hold codes, alignments and sizes of the contract as constants, and code for each format.
    contract = (Path(str(module.__file__)) for module in (decoder, footprint, formats, rungs, sizes))
    ours = Path(__file__).parents[2]
    for source in (*sorted(ours.glob("kernels/**/*.py")), *sorted(ours.glob("disk/kernels/*.py")), *contract):
        digest.update(source.read_bytes())
    tried = []
    for base in _bases():
        tried.append(str(base))
        folder = base / "kernels" / digest.hexdigest()[:16]
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise UsageError(
        "no folder for compiled kernels can be written",
        found=", ".join(tried),
        remedy="PI_CACHE_DIR=FOLDER",
    )


def _bases() -> Iterator[Path]:
    if named := os.environ.get("PI_CACHE_DIR"):
        yield Path(named)
    else:
        with suppress(RuntimeError):  # a user without a home
            yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pi-runtime"
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path(tempfile.gettempdir()) / f"pi-runtime-{user}"
    with suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
        # Compiled kernels are code: not from a folder that somebody else has put there.
        if shared.lstat().st_uid == user:
            yield shared


_folder = cache(cache_folder)
"""The same for every kernel of a process: its sources are read once."""


def is_cold() -> bool:
    """Whether the kernels are still to be compiled."""
    return not any(cache_folder().rglob("*.nbi"))


def public(function: Callable[..., Any]) -> Any:
    """Compile a function that Python and other kernels call: serial, and inlined by LLVM where that pays."""
    return _compile(function, "serial")


def device(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call.

    It lacks the code for calls from Python, which takes apart every array of every argument: often the larger part.
    """
    return _kept_from_python(_compile(function, "serial", no_cpython_wrapper=True))


def loop_body(function: Callable[..., Any]) -> Any:
    """Compile the body of a `prange` loop, called by address: numba compiles such a loop three times over."""
    return by_address(device(function))


def public_parallel(function: Callable[..., Any]) -> Any:
    """Compile a function whose `prange` loops run on numba's threads, for Python to call."""
    return _compile(function, "threaded", parallel=True)


def parallel(*bodies: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a parallel function that kernels call, by address, so that it is not compiled into each of them.

    `bodies`: what its `prange` loops call by address. These are compiled before it runs, because nobody would see an
    error in a thread that is not Python's.
    """

    def compile_it(function: Callable[..., Any]) -> Any:
        return by_address(_compile(function, "threaded", parallel=True, no_cpython_wrapper=True), bodies)

    return compile_it


def _kept_from_python(dispatcher: Any) -> Any:
    """Make a kernel raise TypeError when Python calls it; numba would jump to address 0."""

    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise TypeError(f"{dispatcher.py_func.__qualname__} is called by kernels only: compile it with `public`")

    def add_overload(compiled: Any) -> None:
        # As numba's own, but not into the table of what Python calls.
        dispatcher.overloads[tuple(compiled.signature.args)] = compiled

    dispatcher._compile_for_args, dispatcher.add_overload = refuse, add_overload
    return dispatcher


def _compile(function: Callable[..., Any], folder: str, **options: Any) -> Any:
    dispatcher = numba.njit(**_OPTIONS | options)(function)
    dispatcher._cache = _KernelCache(function, folder)
    return dispatcher


class _ByModule(UserProvidedCacheLocator):  # type: ignore[misc]
    """Where the files of a kernel are: a folder named after its module, which other copies of the sources share."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        super().__init__(function, path)
        self._cache_path = str(Path(numba.config.CACHE_DIR, function.__module__))


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ByModule,)


class _FunctionCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Files


class _KernelCache:
    """numba's cache of one kernel, in our folder, which is looked for at the first call: importing touches no disk.

    Threaded and serial code have a folder each, because numba's key does not hold the options.
    """

    def __init__(self, function: Callable[..., Any], folder: str) -> None:
        self._function, self._name = function, folder

    @cached_property
    def _found(self) -> _FunctionCache:
        # numba takes the folder from its global configuration: lend it ours.
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_folder() / self._name)
        try:
            return _FunctionCache(self._function)
        finally:
            numba.config.CACHE_DIR = before

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function, or None where it is to be compiled.

        numba's own first gets everything ready for compiling, which is half of a warm start. Code that is there needs
        numba's functions for memory alone.
        """
        rtsys.initialize(target)
        with loaded_lightly(target):
            return self._found._load_overload(signature, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)
