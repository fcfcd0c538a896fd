"""Instructions that compute: what each takes and gives, as types of PTX, and a NumPy function.

`OPERATIONS` has every form by its whole name, so a form that is not here is refused. Approximations (`ex2.approx`,
`div.full`, `sqrt.approx`) give the nearest float32; a fused product and sum is rounded once from float64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]
"""A value of every thread, or one value for all of them."""

DTYPES: dict[str, type[np.generic]] = {
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "pred": np.bool_,
}  # fmt: skip


class Operation(NamedTuple):
    """What an instruction gives, what it takes, and how it is computed."""

    gives: str
    takes: tuple[str, ...]
    compute: Callable[..., Any]


def bits_of(kind: str) -> int:
    """Bits of a type."""
    return np.dtype(DTYPES[kind]).itemsize * 8


def _shift_left(a: Lanes, n: Lanes) -> Lanes:
    bits = a.dtype.itemsize * 8
    return np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Lanes, n: Lanes) -> Lanes:
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))


def _divide(a: Lanes, b: Lanes) -> Lanes:
    """Rounded towards 0. By 0: all bits set, as GPUs do."""
    whole = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return np.where(b == 0, -1, np.where((a < 0) != (b < 0), -whole, whole)).astype(a.dtype)


def _remainder(a: Lanes, b: Lanes) -> Lanes:
    return (a - _divide(a, b) * b).astype(a.dtype)


def _field(a: Lanes, first: Lanes, count: Lanes) -> Lanes:
    """Bits first to first + count, with the sign of the highest one where a has a sign."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    first, count = (first & 255).astype(wide), (count & 255).astype(wide)
    up = np.clip(64 - first.astype(np.int64) - count.astype(np.int64), 0, 63).astype(wide)
    return np.where(count == 0, 0, (a.astype(wide) << up) >> np.minimum(up + first, 63).astype(wide)).astype(a.dtype)


def _pick_bytes(a: Lanes, b: Lanes, picked: Lanes) -> Lanes:
    both, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint64(0)
    for place in range(4):
        code = picked.astype(np.uint64) >> np.uint64(4 * place)
        byte = both >> (code & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7) != 0, np.uint64(255), np.uint64(0))
        found = found | np.where(code & np.uint64(8) != 0, sign, byte) << np.uint64(8 * place)
    return np.asarray(found).astype(np.uint32)


def _fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def _wide(wider: type[np.generic]) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda a, b: a.astype(wider) * b.astype(wider)


def _high(a: Lanes, b: Lanes) -> Lanes:
    """The upper half of a product."""
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)
    product = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return np.asarray(product >> 64).astype(a.dtype)


def _whole(kind: str, rounded: Callable[[Lanes], Lanes]) -> Callable[[Lanes], Lanes]:
    """A float as an integer: NaN is 0, and what is too large the largest."""
    limits = np.iinfo(DTYPES[kind])
    return lambda a: np.clip(np.nan_to_num(rounded(a.astype(np.float64)), nan=0.0), limits.min, limits.max).astype(
        DTYPES[kind]
    )


def _from_bf16(a: Lanes) -> Lanes:
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(a: Lanes) -> Lanes:
    """To the nearest, the even one of two."""
    word = a.view(np.uint32)
    rounded = word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _pair(low: Lanes, high: Lanes) -> Lanes:
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)


def _signs_kept(sign: Lanes, a: Lanes) -> Lanes:
    return np.copysign(a, sign)


def _compared() -> dict[str, Operation]:
    found = {}
    ordered: dict[str, Callable[..., Any]] = {
        "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    }  # fmt: skip

    def either_nan(a: Lanes, b: Lanes) -> Lanes:
        return np.isnan(a) | np.isnan(b)

    for name, compare in ordered.items():
        for kind in [k for k in DTYPES if k not in ("bf16", "pred")]:
            found[f"setp.{name}.{kind}"] = Operation("pred", (kind, kind), compare)
        for kind in ("f16", "f32", "f64"):
            unordered = lambda a, b, compare=compare: compare(a, b) | either_nan(a, b)  # noqa: E731
            found[f"setp.{name}u.{kind}"] = Operation("pred", (kind, kind), unordered)
    for kind in [k for k in DTYPES if k[0] in "bus"]:
        found[f"setp.ne.{kind}"] = Operation("pred", (kind, kind), np.not_equal)
    for kind in ("f16", "f32", "f64"):
        found[f"setp.neu.{kind}"] = Operation("pred", (kind, kind), np.not_equal)
        found[f"setp.ne.{kind}"] = Operation("pred", (kind, kind), lambda a, b: (a != b) & ~either_nan(a, b))
        found[f"setp.nan.{kind}"] = Operation("pred", (kind, kind), either_nan)
        found[f"setp.num.{kind}"] = Operation("pred", (kind, kind), lambda a, b: ~either_nan(a, b))
    return found


def _of_integers() -> dict[str, Operation]:
    found = {}
    for kind in [f"{k}{bits}" for k in "us" for bits in (16, 32, 64)]:
        two = (kind, kind)
        for name, compute in {
            "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "min": np.minimum, "max": np.maximum,
            "div": _divide if kind[0] == "s" else lambda a, b: a // np.maximum(b, 1), "rem": _remainder,
        }.items():  # fmt: skip
            found[f"{name}.{kind}"] = Operation(kind, two, compute)
        found[f"mad.lo.{kind}"] = Operation(kind, (*two, kind), lambda a, b, c: a * b + c)
        found[f"shr.{kind}"] = Operation(kind, (kind, "u32"), _shift_right)
        if bits_of(kind) < 64:
            wider = f"{kind[0]}{2 * bits_of(kind)}"
            wide = _wide(DTYPES[wider])
            found[f"mul.wide.{kind}"] = Operation(wider, two, wide)
            found[f"mad.wide.{kind}"] = Operation(wider, (*two, wider), lambda a, b, c, wide=wide: wide(a, b) + c)
    for kind in ("s16", "s32", "s64"):
        found[f"neg.{kind}"] = Operation(kind, (kind,), np.negative)
        found[f"abs.{kind}"] = Operation(kind, (kind,), np.abs)
    for kind in ("u32", "s32", "u64", "s64"):
        found[f"mul.hi.{kind}"] = Operation(kind, (kind, kind), _high)
    for kind in ("u32", "s32", "u64", "s64"):
        found[f"bfe.{kind}"] = Operation(kind, (kind, "u32", "u32"), _field)
    for kind in ("b16", "b32", "b64"):
        found[f"shl.{kind}"] = Operation(kind, (kind, "u32"), _shift_left)
        found[f"shr.{kind}"] = Operation(kind, (kind, "u32"), _shift_right)
    for kind in ("b16", "b32", "b64", "pred"):
        for name, compute in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
            found[f"{name}.{kind}"] = Operation(kind, (kind, kind), compute)
        found[f"not.{kind}"] = Operation(kind, (kind,), np.invert)
    for kind in ("b32", "b64"):
        found[f"popc.{kind}"] = Operation("u32", (kind,), lambda a: np.bitwise_count(a).astype(np.uint32))
    found["prmt.b32"] = Operation("b32", ("b32", "b32", "b32"), _pick_bytes)
    return found


def _of_floats() -> dict[str, Operation]:
    found = {}
    for kind in ("f16", "f32", "f64"):
        two = (kind, kind)
        for name, compute in {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax,
            "add.rn": np.add, "sub.rn": np.subtract, "mul.rn": np.multiply,
        }.items():  # fmt: skip
            found[f"{name}.{kind}"] = Operation(kind, two, compute)
        found[f"neg.{kind}"] = Operation(kind, (kind,), np.negative)
        found[f"abs.{kind}"] = Operation(kind, (kind,), np.abs)
    found["fma.rn.f32"] = Operation("f32", ("f32", "f32", "f32"), _fused)
    for name in ("div.full.f32", "div.rn.f32"):
        found[name] = Operation("f32", ("f32", "f32"), np.divide)
    one: dict[str, Callable[..., Any]] = {
        "ex2.approx.f32": np.exp2, "sqrt.approx.f32": np.sqrt, "sqrt.rn.f32": np.sqrt, "rcp.rn.f32": np.reciprocal,
    }  # fmt: skip
    found |= {name: Operation("f32", ("f32",), compute) for name, compute in one.items()}
    found["copysign.f32"] = Operation("f32", ("f32", "f32"), _signs_kept)
    return found


def _converted() -> dict[str, Operation]:
    integers = [f"{k}{bits}" for k in "us" for bits in (8, 16, 32, 64)]
    found = {}
    for taken in integers:
        for given in integers:
            found[f"cvt.{given}.{taken}"] = Operation(given, (taken,), lambda a, d=DTYPES[given]: a.astype(d))
        for given in ("f16", "f32", "f64"):
            found[f"cvt.rn.{given}.{taken}"] = Operation(given, (taken,), lambda a, d=DTYPES[given]: a.astype(d))
    for given in integers:
        for name, rounded in {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}.items():
            found[f"cvt.{name}.{given}.f32"] = Operation(given, ("f32",), _whole(given, rounded))
    found["cvt.f32.f16"] = Operation("f32", ("f16",), lambda a: a.astype(np.float32))
    found["cvt.f32.bf16"] = Operation("f32", ("bf16",), _from_bf16)
    found["cvt.rn.f16.f32"] = Operation("f16", ("f32",), lambda a: a.astype(np.float16))
    found["cvt.rn.bf16.f32"] = Operation("bf16", ("f32",), _to_bf16)
    halves = lambda a, b: _pair(b.astype(np.float16), a.astype(np.float16))  # noqa: E731
    found["cvt.rn.f16x2.f32"] = Operation("b32", ("f32", "f32"), halves)
    found["cvt.rn.bf16x2.f32"] = Operation("b32", ("f32", "f32"), lambda a, b: _pair(_to_bf16(b), _to_bf16(a)))
    return found


def _moved() -> dict[str, Operation]:
    found = {}
    for kind in [k for k in DTYPES if k != "bf16"]:
        found[f"mov.{kind}"] = Operation(kind, (kind,), lambda a: a)
        found[f"selp.{kind}"] = Operation(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))
    return found


def _flushed(known: dict[str, Operation]) -> dict[str, Operation]:
    """The forms with `.ftz`: numbers too small for full precision are 0, before and after."""

    def flush(value: Lanes) -> Lanes:
        small = value.dtype == np.float32 and np.abs(value) < np.finfo(np.float32).tiny
        return np.where(small, np.copysign(np.float32(0), value), value) if np.any(small) else value

    def flushing(o: Operation) -> Operation:
        return Operation(o.gives, o.takes, lambda *values: flush(np.asarray(o.compute(*map(flush, values)))))

    return {f"{name[:-4]}.ftz.f32": flushing(o) for name, o in known.items() if name.endswith(".f32")}


_KEPT = _of_floats() | _compared()
OPERATIONS = {**_moved(), **_of_integers(), **_KEPT, **_flushed(_KEPT), **_converted()}
