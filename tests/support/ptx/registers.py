"""Registers of all threads that run together, and how instructions read and write them as typed values."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from support.ptx.arithmetic import DTYPES, Lanes, bits_of
from support.ptx.faults import UnknownInstructionError, UnwrittenError
from support.ptx.parsing import Kernel

Mask = npt.NDArray[np.bool_] | None
"""The threads that take part; None: all."""
Reader = Callable[["Registers"], Lanes]
Writer = Callable[["Registers", Lanes, Mask], None]
_STORED = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Registers(dict[str, Any]):
    """Values by register. One number stands for the same in all threads. Special registers are among them."""

    def __missing__(self, name: str) -> Lanes:
        raise UnwrittenError(f"register {name}")


def constant(text: str, kind: str) -> Lanes:
    """A number in an instruction: decimal, 0x…, or the bits of a float (0f…)."""
    text = text.removesuffix("U")
    bits = int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text, 0)
    if kind == "pred":
        return np.array(bool(bits))
    size = bits_of(kind)
    raw = np.array(bits % (1 << size), np.dtype(f"uint{size}"))
    return raw.view(DTYPES[kind])


def reader(kernel: Kernel, operand: str, kind: str, symbols: Mapping[str, int]) -> Reader:
    """How an operand is read as a type. A register may be wider than it: its lower bits count.

    The grid's size (%nctaid) is not known, on purpose: an order of sums could depend on it.
    """
    if operand in symbols:
        found = constant(str(symbols[operand]), kind)
        return lambda _: found
    if not operand.startswith("%"):
        found = constant(operand, kind)
        return lambda _: found
    if operand.partition(".")[0] in ("%tid", "%ctaid", "%laneid"):
        return lambda r: r[operand]
    width, wanted, dtype = kernel.width(operand), bits_of(kind), np.dtype(DTYPES[kind])
    if kind == "pred" or (width == wanted and dtype == _STORED[width]):
        return lambda r: r[operand]
    if width == wanted:
        return lambda r: r[operand].view(dtype)
    if width < wanted:
        raise UnknownInstructionError(f"{operand} has {width} bits, {kind} more")
    narrow = np.dtype(f"uint{wanted}")
    return lambda r: r[operand].astype(narrow).view(dtype)


def writer(kernel: Kernel, register: str, kind: str) -> Writer:
    """How a register is written. It may be wider than the type: a number with a sign keeps it. `_` takes nothing."""
    if register == "_":
        return lambda _r, _value, _mask: None
    width, given = kernel.width(register), bits_of(kind)
    stored = np.dtype(_STORED[width])
    if kind != "pred" and width < given:
        raise UnknownInstructionError(f"{register} has {width} bits, {kind} more")
    signed = np.dtype(f"int{width}") if kind[0] == "s" and width > given else None
    dtype = np.dtype(DTYPES[kind])

    def write(r: Registers, value: Lanes, mask: Mask) -> None:
        value = np.asarray(value, dtype)
        if signed is not None:
            value = value.astype(signed)
        elif width > given and kind != "pred":
            value = value.view(np.dtype(f"uint{given}")).astype(stored)
        value = value.view(stored)
        if mask is not None:
            value = np.where(mask, value, r.get(register, stored.type(0)))
        dict.__setitem__(r, register, value)

    return write
