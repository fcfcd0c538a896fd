"""Machine code from the kernel cache, without what numba reads beside it for compiling.

numba parses the intermediate code of each kernel that it loads, so that it could be compiled into others, and holds
it: half of a warm start, and 22 of 85 MiB. Here it is parsed when a kernel is compiled that calls this one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
from numba.core.codegen import JITCodeLibrary


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
