"""What compiled code knows of an artifact: a `Shape` of integers, and one row of addresses a layer.

Numba compiles once for these types, whatever the model and its number formats.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import scales_name

# Columns of the weight table: the address of each array, 0 where the model has none.
_COLUMNS = (
    "attention/norm/weight",
    "attention/norm/bias",
    "attention/qkv",
    "attention/qkv_bias",
    "attention/out",
    "attention/out_bias",
    "ffn/norm/weight",
    "ffn/norm/bias",
    "ffn/first",
    "ffn/first_bias",
    "ffn/rest",
    "ffn/up_bias",
    "ffn/down_bias",
    "predictor/down",
    "predictor/up",
    "predictor/bias",
    "attention/qkv_scales",
    "attention/out_scales",
    "ffn/first_scales",
    "ffn/rest_scales",
    "predictor/down_scales",
    "predictor/up_scales",
)
(
    ATTENTION_NORM,
    ATTENTION_NORM_BIAS,
    QKV,
    QKV_BIAS,
    OUT,
    OUT_BIAS,
    FFN_NORM,
    FFN_NORM_BIAS,
    FIRST,
    FIRST_BIAS,
    REST,
    UP_BIAS,
    DOWN_BIAS,
    PREDICTOR_DOWN,
    PREDICTOR_UP,
    PREDICTOR_BIAS,
    QKV_SCALES,
    OUT_SCALES,
    FIRST_SCALES,
    REST_SCALES,
    PREDICTOR_DOWN_SCALES,
    PREDICTOR_UP_SCALES,
) = range(len(_COLUMNS))
# Two more columns: how the layer is run.
RUNG, RANK = len(_COLUMNS), len(_COLUMNS) + 1
DENSE, GATE, PREDICTED = range(3)
RELU, SILU = range(2)


class Shape(NamedTuple):
    """`Decoder` and number formats as integers."""

    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocabulary: int
    rest_rows: int
    """2 for a gated FFN (up, down), 1 for a plain one (fc2)."""
    centred: int
    """1: layer norm, 0: rms norm."""
    rotary: int
    position_offset: int
    activation: int
    attention_format: int
    ffn_format: int
    predictor_format: int
    embedding_format: int
    head_format: int


class Ends(NamedTuple):
    """Addresses of what stands before the first and after the last layer."""

    embedding: int
    positions: int
    norm: int
    norm_bias: int
    head: int
    embedding_scales: int
    positions_scales: int
    head_scales: int


def shape_of(decoder: Decoder, formats: Mapping[str, str]) -> Shape:
    d = decoder
    code = {part: FORMATS[name].code for part, name in formats.items()}
    return Shape(
        d_model=d.d_model,
        heads=d.n_heads,
        kv_heads=d.n_kv_heads,
        head_dim=d.head_dim,
        d_ff=d.d_ff,
        vocabulary=d.vocab_size,
        rest_rows=2 if d.ffn == "gated" else 1,
        centred=int(d.norm == "layer"),
        rotary=int(d.positions == "rope"),
        position_offset=d.position_offset,
        activation=RELU if d.activation == "relu" else SILU,
        attention_format=code["attention"],
        ffn_format=code["ffn"],
        predictor_format=code["predictor"],
        embedding_format=code["embedding"],
        head_format=code["embedding" if d.tied_head else "head"],
    )


def ends_of(artifact: Artifact) -> Ends:
    head = "embedding" if artifact.manifest.decoder.tied_head else "head"
    return Ends(
        embedding=_address(artifact, "embedding"),
        positions=_address(artifact, "positions"),
        norm=_address(artifact, "final_norm/weight"),
        norm_bias=_address(artifact, "final_norm/bias"),
        head=_address(artifact, head),
        embedding_scales=_address(artifact, scales_name("embedding")),
        positions_scales=_address(artifact, scales_name("positions")),
        head_scales=_address(artifact, scales_name(head)),
    )


def table_of(artifact: Artifact, mode: str) -> npt.NDArray[np.int64]:
    """(layers, columns): addresses, then rung and rank. The modes dense and gate override the stored rungs.

    The addresses are valid as long as the artifact is open.
    """
    rows = []
    for n, layer in enumerate(artifact.manifest.layers):
        addresses = [_address(artifact, f"layers/{n}/{name}") for name in _COLUMNS]
        rung = {"dense": DENSE, "gate": GATE, "predicted": PREDICTED}[mode if mode in ("dense", "gate") else layer.rung]
        rows.append([*addresses, rung, layer.rank or 0])
    return np.array(rows, np.int64)


def _address(artifact: Artifact, name: str) -> int:
    return int(artifact.array(name).ctypes.data) if name in artifact.manifest.arrays else 0
