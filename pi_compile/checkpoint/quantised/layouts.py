"""Where the integers of a quantised matrix are, in each form of file.

All forms mean the same:

    W[n, k] = scale[n, g] · (q[n, k] − zero[n, g])          g the group of column k

The product is computed in binary32, where it is exact for scales of 16 bits. Integers are stored in words of 32 bits,
the first in the lowest bits. Shape letters: N rows (outputs), K columns (inputs), G groups of columns, B bits.

    form                 integers                             scales   zeros                           groups
    GPTQ                 qweight [K·B/32, N] along K          [G, N]   qzeros [G, N·B/32] along N      g_idx [K]
    AWQ                  qweight [K, N·B/32] along N          [G, N]   qzeros [G, N·B/32] along N      equal
    compressed-tensors   weight_packed [N, ⌈K·B/32⌉] along K  [N, G]   weight_zero_point, below        equal, or
                         or weight [N, K], int8                                                        weight_g_idx [K]
    BitNet               weight [N/4, K], two bits a row      one      all 1                           one

AWQ has column 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[i] at place i of word w. compressed-tensors stores q + 2^(B−1), and so its
zeros, if there are any: [⌈N·B/32⌉, G] along N; beside int8, and in older files, they are int8 [N, G] as they are.

Sources: AutoGPTQ and GPTQModel (`qlinear`), AutoAWQ (`packing_utils`), compressed-tensors (`pack_quantized`),
transformers (`integrations/bitnet.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint.quantised.scheme import BITS, Scheme
from pi_compile.checkpoint.tensors import BF16, Array, Index, Values, as_float32, type_name
from pi_compile.checkpoint.tensors import FORMATS as STORED
from pi_runtime.artifact.formats import BLOCK, BYTE_SCALES, FORMATS, Format
from pi_runtime.artifact.quantisation import meant

WORD = 32
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The place in its word of each of eight columns."""
_UINT8 = np.dtype("<u1")
_INT8, _INT32 = np.dtype("<i1"), np.dtype("<i4")
_INTEGERS = (_INT32, np.dtype("<i2"), np.dtype("<i8"))
_FLOATS = (np.dtype("<f2"), BF16, np.dtype("<f4"))
Tensors = Mapping[str, Array]


def _of_bits(bits: int, offset: str = "") -> tuple[str, ...]:
    """The block formats of such integers."""
    return tuple(f.name for f in FORMATS.values() if (f.block_bits, f.offset, f.summed) == (bits, offset, True))


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix [N, K] of which some rows are read at a time, as float32."""

    shape: tuple[int, int]
    bits: int
    integers: Callable[[Index], Array]
    """The integers [rows, K] of some rows."""
    scale_NG: Array
    zeros: Callable[[Index], Array] | None
    """The zeros [rows, G] of some rows; None where all are 0."""
    group_K: npt.NDArray[np.int64]
    """The group of each column."""
    nbytes: int
    """Stored bytes of all its tensors."""
    start: int = 0
    """What integers and zeros are raised by where they are not below 0: 8 for −8 … 7."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Index, /) -> Values:
        values = self.integers(rows).astype(np.float32, order="C")
        if self.zeros is not None:
            values -= self.zeros(rows).astype(np.float32)[:, self.group_K]
        values *= as_float32(self.scale_NG[rows])[:, self.group_K]
        return values

    @property
    def grids(self) -> tuple[str, ...]:
        """The format with zeros, where scales are binary16 numbers by their type."""
        return _of_bits(self.bits, "zero") if self._in_blocks and self.scale_NG.dtype == np.float16 else ()

    @property
    def _in_blocks(self) -> bool:
        """Whether integers are of 4 bits, and each block of 32 columns lies in one group."""
        group_BJ = self.group_K.reshape(-1, BLOCK) if self.shape[1] % BLOCK == 0 else np.zeros((0, BLOCK), np.int64)
        return self.bits == 4 and len(group_BJ) > 0 and bool((group_BJ == group_BJ[:, :1]).all())

    def on_grid(self, fmt: Format, rows: Index, /) -> tuple[Array, Array] | None:
        """Integers of 4 bits, scales and zeros for blocks of 32, if each lies in one group and a format holds them."""
        if fmt.bits != self.bits or fmt.offset == "minimum" or not (fmt.summed and self._in_blocks):
            return None
        group_B = self.group_K[::BLOCK]
        scale_RB = as_float32(self.scale_NG[rows])[:, group_B]
        half_RB = np.clip(scale_RB, -65504, 65504).astype(np.float16)
        if (half_RB != scale_RB).any():
            return None
        q = self.integers(rows).astype(np.int8)
        zero_RB = np.full(half_RB.shape, self.start, np.int64)
        if self.zeros is not None:
            zero_RB += self.zeros(rows)[:, group_B]
        if fmt.offset:
            return q + np.int8(self.start), np.stack([half_RB, zero_RB.astype(np.float16)], axis=1)
        return (q + np.int8(self.start - fmt.zero), half_RB) if (zero_RB == fmt.zero).all() else None

    @property
    def is_permuted(self) -> bool:
        """Whether columns of one group do not lie side by side, as GPTQ's act-order leaves them."""
        return bool((np.diff(self.group_K) < 0).any())


@dataclass(frozen=True, eq=False)
class MxMatrices:
    """Matrices [X, N, K] of MXFP4, of which some are read at a time, as float32: 32 numbers share an exponent.

    A byte has two of them, the first in its lower half: sign, two bits of exponent, one of mantissa. They are blocks
    [X, N, G, 16] and exponents [X, N, G] plus 127 (OCP Microscaling Formats 1.0).
    """

    blocks: Array
    exponents: Array
    order_N: Array | None = None
    """The rows of one matrix that are wanted; None for all."""
    bits = 4
    is_permuted = False
    grids = ("mxfp4",)

    def matrix(self, item: int, taken: Callable[[Array], Array]) -> "MxMatrices":
        """Some rows of one of them, as a matrix."""
        return MxMatrices(self.blocks[item], self.exponents[item], taken(np.arange(self.shape[1])))

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, groups = self.exponents.shape
        return *(leading if self.order_N is None else self.order_N.shape), groups * WORD

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.exponents.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def _stored(self, index: Index) -> tuple[Array, Array]:
        """Twice the numbers (…, K), as integers, and exponents (…, G)."""
        at = index if self.order_N is None else self.order_N[index]
        blocks = self.blocks[at]
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1)
        return meant(FORMATS["mxfp4"], numbers.reshape(*numbers.shape[:-3], -1)), self.exponents[at]

    def __getitem__(self, index: Index, /) -> Values:
        q, exponents = self._stored(index)
        with np.errstate(over="ignore"):  # what is too large for a float32 becomes infinite, and is refused
            values: Values = q * np.repeat(BYTE_SCALES["e8m0"][exponents], WORD, axis=-1)
        return values

    def on_grid(self, fmt: Format, index: Index, /) -> tuple[Array, Array] | None:
        """Integers and exponents of a matrix. For other formats quantising finds these powers of two again (see
        `quantise`)."""
        return self._stored(index) if fmt.name in self.grids else None


@dataclass(frozen=True, eq=False)
class TernaryMatrix:
    """A matrix [N, K] of −1, 0 and 1 times one scale, of which some rows are read at a time, as float32."""

    shape: tuple[int, int]
    ternary: Callable[[Index], Array]
    """The integers of some rows, int8."""
    scale: np.float32
    nbytes: int
    bits = 2
    is_permuted = False

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Index, /) -> Values:
        return self.ternary(rows).astype(np.float32, order="C") * self.scale

    @property
    def grids(self) -> tuple[str, ...]:
        """The smallest with these integers, where binary16 has the scale."""
        kept = np.float32(np.float16(self.scale)) == self.scale and self.shape[1] % BLOCK == 0
        return _of_bits(4) if kept else ()

    def on_grid(self, fmt: Format, rows: Index, /) -> tuple[Array, Array] | None:
        """Integers, and the scale for each block."""
        if fmt.name not in self.grids:
            return None
        q = self.ternary(rows)
        return q, np.full((len(q), q.shape[1] // BLOCK), self.scale, np.float16)

    @property
    def turned(self) -> "TernaryMatrix":
        """Its columns as rows."""
        return replace(self, shape=self.shape[::-1], ternary=lambda columns: self.ternary(slice(None))[:, columns].T)


def _packed_ternary(words: Array, scale: np.float32) -> TernaryMatrix:
    """Words [N/4, K] of bytes: row i N/4 + j plus 1 is in bits 2 i and 2 i + 1 of row j."""
    quarter, columns = words.shape

    def rows(index: Index) -> Array:
        row = np.arange(4 * quarter)[index]
        shift = (2 * (row // quarter)).astype(np.uint8)[:, None]
        found: Array = (words[row % quarter] >> shift & np.uint8(3)).view(np.int8) - np.int8(1)
        return found

    return TernaryMatrix((4 * quarter, columns), rows, np.float32(scale), words.nbytes + 2)


def _rounded_ternary(weights: Array) -> TernaryMatrix:
    """Master weights w, as they are used: the nearest of −1, 0, 1 to w ÷ mean |w|, times that mean in their format."""
    parts = (as_float32(weights[start : start + 256]) for start in range(0, len(weights), 256))
    mean = np.float32(sum(float(np.abs(part).sum(dtype=np.float64)) for part in parts) / weights.size)
    inverse, fmt = np.float32(1) / max(mean, np.float32(1e-5)), FORMATS[STORED[weights.dtype]]
    return TernaryMatrix(
        (weights.shape[0], weights.shape[1]),
        lambda rows: np.clip(np.rint(as_float32(weights[rows]) * inverse), -1, 1).astype(np.int8),
        fmt.decode(fmt.encode(np.array([1], np.float32) / inverse), 1)[0],
        weights.nbytes,
    )


@dataclass(frozen=True)
class Layout:
    """The tensors that make a quantised layer's weight, and how."""

    main: str
    """Name of the tensor with the integers, after the layer's name and a dot."""
    beside: tuple[str, ...]
    """Names of those that must be there too."""
    optional: tuple[str, ...]
    open: Callable[[Tensors, Scheme], QuantisedMatrix | MxMatrices | TernaryMatrix]
    """Raises ValueError for tensors that do not fit together; its text says what was expected."""
    name: str = "weight"
    """Name that its tensor would have, after the layer's."""
    layers: str = ""
    """Ending of the names of all layers that are so stored, where no tensor beside tells them."""


def _gptq(tensors: Tensors, scheme: Scheme) -> QuantisedMatrix:
    words, scale_GN, bits = tensors["qweight"], tensors["scales"], scheme.bits
    _check("qweight", words, _INTEGERS[:1], 2)
    stored, rows = tensors.get("g_idx"), words.shape[1]
    columns = words.shape[0] * WORD // bits
    if stored is not None and -(-stored.size * bits // WORD) == words.shape[0]:
        columns = stored.size  # the last word need not be full
    groups = _check_scales("scales", scale_GN, (None, rows))[0]
    zeros = _check("qzeros", tensors["qzeros"], _INTEGERS[:1], (groups, -(-rows * bits // WORD)))
    return QuantisedMatrix(
        (rows, columns),
        bits,
        lambda index: _unpacked(words[:, index].T, bits)[:, :columns],
        scale_GN.T,
        lambda index: _columns(zeros, bits, index, rows) + scheme.stored_zero & (1 << bits) - 1,
        _groups(stored, columns, groups, scheme),
        _nbytes(tensors),
    )


def _awq(tensors: Tensors, scheme: Scheme) -> QuantisedMatrix:
    words, scale_GN, bits = tensors["qweight"], tensors["scales"], scheme.bits
    groups, rows = _check_scales("scales", scale_GN, (None, None))
    columns = _check("qweight", words, _INTEGERS[:1], (None, -(-rows * bits // WORD))).shape[0]
    zeros = _check("qzeros", tensors["qzeros"], _INTEGERS[:1], (groups, words.shape[1]))
    return QuantisedMatrix(
        (rows, columns),
        bits,
        lambda index: _columns(words, bits, index, rows, _AWQ_ORDER),
        scale_GN.T,
        lambda index: _columns(zeros, bits, index, rows, _AWQ_ORDER),
        _groups(None, columns, groups, scheme),
        _nbytes(tensors),
    )


def _packed(tensors: Tensors, scheme: Scheme) -> QuantisedMatrix:
    words = _check("weight_packed", tensors["weight_packed"], _INTEGERS[:1], 2)
    shape = _check("weight_shape", tensors["weight_shape"], _INTEGERS, (2,)).tolist()
    rows, columns = shape
    fitting = [bits for bits in BITS if tuple(words.shape) == (rows, -(-columns * bits // WORD))]
    if min(shape) < 1 or not fitting:
        raise ValueError(f"weight_packed of {tuple(words.shape)} holds no {rows} × {columns} integers of 4 or 8 bits")
    bits, start = fitting[0], 1 << fitting[0] - 1
    scale_NG, groups = _channel_scales(tensors, rows)
    zeros = _channel_zeros(tensors, rows, groups, bits, scheme)
    return QuantisedMatrix(
        (rows, columns),
        bits,
        lambda index: _unpacked(words[index], bits)[:, :columns] - start,
        scale_NG,
        zeros,
        _groups(tensors.get("weight_g_idx"), columns, groups, scheme),
        _nbytes(tensors),
        start,
    )


def _plain(tensors: Tensors, scheme: Scheme) -> QuantisedMatrix:
    integers = _check("weight", tensors["weight"], (_INT8,), 2)
    rows, columns = integers.shape
    scale_NG, groups = _channel_scales(tensors, rows)
    return QuantisedMatrix(
        (rows, columns),
        8,
        lambda index: integers[index],
        scale_NG,
        _channel_zeros(tensors, rows, groups, 8, scheme),
        _groups(tensors.get("weight_g_idx"), columns, groups, scheme),
        _nbytes(tensors),
    )


def _mx(tensors: Tensors, _: Scheme) -> MxMatrices:
    (main, blocks), (beside, exponents) = tensors.items()
    shape = tuple(_check(beside, exponents, (_UINT8,), 3).shape)
    return MxMatrices(_check(main, blocks, (_UINT8,), (*shape, WORD // 2)), exponents)


def _ternary(tensors: Tensors, scheme: Scheme) -> TernaryMatrix:
    packed = _check("weight", tensors["weight"], (_UINT8,), 2)
    scale = as_float32(_check("weight_scale", tensors["weight_scale"], _FLOATS, (1,)))[0]
    return _packed_ternary(packed, np.float32(1) / scale if scheme.divides else scale)


def _rounded(tensors: Tensors, _: Scheme) -> TernaryMatrix:
    return _rounded_ternary(_check("weight", tensors["weight"], _FLOATS, 2))


LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "gptq": (Layout("qweight", ("qzeros", "scales"), ("g_idx",), _gptq),),
    "awq": (Layout("qweight", ("qzeros", "scales"), (), _awq),),
    "compressed-tensors": (
        Layout("weight_packed", ("weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx"), _packed),
        Layout("weight", ("weight_scale",), ("weight_zero_point", "weight_g_idx"), _plain),
    ),
    "bitnet": (Layout("weight", ("weight_scale",), (), _ternary),),
    "bitnet online": (Layout("weight", (), (), _rounded, layers="_proj"),),
    "mxfp4": tuple(
        Layout(f"{part}_proj_blocks", (f"{part}_proj_scales",), (), _mx, f"{part}_proj") for part in ("gate_up", "down")
    ),
}
"""Method → its layouts."""


def _unpacked(words: Array, bits: int) -> Array:
    """The integers [rows, columns · 32 / bits] of words that are packed along the columns."""
    places = np.arange(0, WORD, bits, dtype=_INT32)
    return (np.ascontiguousarray(words)[:, :, None] >> places & (1 << bits) - 1).reshape(len(words), -1)


def _columns(words: Array, bits: int, index: Index, count: int, order: npt.NDArray[np.int64] | None = None) -> Array:
    """The integers [columns, rows] of some of `count` columns, packed along the columns."""
    column = np.arange(count)[index]
    per_word = WORD // bits
    place = column % per_word if order is None else order[column % per_word]
    return (words[:, column // per_word] >> (place * bits).astype(_INT32) & (1 << bits) - 1).T


def _channel_scales(tensors: Tensors, rows: int) -> tuple[Array, int]:
    """Scales [N, G] of compressed-tensors, which has one number for a matrix with one scale; and G."""
    scale = tensors["weight_scale"]
    if scale.size == 1:
        scale = np.broadcast_to(scale.reshape(1, 1), (rows, 1))
    return scale, _check_scales("weight_scale", scale, (rows, None))[1]


def _channel_zeros(
    tensors: Tensors, rows: int, groups: int, bits: int, scheme: Scheme
) -> Callable[[Index], Array] | None:
    zeros = tensors.get("weight_zero_point")
    if zeros is None:
        if scheme.layers[0].has_zeros:
            raise ValueError("weight_zero_point, because symmetric is false")
        return None
    if zeros.dtype == _INT32:
        packed = _check("weight_zero_point", zeros, _INTEGERS[:1], (-(-rows * bits // WORD), groups)).T
        return lambda index: _columns(packed, bits, index, rows) - (1 << bits - 1)
    if zeros.size == 1:
        zeros = np.broadcast_to(zeros.reshape(1, 1), (rows, 1))
    _check("weight_zero_point", zeros, (_INT8,), (rows, groups))
    return lambda index: zeros[index]


def _groups(stored: Array | None, columns: int, groups: int, scheme: Scheme) -> npt.NDArray[np.int64]:
    """The group of each column: as it is stored, or equal ones side by side."""
    if stored is not None and stored.size:
        group_K = _check("g_idx", stored, _INTEGERS, (columns,)).astype(np.int64)
        if int(group_K.min()) < 0 or int(group_K.max()) >= groups:
            raise ValueError(f"g_idx in 0 … {groups - 1}, the groups that have a scale")
        return group_K
    if scheme.layers[0].permuted and groups > 1:
        raise ValueError("g_idx, the group of each column, because columns are permuted (desc_act, actorder)")
    if columns % groups:
        raise ValueError(f"groups of equal size, or a g_idx, and not {groups} groups of {columns} columns")
    return np.arange(columns) // (columns // groups)


def _check_scales(name: str, scales: Array, shape: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(_check(name, scales, _FLOATS, shape).shape)


def _check(name: str, tensor: Array, dtypes: tuple[np.dtype[Any], ...], shape: int | tuple[int | None, ...]) -> Array:
    """The tensor, if it has one of these types and this shape or number of axes; no axis may be empty."""
    axes = shape if isinstance(shape, int) else len(shape)
    wanted = (None,) * axes if isinstance(shape, int) else shape
    fits = tensor.ndim == axes and all(w in (None, n) for w, n in zip(wanted, tensor.shape, strict=True))
    if tensor.dtype not in dtypes or not fits or not prod(tensor.shape):
        types = " or ".join(map(type_name, dtypes))
        size = " × ".join("…" if n is None else str(n) for n in wanted)
        raise ValueError(f"{name} of {types}, {size}, not {type_name(tensor.dtype)} {tensor.shape}")
    return tensor


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
