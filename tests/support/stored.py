"""Weights in memory as an artifact stores them, and inputs as kernels take them: for calling kernels directly."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact import schema
from pi_runtime.artifact.buffers import cpu_workspace
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS, input_nbytes
from pi_runtime.artifact.formats import BLOCK, FORMATS, GROUP, ROW_FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.quantisation import beside, bounds, dequantise, quantise, row_scales
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import PARTS, array_specs, is_scales, without_scales
from pi_runtime.kernels import reference
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import matrix
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ffn.memory import Batch, Ffn, every_token, ffn_of
from pi_runtime.kernels.ops.tile_packing import lay_tiles, tile_vectors

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
BLOCK_FORMATS = tuple(name for name in ROW_FORMATS if FORMATS[name].quantised)
GROUPED_FORMATS = tuple(name for name in WEIGHT_FORMATS if FORMATS[name].grouped)
TABLE_FORMATS = tuple(name for name in WEIGHT_FORMATS if FORMATS[name].table)
GUARD_NBYTES = 4096
"""Bytes around each buffer that no kernel may write."""
_GUARD = 0xA5
_POISON = np.uint32(0x7FC00000)
"""NaN as float32; as the upper and the lower half of an integer no neuron, and no address of this process."""
__all__ = [
    "BLOCK_FORMATS",
    "GROUPED_FORMATS",
    "ROW_FORMATS",
    "TABLE_FORMATS",
    "WEIGHT_FORMATS",
    "GuardedWorkspace",
    "Layer",
    "LayerWeights",
    "StoredMatrix",
    "ends",
    "ffn_layer",
    "guarded_workspace",
    "quantised_inputs",
    "store",
    "store_integers",
]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a number format; `values` is what its bytes mean."""

    format: str
    stored: npt.NDArray[Any]
    values: F32
    scales: npt.NDArray[Any] | None = None

    @property
    def quantised(self) -> bool:
        return FORMATS[self.format].quantised

    @property
    def fmt(self) -> int:
        """The code that kernels tell formats apart by."""
        return FORMATS[self.format].code

    @property
    def address(self) -> int:
        return int(self.stored.ctypes.data)

    @property
    def scales_address(self) -> int:
        return 0 if self.scales is None else int(self.scales.ctypes.data)

    def beside(self, blocks: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The scales of the blocks (N, B), and their minima or zeros, 0 where there are none.

        Where halves of blocks have scales too, only what is the same for all of a group or a row; such that weights are
        its multiples.
        """
        assert self.scales is not None
        f = FORMATS[self.format]
        scale, offset = beside(f, self.scales, BLOCK * blocks)
        if f.row_scaled:
            scale = np.repeat(row_scales(self.scales) * np.float32(2.0**-10), blocks, axis=-1)
        elif f.scales > 1:
            records = self.scales[:, : blocks // GROUP * f.record_nbytes].reshape(len(self.scales), -1, f.record_nbytes)
            scale = np.repeat(np.ascontiguousarray(records[..., :2]).view("<f2")[..., 0], GROUP, axis=-1)
        return scale.astype(np.float64), offset.astype(np.float64) if f.offset else np.zeros(scale.shape)

    @property
    def view(self) -> Any:
        """The matrix as kernels take it."""
        return matrix(self.fmt, self.address, self.scales_address, self.values.shape[-1])


def store(fmt: str, values: npt.ArrayLike) -> StoredMatrix:
    values = np.asarray(values, np.float32)
    f = FORMATS[fmt]
    if f.quantised and values.ndim > 1:
        stored, scales = quantise(f, values)
        return StoredMatrix(fmt, stored, dequantise(f, stored, scales, values.shape[-1]), scales)
    stored = f.encode(values)
    return StoredMatrix(fmt, stored, np.ascontiguousarray(f.decode(stored, values.shape[-1])))


def ends(fmt: str) -> tuple[int, int]:
    """The least and the greatest signed integer that `store_integers` takes."""
    return (-8, 7) if FORMATS[fmt].offset else bounds(FORMATS[fmt])


def store_integers(fmt: str, q_ND: npt.ArrayLike, scale: npt.ArrayLike) -> StoredMatrix:
    """Put together a matrix of a block format byte by byte, from signed integers and scales.

    Zeros are 8, and minima −8 times the scales.
    """
    q_ND = np.asarray(q_ND, np.int64)
    rows, columns = q_ND.shape
    f, blocks = FORMATS[fmt], -(-columns // BLOCK)
    zero = 8 if f.offset else f.zero
    stored = np.zeros(f.stored_shape((rows, columns)), f.stored)
    if f.bits < 8 and columns % BLOCK:  # whole blocks are stored
        q_ND = np.pad(q_ND, ((0, 0), (0, -columns % BLOCK)))
    beside = np.zeros(FORMATS["scale"].stored_shape((rows, 2, blocks)), np.float16)
    beside[:, 0, :blocks] = scale
    if f.offset:
        beside[:, 1, :blocks] = 8 if f.offset == "zero" else -8 * beside[:, 0, :blocks]
    for column, q_N in enumerate(q_ND.T):
        index, run = _stored_index(column, blocks)
        if fmt == "q8":
            stored[:, index] = q_N
            continue
        code_N, inside = (q_N + zero).astype(np.uint8), index % run
        at = (index - inside) * f.bits // 8
        stored[:, at + inside % (run // 2)] |= (code_N & 15) << 4 * (inside // (run // 2))
        if f.bits > 4:
            upper, nbytes = f.bits - 4, run * (f.bits - 4) // 8
            stored[:, at + run // 2 + inside % nbytes] |= code_N >> 4 << upper * (inside // nbytes)
    values = q_ND[:, :columns] * np.repeat(beside[:, 0, :blocks].astype(np.float32), BLOCK, -1)[:, :columns]
    return StoredMatrix(fmt, stored, values.astype(np.float32), beside if f.offset else beside[:, 0].copy())


def _stored_index(column: int, blocks: int) -> tuple[int, int]:
    """Index of a column in a stored row, and how many integers below 8 bits are stored together there."""
    group, inside = divmod(column, 8 * BLOCK)
    if group >= blocks // 8:
        return column, 2 * BLOCK
    block, k, j = inside // 32, inside % 32 // 4, inside % 4
    return group * 8 * BLOCK + 32 * k + 4 * block + j, 8 * BLOCK


def quantised_inputs(fmt: int, x_TD: F32) -> npt.NDArray[np.uint8]:
    """One input for each vector, in memory that was not zero; laid as tiles where these multiply them."""
    found = np.full((len(x_TD), input_nbytes(x_TD.shape[1])), 0xA5, np.uint8)
    for x_D, x_at in zip(x_TD, found, strict=True):
        prepare_input(fmt, x_D, x_at.ctypes.data)
    lay_tiles(x_TD.shape[1], tile_vectors(fmt, len(x_TD)), found.ctypes.data)
    return found


@dataclass(frozen=True)
class LayerWeights:
    """One layer's arrays by their short names, as the reference takes them."""

    matrices: Mapping[str, StoredMatrix]

    def __contains__(self, name: str) -> bool:
        return name in self.matrices

    def __getitem__(self, name: str) -> F32:
        return self.matrices[name].values

    def product(self, name: str, x_TD: F32) -> F32:
        rounded_TD = reference.rounded(x_TD) if self.matrices[name].quantised else x_TD
        return np.tensordot(rounded_TD, self[name], (-1, -1))


@dataclass(frozen=True)
class GuardedWorkspace:
    """A workspace whose buffers lie between guards, and tell a kernel that reads what it has not written."""

    ws: Workspace
    rooms: Mapping[str, npt.NDArray[np.uint8]]
    """Each buffer with its guards."""
    poisoned: tuple[str, ...]
    """The buffers that hold nothing before a call."""

    def poison(self) -> None:
        """Make all that earlier calls have left behind unusable."""
        for name in self.poisoned:
            self.rooms[name][GUARD_NBYTES:-GUARD_NBYTES].view(np.uint32)[:] = _POISON

    def assert_guards_whole(self) -> None:
        for name, room in self.rooms.items():
            for guard in (room[:GUARD_NBYTES], room[-GUARD_NBYTES:]):
                assert np.all(guard == _GUARD), f"wrote outside {name}"


def guarded_workspace(decoder: Decoder, largest_rank: int, tokens: int = BLOCK_TOKENS) -> GuardedWorkspace:
    rooms, arrays, table = {}, {}, cpu_workspace(decoder, largest_rank, tokens)
    for name, buffer in table.items():
        rooms[name] = np.full(buffer.nbytes + 2 * GUARD_NBYTES, _GUARD, np.uint8)
        arrays[name] = rooms[name][GUARD_NBYTES:-GUARD_NBYTES].view(buffer.dtype).reshape(buffer.shape)
        if buffer.fill is not None:
            arrays[name][:] = buffer.fill
    arrays["token_T"][:] = np.arange(tokens)
    poisoned = tuple(name for name, buffer in table.items() if buffer.fill is None and name != "token_T")
    found = GuardedWorkspace(Workspace(**arrays), rooms, poisoned)
    found.poison()
    return found


@dataclass(frozen=True)
class Layer:
    """One layer's FFN with a predictor: its weights, and the rows of addresses that kernels take."""

    decoder: Decoder
    cfg: weight_table.KernelConfig
    values: LayerWeights
    record_X: weight_table.LayerRecords
    """Where the weights of each expert are."""
    rank: int
    guarded: GuardedWorkspace

    @property
    def ws(self) -> Workspace:
        return self.guarded.ws

    def settings(self, rung: str) -> schema.Layer:
        """The layer's settings on a rung."""
        threshold = 0.3 if RUNGS[rung].parameter == "threshold" else 0.0
        return schema.Layer(rung=rung, rank=self.rank, threshold=threshold)

    def experts_on(self, rung: str) -> weight_table.LayerRecords:
        """The layer's records on a rung, one for each expert."""
        found = self.record_X.copy()
        for field, value in weight_table.settings_of(self.decoder, self.settings(rung), "auto").items():
            found[field] = value
        found["d_ff"] = self.decoder.d_ff
        return found

    @property
    def ffn(self) -> Ffn:
        """What the FFN's kernels take in every call."""
        return ffn_of(self.cfg, self.ws)

    def batch(
        self, rung: str, low: int, high: int, tokens: int, *, select: bool = True, route_weight: float = 1.0
    ) -> Batch:
        """A range of the first expert's neurons for all tokens of a call."""
        return every_token(self.experts_on(rung), 0, low, high, tokens, select, route_weight)


def ffn_layer(decoder: Decoder, fmt: str, rank: int, seed: int, **given: F32) -> Layer:
    """Random weights of one layer of `decoder`; `given` replaces some, `__` standing for a slash."""
    decoder = replace(decoder, n_layers=1)
    formats = dict.fromkeys(PARTS, fmt)
    rng = np.random.default_rng(seed)
    matrices = {}
    for name, spec in array_specs(decoder, formats, [rank], False).items():
        local = name.removeprefix("layers/0/")
        if not is_scales(name) and local.startswith(("ffn/", "predictor/")):
            values = rng.standard_normal(spec.shape, np.float32) / np.float32(np.sqrt(spec.shape[-1]))
            matrices[local] = store(spec.format, given.get(local.replace("/", "__"), values))
    cfg, experts = weight_table.config_of(decoder, formats), decoder.n_experts
    record_X = np.zeros(experts, weight_table.LAYER)
    weight_table.fill(
        record_X, weight_table.formats_of(formats, 0), lambda name, expert: _address(matrices, name, expert, experts)
    )
    ws = guarded_workspace(decoder, rank)
    return Layer(decoder, cfg, LayerWeights(matrices), record_X, rank, ws)


def _address(matrices: Mapping[str, StoredMatrix], name: str, expert: int, experts: int) -> int:
    """Address of an expert's rows of an array; 0 where there is none."""
    m = matrices.get(without_scales(name))
    if m is None or is_scales(name) > (m.scales is not None):
        return 0
    stored = m.scales if is_scales(name) else m.stored
    assert stored is not None
    own = name.startswith(weight_table.EXPERT_ARRAYS)
    return int(stored.ctypes.data) + (expert * (stored.nbytes // experts) if own else 0)
