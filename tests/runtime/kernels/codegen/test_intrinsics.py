"""Loads and stores with an order: what they become on arm64 and x86, what they do, and where they stand."""

import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import pytest
from llvmlite import ir

from pi_runtime.disk.kernels import reading, ring_reading
from pi_runtime.kernels.codegen import intrinsics
from pi_runtime.kernels.codegen.jit import public

WORD, HALF = ir.IntType(64), ir.IntType(32)
ARM, X86 = "aarch64-linux-gnu", "x86_64-unknown-linux-gnu"


def assembly(module: str, triple: str) -> str:
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    try:
        target = llvmlite.binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this LLVM has no {triple}")
    machine = target.create_target_machine(cpu="generic" if triple == ARM else "x86-64", opt=2)
    return str(machine.emit_assembly(llvmlite.binding.parse_assembly(module)))


def emitted(triple: str, emit: Callable[..., Any], *more: Any) -> str:
    """What a function of two 64-bit numbers becomes that does nothing else."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(WORD, [WORD, WORD]), "shared")
    builder = ir.IRBuilder(function.append_basic_block())
    found = emit(builder, *function.args[: 2 if emit is intrinsics.emit_store_release else 1], *more)
    builder.ret(WORD(0) if found is None else found)
    return assembly(str(module), triple)


@pytest.mark.parametrize(("kind", "register"), [(WORD, "x"), (HALF, "w")])
def test_on_arm64_they_are_instructions_with_an_order(kind: ir.IntType, register: str) -> None:
    assert re.search(rf"\tlda(pu?)?r\t{register}\d+, \[x\d+\]", emitted(ARM, intrinsics.emit_load_acquire, kind))
    assert re.search(rf"\tstlr\t{register}\d+, \[x\d+\]", emitted(ARM, intrinsics.emit_store_release, kind))


@pytest.mark.parametrize("kind", [WORD, HALF])
def test_on_x86_they_are_plain_moves(kind: ir.IntType) -> None:
    for emit in (intrinsics.emit_load_acquire, intrinsics.emit_store_release):
        found = emitted(X86, emit, kind)
        assert "mov" in found
        assert not re.search(r"\t(lock|xchg|mfence)", found)


@public
def exchanged(address: int, number: int) -> tuple[int, int, int, bool]:
    """What the four of them find and leave behind."""
    intrinsics.store_release(address, number)
    intrinsics.store_release_32(address + 8, number)
    before = intrinsics.atomic_add(address, 1)
    was = intrinsics.atomic_replace(address, number, 0)
    return before, intrinsics.load_acquire(address), intrinsics.load_acquire_32(address + 8), was


def test_they_keep_their_numbers() -> None:
    memory = np.full(2, -1, np.int64)
    number = (5 << 32) + 0xFFFFFFFE
    assert exchanged(memory.ctypes.data, number) == (number, number + 1, 0xFFFFFFFE, False)
    assert memory.tolist() == [number + 1, -(1 << 32) + 0xFFFFFFFE]  # its upper half is as it was


def ir_of(kernel: Any, *arguments: Any) -> str:
    """A kernel's IR for such arguments, whatever the kernel cache holds."""
    compiled = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, nogil=True)(kernel.py_func)
    compiled.compile(tuple(map(numba.typeof, arguments)))
    return str(compiled.inspect_llvm(compiled.signatures[0]))


def shared() -> reading.Shared:
    ints = [np.zeros((1,) * n, np.int64) for n in (1, 1, 2, 3, 3, 2)]
    return reading.Shared(*ints, np.zeros(64, np.uint8))


def ring() -> ring_reading.Ring:
    return ring_reading.Ring(*(np.zeros(1, np.int64) for _ in range(4)))


def orders(found: str) -> tuple[int, int]:
    """Loads with an order, and stores."""
    return len(re.findall(r"load atomic .* acquire", found)), len(re.findall(r"store atomic .* release", found))


@pytest.mark.parametrize(
    ("kernel", "arguments", "loads", "stores"),
    [
        (reading.take, (shared(),), 2, 0),  # HEAD, TAIL
        (reading.submit, (shared(), 0, 1), 0, 1),  # TAIL
        (reading.pending, (0,), 1, 0),
        (reading.stop, (shared(), 1), 0, 1),
        (ring_reading._want, (shared(), ring(), 0, 0), 0, 1),
        (ring_reading._hand_over, (shared(), ring(), 1), 1, 0),
        (ring_reading._reap, (shared(), ring(), 0, 0, 0, 0), 1, 1),
    ],
)  # fmt: skip
def test_numbers_that_threads_and_the_system_share_have_an_order(
    kernel: Any, arguments: tuple[Any, ...], loads: int, stores: int
) -> None:
    found = orders(ir_of(kernel, *arguments))
    assert found[0] >= loads
    assert found[1] >= stores
