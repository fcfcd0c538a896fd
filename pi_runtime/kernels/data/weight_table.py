"""What compiled code knows of an artifact: a `KernelConfig` of numbers, and a table with the addresses of all weights.

Numba compiles once for these types, whatever the model and its number formats. Shape letters: L layers, X experts,
W columns of the table.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import ACTIVATIONS, BLOCKS, Decoder
from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.rungs import RUNGS, SELECTORS
from pi_runtime.artifact.schema import Layer, Manifest
from pi_runtime.artifact.sizes import PREDICTOR_ARRAYS, scales_name

# Columns of the weight table: the address of each array, 0 where the model has none.
_NAMED = (
    "attention/norm/weight",
    "attention/norm/bias",
    "attention/qkv",
    "attention/qkv_bias",
    "attention/out",
    "attention/out_bias",
    "attention/q_norm",
    "attention/k_norm",
    "ffn/norm/weight",
    "ffn/norm/bias",
    "ffn/router",
    "ffn/down_bias",
    "ffn/first",
    "ffn/first_bias",
    "ffn/rest",
    "ffn/up_bias",
    "attention/qkv_scales",
    "attention/out_scales",
    "ffn/first_scales",
    "ffn/rest_scales",
)
(
    ATTENTION_NORM,
    ATTENTION_NORM_BIAS,
    QKV,
    QKV_BIAS,
    OUT,
    OUT_BIAS,
    Q_NORM,
    K_NORM,
    FFN_NORM,
    FFN_NORM_BIAS,
    ROUTER,
    DOWN_BIAS,
    FIRST,
    FIRST_BIAS,
    REST,
    UP_BIAS,
    QKV_SCALES,
    OUT_SCALES,
    FIRST_SCALES,
    REST_SCALES,
) = range(len(_NAMED))
_PREDICTOR = tuple(f"predictor/{name}" for name in PREDICTOR_ARRAYS)
_COLUMNS = (*_NAMED, *_PREDICTOR, *map(scales_name, _PREDICTOR))
COLUMN = {name: n for n, name in enumerate(_COLUMNS)}
"""Column of each array."""
WIDTH = len(_COLUMNS) + 8
DENSE, SELECTOR, RANK, LIMIT, MARGIN, FIRST_SLOTS, REST_SLOTS, UNROTATED = range(len(_COLUMNS), WIDTH)
"""Further columns, which say how the layer is run (see `settings_of`), and which slots its neurons' rows are in (see
`MatrixView.slots`). The last is 1 where queries and keys are not rotated."""
EXPERT_ARRAYS = ("ffn/first", "ffn/rest", "ffn/up_bias", "predictor/")
"""Arrays of which each expert has its own rows."""
SELECTOR_CODES: dict[str | None, int] = {name: n for n, name in enumerate((None, *SELECTORS))}
SEQUENTIAL, PARALLEL, POST_NORM, REORDERED = range(len(BLOCKS))
RELU, RELU2, DRELU, SILU, GELU, GELU_TANH = range(len(ACTIVATIONS))


class KernelConfig(NamedTuple):
    """A `Decoder` and its number formats, as numbers."""

    d_model: int
    d_embedding: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    experts: int
    experts_per_token: int
    router_normalised: int
    vocabulary: int
    rows_per_neuron: int
    """2 for a gated FFN (up, down), 1 for a plain one (fc2)."""
    centred: int
    """1: layer norm, 0: rms norm."""
    joint_qk_norm: int
    block: int
    position_offset: int
    activation: int
    threshold: float
    """The model's own: values of the activation up to here count as 0."""
    attention_format: int
    ffn_format: int
    predictor_format: int
    embedding_format: int
    head_format: int
    embedding_scale: float
    logit_scale: float
    logit_softcap: float
    """0: none."""


class Ends(NamedTuple):
    """Both ends of the model: addresses of what stands before the first layer and after the last."""

    embedding: int
    positions: int
    norm: int
    """0 where there is no norm before the head."""
    norm_bias: int
    embedding_norm: int
    """0 where there is none."""
    embedding_norm_bias: int
    embedding_in: int
    embedding_out: int
    head: int
    head_bias: int
    embedding_scales: int
    positions_scales: int
    embedding_in_scales: int
    embedding_out_scales: int
    head_scales: int


def config_of(decoder: Decoder, formats: Mapping[str, str]) -> KernelConfig:
    """The numbers of one model, whose parts have these formats."""
    d = decoder
    code = {part: FORMATS[name].code for part, name in formats.items()}
    return KernelConfig(
        d_model=d.d_model,
        d_embedding=d.d_embedding,
        heads=d.n_heads,
        kv_heads=d.n_kv_heads,
        head_dim=d.head_dim,
        d_ff=d.d_ff,
        experts=d.n_experts,
        experts_per_token=d.experts_per_token,
        router_normalised=int(d.router_normalised),
        vocabulary=d.vocab_size,
        rows_per_neuron=2 if d.ffn == "gated" else 1,
        centred=int(d.norm == "layer"),
        joint_qk_norm=int(d.joint_qk_norm),
        block=BLOCKS.index(d.block),
        position_offset=d.position_offset,
        activation=ACTIVATIONS.index(d.activation),
        threshold=d.threshold,
        attention_format=code["attention"],
        ffn_format=code["ffn"],
        predictor_format=code["predictor"],
        embedding_format=code["embedding"],
        head_format=code["embedding" if d.tied_head else "head"],
        embedding_scale=d.embedding_scale,
        logit_scale=d.logit_scale,
        logit_softcap=d.logit_softcap,
    )


class StoredArrays(Protocol):
    """Where a model's arrays are: an open artifact, or a copy in memory."""

    @property
    def manifest(self) -> Manifest:
        """What the artifact holds."""

    def array(self, name: str) -> Array:
        """The stored array, rows padded."""

    def check_unchanged(self) -> None:
        """Raise ArtifactError where the arrays are in a file that was changed since it was opened."""

    def close(self) -> None:
        """Free the memory; addresses are no longer valid."""


def ends_of(artifact: StoredArrays) -> Ends:
    """The addresses are valid as long as the artifact is open."""
    head = "embedding" if artifact.manifest.decoder.tied_head else "head"

    def address(name: str) -> int:
        return _address(artifact, name)

    return Ends(
        embedding=address("embedding"),
        positions=address("positions"),
        norm=address("final_norm/weight"),
        norm_bias=address("final_norm/bias"),
        embedding_norm=address("embedding_norm/weight"),
        embedding_norm_bias=address("embedding_norm/bias"),
        embedding_in=address("embedding_in"),
        embedding_out=address("embedding_out"),
        head=address(head),
        head_bias=address("head_bias"),
        embedding_scales=address(scales_name("embedding")),
        positions_scales=address(scales_name("positions")),
        embedding_in_scales=address(scales_name("embedding_in")),
        embedding_out_scales=address(scales_name("embedding_out")),
        head_scales=address(scales_name(head)),
    )


def table_of(artifact: StoredArrays, mode: str) -> npt.NDArray[np.int64]:
    """The table (L, X, W): addresses, then how the layer is run.

    The addresses are valid as long as the artifact is open.
    """
    m = artifact.manifest
    settings, unrotated = [settings_of(m.decoder, layer, mode) for layer in m.layers], m.decoder.unrotated_layers
    return np.array(
        [
            [
                [
                    *(_address(artifact, f"layers/{n}/{name}", expert) for name in _COLUMNS),
                    *settings[n],
                    int(n in unrotated),
                ]
                for expert in range(m.decoder.n_experts)
            ]
            for n in range(len(m.layers))
        ],
        np.int64,
    )


def settings_of(d: Decoder, layer: Layer, mode: str) -> list[int]:
    """The last columns of a layer: whether its rung is dense, the code of its selector, rank, limit, margin, no slots.

    The limit is the bits of a float32: magnitudes of the activation up to it count as 0. A mode that is an exact rung
    (dense, gate) overrides the stored rung.
    """
    exact = mode in RUNGS and RUNGS[mode].exact
    rung = RUNGS[mode if exact else layer.rung]
    limit = np.float32(d.threshold if exact else max(d.threshold, layer.threshold))
    selector = [SELECTOR_CODES[rung.selector], layer.rank or 0, int(limit.view(np.int32)), layer.margin]
    return [int(rung.dense), *selector, 0, 0]


def _address(artifact: StoredArrays, name: str, expert: int = 0) -> int:
    """Address of an array, or of one expert's rows of it; 0 where there is none."""
    if name not in artifact.manifest.arrays:
        return 0
    stored = artifact.array(name)
    own = name.split("/", 2)[-1].startswith(EXPERT_ARRAYS)
    return int(stored.ctypes.data) + (expert * stored.nbytes // artifact.manifest.decoder.n_experts if own else 0)
