"""Each instruction as a function of the machine and the threads that take part."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from support.ptx import warps
from support.ptx.arithmetic import OPERATIONS, bits_of
from support.ptx.faults import UnknownInstructionError
from support.ptx.parsing import Instruction, Kernel, parse
from support.ptx.registers import Mask, Reader, reader, writer

if TYPE_CHECKING:
    from support.ptx.machine import Machine

Step = Callable[["Machine", Mask], None]

_MEMORY = re.compile(r"(ld|st)\.(global|shared|param)(?:::cta)?(?:\.v([24]))?\.([busf]\d+)")
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_MATRIX = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16")
_SHUFFLE = re.compile(r"shfl\.sync\.(idx|up|down|bfly)\.b32")
_REDUCTION = re.compile(r"redux\.sync\.(\w+)\.([busf]32)")
_COPIES = {"cp.async.cg.shared.global": (16,), "cp.async.ca.shared.global": (4, 8, 16)}
"""Bytes that a copy may have."""
_SYMBOLS = {"global_smem": 0}


@dataclass(frozen=True)
class Translated:
    """A kernel whose instructions are functions."""

    kernel: Kernel
    steps: tuple[tuple[Step, ...], ...]
    """Of each block, without the branch, barrier or end behind them."""
    piece: int
    """The least bytes of shared memory that an instruction reads or writes."""


@cache
def translate(text: str) -> Translated:
    """Read a kernel's text, and translate it. Raises UnknownInstructionError."""
    kernel = parse(text)
    steps = tuple(tuple(_step(kernel, i) for i in block.body) for block in kernel.blocks)
    opcodes = [i.opcode for block in kernel.blocks for i in block.body]
    sizes = [bits_of(m[4]) // 8 for m in map(_MEMORY.fullmatch, opcodes) if m and m[2] == "shared"]
    return Translated(kernel, steps, min([*sizes, 4]))


def _step(kernel: Kernel, i: Instruction) -> Step:
    try:
        step = _unguarded(kernel, i)
    except (UnknownInstructionError, KeyError, ValueError, AssertionError) as error:
        raise UnknownInstructionError(f"{kernel.name}, {i}: {error}") from error
    if i.guard is None:
        return step
    guard, negated = i.guard, i.negated

    def guarded(m: "Machine", mask: Mask) -> None:
        taking = m.guarded(guard, negated, mask)
        if taking is None or taking.any():
            step(m, taking)

    return guarded


def _unguarded(kernel: Kernel, i: Instruction) -> Step:
    if operation := OPERATIONS.get(i.opcode):
        if i.opcode.startswith("mov.") and any(o.startswith("{") for o in i.operands):
            return _packed(kernel, i)
        takes = [_reader(kernel, o, kind) for o, kind in zip(i.operands[1:], operation.takes, strict=True)]
        write, compute = writer(kernel, i.operands[0], operation.gives), operation.compute
        return lambda m, mask: write(m.registers, compute(*[take(m.registers) for take in takes]), mask)
    if found := _MEMORY.fullmatch(i.opcode):
        return _memory(kernel, i, found)
    for pattern, make in ((_MATRIX, _load_matrix), (_SHUFFLE, _shuffle), (_REDUCTION, _reduction)):
        if found := pattern.fullmatch(i.opcode):
            return make(kernel, i, found)
    if i.opcode.startswith("cp.async."):
        return _asynchronous(kernel, i)
    if i.opcode == "bar.warp.sync":
        (members,) = (_reader(kernel, o, "b32") for o in i.operands)
        return lambda m, mask: m.warp_barrier(members(m.registers), mask)
    raise UnknownInstructionError("an instruction that is not known")


def _reader(kernel: Kernel, operand: str, kind: str) -> Reader:
    return reader(kernel, operand, kind, _SYMBOLS)


def _list(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def _address(kernel: Kernel, operand: str, kind: str) -> Reader:
    found = _ADDRESS.fullmatch(operand)
    assert found is not None, operand
    base, offset = _reader(kernel, found[1], kind), np.array(int(found[2] or "0", 0))
    # Offsets may be negative; addresses have no sign.
    return lambda r: (base(r).astype(np.int64) + offset).view(np.uint64)


def _packed(kernel: Kernel, i: Instruction) -> Step:
    """Between one register and two of half its width, the lower half first."""
    kind = i.opcode.partition(".")[2]
    half, bits = f"b{bits_of(kind) // 2}", bits_of(kind) // 2
    target, source = i.operands
    if target.startswith("{"):
        take = _reader(kernel, source, kind)
        writes = [writer(kernel, name, half) for name in _list(target)]

        def split(m: "Machine", mask: Mask) -> None:
            value = take(m.registers)
            for n, write in enumerate(writes):
                write(m.registers, (value >> value.dtype.type(n * bits)).astype(f"uint{bits}"), mask)

        return split
    low, high = (_reader(kernel, name, half) for name in _list(source))
    write, whole = writer(kernel, target, kind), np.dtype(f"uint{2 * bits}")

    def join(m: "Machine", mask: Mask) -> None:
        upper = high(m.registers).astype(whole) << whole.type(bits)
        write(m.registers, low(m.registers).astype(whole) | upper, mask)

    return join


def _memory(kernel: Kernel, i: Instruction, found: re.Match[str]) -> Step:
    action, space, count, kind = found.groups()
    if space == "param":
        return _parameter(kernel, i, kind)
    address_at, values_at = (1, 0) if action == "ld" else (0, 1)
    address = _address(kernel, i.operands[address_at], "b64" if space == "global" else "b32")
    names, size = _list(i.operands[values_at]), bits_of(kind) // 8
    assert len(names) == int(count or 1)
    if action == "ld":
        writes = [writer(kernel, name, kind) for name in names]

        def load(m: "Machine", mask: Mask) -> None:
            read = m.load(space, address(m.registers), size, len(writes), mask, i.line)
            for n, write in enumerate(writes):
                write(m.registers, m.spread(read[:, n], mask), mask)

        return load
    takes = [_reader(kernel, name, f"b{8 * size}") for name in names]
    return lambda m, mask: m.store(
        space, address(m.registers), size, [take(m.registers) for take in takes], mask, i.line
    )


def _parameter(kernel: Kernel, i: Instruction, kind: str) -> Step:
    found = _ADDRESS.fullmatch(i.operands[1])
    assert found is not None
    assert found[2] is None
    name, write = found[1], writer(kernel, i.operands[0], kind)
    assert bits_of(kernel.parameters[name]) == bits_of(kind)
    return lambda m, mask: write(m.registers, m.parameters[name], mask)


def _load_matrix(kernel: Kernel, i: Instruction, found: re.Match[str]) -> Step:
    address, writes = _address(kernel, i.operands[1], "b32"), [writer(kernel, n, "b32") for n in _list(i.operands[0])]
    assert len(writes) == int(found[1])

    def load(m: "Machine", mask: Mask) -> None:
        warps.check_whole(mask)
        for write, rows in zip(writes, warps.matrix_rows(m.every(address(m.registers)), len(writes)), strict=True):
            write(m.registers, m.spread(m.load("shared", rows, 4, 1, mask, i.line)[:, 0], mask), mask)

    return load


def _shuffle(kernel: Kernel, i: Instruction, found: re.Match[str]) -> Step:
    value, by, clamp, members = (_reader(kernel, o, "b32") for o in i.operands[1:])
    target, _, inside = i.operands[0].partition("|")
    assert not inside
    write, kind = writer(kernel, target, "b32"), found[1]

    def shuffle(m: "Machine", mask: Mask) -> None:
        warps.check_whole(mask)
        warps.check_members(members(m.registers))
        taken = [m.every(take(m.registers)) for take in (value, by, clamp)]
        write(m.registers, warps.shuffle(kind, *taken), mask)

    return shuffle


def _reduction(kernel: Kernel, i: Instruction, found: re.Match[str]) -> Step:
    value, members = _reader(kernel, i.operands[1], found[2]), _reader(kernel, i.operands[2], "b32")
    write, kind = writer(kernel, i.operands[0], found[2]), found[1]
    assert kind in warps.REDUCTIONS

    def reduction(m: "Machine", mask: Mask) -> None:
        warps.check_whole(mask)
        if mask is None or mask.any():
            warps.check_members(m.every(members(m.registers))[slice(None) if mask is None else mask])
        write(m.registers, warps.reduce(kind, m.every(value(m.registers))), mask)

    return reduction


def _asynchronous(kernel: Kernel, i: Instruction) -> Step:
    if i.opcode == "cp.async.commit_group":
        return lambda m, mask: m.shared.commit(m.taking(mask))
    if i.opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        most = int(i.operands[0], 0) if i.operands else 0
        return lambda m, mask: m.shared.wait(m.flags(mask), most, m.now())
    count = int(i.operands[2], 0)
    assert count in _COPIES[i.opcode]
    target, source = _address(kernel, i.operands[0], "b32"), _address(kernel, i.operands[1], "b64")
    size = _reader(kernel, i.operands[3] if len(i.operands) > 3 else i.operands[2], "b32")
    return lambda m, mask: m.copy(target(m.registers), source(m.registers), count, size(m.registers), mask, i.line)
