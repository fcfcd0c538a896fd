"""What compiled code knows of an artifact: a `KernelConfig` of numbers, and a table with the addresses of all weights.

Numba compiles once for these types, whatever the model and its number formats. Shape letters: L layers, X experts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, NamedTuple, Protocol, get_origin

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import ACTIVATIONS, BLOCKS, RECURRENCES, Decoder
from pi_runtime.artifact.features import refuse_lacking
from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.layer_classes import layer_classes
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer, Manifest
from pi_runtime.artifact.sizes import ALL_MATRICES, APART, SHARED, WHOLE, layer_layouts, scales_name
from pi_runtime.kernels.codegen.indirect_calls import record_dtype


class LayerRecord:
    """What kernels know of a layer, or of one of its experts: one record of a table.

    First the addresses of arrays, by their names; 0 where the model has none. Then how the layer is run.
    """

    attention_norm: Annotated[int, "attention/norm/weight"]
    attention_norm_bias: Annotated[int, "attention/norm/bias"]
    qkv: Annotated[int, "attention/qkv"]
    qkv_scales: Annotated[int, "attention/qkv_scales"]
    k: Annotated[int, "attention/k"]
    """0 where `qkv` has the keys' rows."""
    k_scales: Annotated[int, "attention/k_scales"]
    v: Annotated[int, "attention/v"]
    """0 where `qkv` has the values' rows."""
    v_scales: Annotated[int, "attention/v_scales"]
    qkv_bias: Annotated[int, "attention/qkv_bias"]
    out: Annotated[int, "attention/out"]
    out_scales: Annotated[int, "attention/out_scales"]
    out_bias: Annotated[int, "attention/out_bias"]
    attention_inner_norm: Annotated[int, "attention/inner_norm"]
    attention_out_norm: Annotated[int, "attention/out_norm/weight"]
    attention_out_norm_bias: Annotated[int, "attention/out_norm/bias"]
    sinks: Annotated[int, "attention/sinks"]
    gate: Annotated[int, "attention/gate"]
    gate_scales: Annotated[int, "attention/gate_scales"]
    conv: Annotated[int, "attention/conv"]
    conv_bias: Annotated[int, "attention/conv_bias"]
    gates: Annotated[int, "attention/gates"]
    decay: Annotated[int, "attention/decay"]
    decay_bias: Annotated[int, "attention/decay_bias"]
    skip: Annotated[int, "attention/skip"]
    state_norm: Annotated[int, "attention/state_norm"]
    q_norm: Annotated[int, "attention/q_norm"]
    k_norm: Annotated[int, "attention/k_norm"]
    v_norm: Annotated[int, "attention/v_norm"]
    q_up: Annotated[int, "attention/q_up"]
    q_up_scales: Annotated[int, "attention/q_up_scales"]
    k_up: Annotated[int, "attention/k_up"]
    k_up_scales: Annotated[int, "attention/k_up_scales"]
    v_up: Annotated[int, "attention/v_up"]
    v_up_scales: Annotated[int, "attention/v_up_scales"]
    ffn_norm: Annotated[int, "ffn/norm/weight"]
    ffn_norm_bias: Annotated[int, "ffn/norm/bias"]
    ffn_inner_norm: Annotated[int, "ffn/inner_norm"]
    ffn_out_norm: Annotated[int, "ffn/out_norm/weight"]
    ffn_out_norm_bias: Annotated[int, "ffn/out_norm/bias"]
    router: Annotated[int, "ffn/router"]
    router_bias: Annotated[int, "ffn/router_bias"]
    router_choice_bias: Annotated[int, "ffn/router_choice_bias"]
    router_norm: Annotated[int, "ffn/router_norm"]
    expert_scale: Annotated[int, "ffn/expert_scale"]
    beside_first: Annotated[int, "ffn/beside_first"]
    beside_first_scales: Annotated[int, "ffn/beside_first_scales"]
    beside_up: Annotated[int, "ffn/beside_up"]
    beside_up_scales: Annotated[int, "ffn/beside_up_scales"]
    beside_down: Annotated[int, "ffn/beside_down"]
    beside_down_scales: Annotated[int, "ffn/beside_down_scales"]
    beside_norm: Annotated[int, "ffn/beside_norm"]
    beside_out_norm: Annotated[int, "ffn/beside_out_norm"]
    experts_out_norm: Annotated[int, "ffn/experts_out_norm"]
    embedding_gate: Annotated[int, "ffn/embedding_gate"]
    embedding_gate_scales: Annotated[int, "ffn/embedding_gate_scales"]
    embedding_out: Annotated[int, "ffn/embedding_out"]
    embedding_out_scales: Annotated[int, "ffn/embedding_out_scales"]
    embedding_norm: Annotated[int, "ffn/embedding_norm/weight"]
    block_scale: Annotated[int, "ffn/block_scale"]
    experts_in: Annotated[int, "ffn/experts_in"]
    experts_in_scales: Annotated[int, "ffn/experts_in_scales"]
    experts_out: Annotated[int, "ffn/experts_out"]
    experts_out_scales: Annotated[int, "ffn/experts_out_scales"]
    first: Annotated[int, "ffn/first"]
    first_scales: Annotated[int, "ffn/first_scales"]
    first_bias: Annotated[int, "ffn/first_bias"]
    rest: Annotated[int, "ffn/rest"]
    rest_scales: Annotated[int, "ffn/rest_scales"]
    up: Annotated[int, "ffn/up"]
    up_scales: Annotated[int, "ffn/up_scales"]
    down: Annotated[int, "ffn/down"]
    """0 where the FFN is stored by neuron, in `first` and `rest`; else its matrices are `first`, `up` and `down`."""
    down_scales: Annotated[int, "ffn/down_scales"]
    up_bias: Annotated[int, "ffn/up_bias"]
    down_bias: Annotated[int, "ffn/down_bias"]
    expert_bias: Annotated[int, "ffn/expert_bias"]
    predictor_down: Annotated[int, "predictor/down"]
    predictor_down_scales: Annotated[int, "predictor/down_scales"]
    predictor_up: Annotated[int, "predictor/up"]
    predictor_up_scales: Annotated[int, "predictor/up_scales"]
    predictor_bias: Annotated[int, "predictor/bias"]
    qkv_format: int
    gate_format: int
    k_format: int
    v_format: int
    out_format: int
    beside_first_format: int
    beside_up_format: int
    beside_down_format: int
    embedding_gate_format: int
    embedding_out_format: int
    experts_in_format: int
    experts_out_format: int
    first_format: int
    rest_format: int
    up_format: int
    down_format: int
    inputs_format: int
    """The one that inputs of the FFN are prepared for: a block format where any of its matrices has one."""
    dense: int
    """1: the rung counts every neuron as kept."""
    picks: int
    """1: the predictor names the neurons whose `first` is read."""
    rank: int
    """Rank of the predictor's matrices."""
    limit: np.float32
    """Magnitudes of the activation up to here count as 0."""
    norm_eps: np.float32
    """Epsilon of the norm of an FFN's factors."""
    first_slots: int
    """Address of the slots of the rows of `first` (see `MatrixView.slots`), or 0."""
    rest_slots: int
    recurrence: int
    """The code of what stands in attention's place; 0: nothing does."""
    d_ff: int
    """Neurons of an expert; 0 without an FFN."""
    qkv_width: int
    mixed_width: int
    gate_width: int
    kv_heads: int
    made_heads: int
    """Of these heads those that the layer makes: all, or none where it reads the keys and values of another."""
    keys_as_values: int
    head_dim: int
    cached_width: int
    angles: int
    """J of queries and keys; 0: they are not rotated."""
    window: int
    """Positions that a token sees; 0 for all."""
    second_angles: int
    """1: the angles are those in the second half of the table."""
    experts_shared: int
    """Experts, the last ones, that every token takes."""
    experts_chosen: int
    """Experts that the router takes for a token."""
    page_class: int
    """Number of the class of layers that it belongs to."""
    page_layer: int
    """Number of the layer among those of its class, or of that whose keys and values it reads."""
    layer: int


ARRAYS = {field: kind.__metadata__[0] for field, kind in LayerRecord.__annotations__.items() if get_origin(kind)}
"""The name of the array that a field has the address of."""
LAYER = record_dtype(LayerRecord)
LayerRecords = Annotated[npt.NDArray[np.void], LayerRecord]
EXPERT_ARRAYS = ("ffn/first", "ffn/rest", "ffn/up", "ffn/down", "predictor/")
"""Arrays of which each expert has its own rows: those whose names begin so, but for the bias of all experts."""
SEQUENTIAL, PARALLEL, POST_NORM, REORDERED, SANDWICH = range(len(BLOCKS))
RELU, RELU2, DRELU, SILU, GELU, GELU_TANH, CLAMPED_SWIGLU = range(len(ACTIVATIONS))


CODES = {name: code for code, name in enumerate(("none", *RECURRENCES))}
"""Codes of recurrences."""


class KernelConfig(NamedTuple):
    """A `Decoder` and its number formats, as numbers."""

    d_model: int
    d_embedding: int
    layer_embedding: int
    n_layers: int
    heads: int
    head_dim: int
    latent_rank: int
    """0: keys and values are those of heads."""
    query_rank: int
    value_dim: int
    state_heads: int
    """0: no layer has a recurrence."""
    state_key_heads: int
    state_heads_tiled: int
    state_key_dim: int
    state_value_dim: int
    state_columns: int
    state_gates: int
    state_least_step: float
    state_norm_eps: float
    score_scale: float
    attention_format: int
    """The format of matrices that have none of their own."""
    neuron_width: int
    d_ff: int
    experts: int
    experts_per_token: int
    router_normalised: int
    router_sigmoid: int
    router_early: int
    shared_gate: int
    router_scale: float
    router_groups: int
    router_groups_taken: int
    router_group_top: int
    vocabulary: int
    rows_per_neuron: int
    """2 for a gated FFN (up, down), 1 for a plain one (fc2)."""
    centred: int
    """1: layer norm, 0: rms norm."""
    joint_qk_norm: int
    query_growth: float
    query_period: int
    block: int
    position_offset: int
    activation: int
    threshold: float
    """The model's own: values of the activation up to here count as 0."""
    ffn_format: int
    """The one with most bytes: slots have room for its rows. Each layer's own stand in its record."""
    predictor_format: int
    embedding_format: int
    head_format: int
    embedding_scale: float
    logit_scale: float
    logit_softcap: float
    """0: none."""
    page_classes: int
    """How many classes of layers there are, each with pages of its own."""


class Ends(NamedTuple):
    """Both ends of the model: addresses of what stands before the first layer and after the last.

    Fields have the names of arrays, but for norms and the head.
    """

    embedding: int
    positions: int
    norm: int
    """0 where there is no norm before the head."""
    norm_bias: int
    layer_embedding: int
    """0 where layers have none."""
    layer_embedding_in: int
    layer_embedding_norm: int
    embedding_norm: int
    """0 where there is none."""
    embedding_norm_bias: int
    embedding_in: int
    embedding_out: int
    head: int
    head_bias: int
    embedding_scales: int
    layer_embedding_scales: int
    layer_embedding_in_scales: int
    positions_scales: int
    embedding_in_scales: int
    embedding_out_scales: int
    head_scales: int


def config_of(d: Decoder, formats: Mapping[str, str]) -> KernelConfig:
    """The numbers of one model, whose parts have these formats. Raises DoesNotFitError for facts that kernels lack."""
    refuse_lacking(d, "cpu")
    code = {part: FORMATS[name].code for part, name in formats.items()}
    same = {name: getattr(d, name) for name in KernelConfig._fields if hasattr(d, name)}
    same |= {name: int(value) for name, value in same.items() if isinstance(value, bool)}
    differing = {
        "heads": d.n_heads,
        "value_dim": d.value_dim or d.head_dim,
        "attention_format": code["attention"],
        "experts": d.n_experts,
        "router_sigmoid": int(d.router_score == "sigmoid"),
        "vocabulary": d.vocab_size,
        "rows_per_neuron": 2 if d.ffn == "gated" else 1,
        "centred": int(d.norm == "layer"),
        "block": BLOCKS.index(d.block),
        "activation": ACTIVATIONS.index(d.activation),
        "ffn_format": code["ffn"],
        "predictor_format": code["predictor"],
        "embedding_format": code["embedding"],
        "head_format": code["embedding" if d.tied_head else "head"],
        "state_norm_eps": d.state_norm_eps or d.norm_eps,
        "page_classes": len(layer_classes(d, "f32")),
    }
    return KernelConfig(**same | differing)


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
    names = {
        "norm": "final_norm/weight",
        "norm_bias": "final_norm/bias",
        "embedding_norm": "embedding_norm/weight",
        "embedding_norm_bias": "embedding_norm/bias",
        "head": head,
        "head_scales": scales_name(head),
    }
    return Ends(*(_address(artifact, "", names.get(field, field)) for field in Ends._fields))


RowsAt = Callable[[int, str], Sequence[tuple[int, int]] | None]
"""(layer, array) → of each expert the address of its rows and that of their slots (0: they lie in order), without those
behind the last that has them there; None: they are where the array is."""


def table_of(artifact: StoredArrays, mode: str, rows_at: RowsAt | None = None) -> LayerRecords:
    """The table (L, X) of layers and their experts; `rows_at` says where rows are that no array of the artifact has.

    The addresses are valid as long as the artifact is open.
    """
    m = artifact.manifest
    table_LX = np.zeros((len(m.layers), m.decoder.n_experts), LAYER)
    layouts = layer_layouts(m.ffn_layout, (layer.rung for layer in m.layers))
    for n, (layer, layout) in enumerate(zip(m.layers, layouts, strict=True)):
        settings = settings_of(m.decoder, layer, mode) | _facts_of(m.decoder, n, layout) | formats_of(m.formats, n)
        own = m.decoder.of_layer(n)
        fill(table_LX[n], settings, partial(_address, artifact, f"layers/{n}/", alike=own.experts_alike))
        if own.experts_alike < own.n_experts:
            for field, value in (formats_of(m.formats, n, shared=True) | {"d_ff": own.last_ff}).items():
                table_LX[field][n, -1] = value
        if rows_at is not None:
            _point_to_rows(table_LX[n], partial(rows_at, n))
    return table_LX


def _point_to_rows(w_X: LayerRecords, rows_at: Callable[[str], Sequence[tuple[int, int]] | None]) -> None:
    """Fill in where a layer's rows are that do not lie in arrays."""
    for field, name in ARRAYS.items():
        if (place_X := rows_at(name)) is None:
            continue
        w_X[field][: len(place_X)] = [address for address, _ in place_X]
        if f"{field}_slots" in LayerRecord.__annotations__:
            w_X[f"{field}_slots"][: len(place_X)] = [slots for _, slots in place_X]


def _facts_of(d: Decoder, layer: int, layout: str) -> dict[str, int]:
    """The facts of a decoder in which its layers differ; the layout is that of the layer's FFN."""
    own, keys = d.of_layer(layer), d.keys_of(layer)
    places = ((kind, of.layers.index(keys)) for kind, of in enumerate(layer_classes(d, "f32")) if keys in of.layers)
    kind, place = next(places, (0, 0))
    shared = own.experts_shared or int(own.n_experts < d.n_experts)  # a dense FFN stands for the last expert
    return {
        "recurrence": CODES[own.recurrence],
        "d_ff": own.whole_ff if layout == WHOLE else own.d_ff,
        "qkv_width": own.qkv_width,
        "mixed_width": own.mixed_width,
        "gate_width": own.gate_width,
        "kv_heads": own.n_kv_heads,
        "made_heads": 0 if own.shares_keys else own.n_kv_heads,
        "keys_as_values": int(own.keys_as_values),
        "head_dim": own.head_dim,
        "cached_width": own.cached_width,
        "angles": own.rotary_dim // 2,
        "window": own.window,
        "second_angles": int(layer in d.windowed_layers and d.windowed_frequencies != ()),
        "experts_shared": shared,
        "experts_chosen": own.experts_per_token - shared,
        "page_class": kind,
        "page_layer": place,
        "layer": layer,
    }


def fill(w_X: LayerRecords, settings: Mapping[str, int | np.float32], address_of: Callable[[str, int], int]) -> None:
    """Fill in a layer's records: how it is run, and where each expert's arrays are."""
    for field, value in settings.items():
        w_X[field] = value
    for field, name in ARRAYS.items():
        w_X[field] = [address_of(name, expert) for expert in range(len(w_X))]


def formats_of(formats: Mapping[str, str], layer: int, *, shared: bool = False) -> dict[str, int]:
    """The fields of a layer's records that say which formats its matrices have; or those of a `shared` expert's own."""
    matrices = ALL_MATRICES | APART
    named = {name: formats.get(f"layers/{layer}/{name}", formats[part]) for name, part in matrices.items()}
    inputs = [named[f"ffn/{name}"] for name in ("first", "rest", "up", "shared_first", "shared_up")]
    prepared = next((fmt for fmt in inputs if FORMATS[fmt].quantised), inputs[0])
    if shared:
        named = {name: named[own] for own, name in SHARED.items()}
    found = {f"{name.split('/')[1]}_format": fmt for name, fmt in named.items() if name not in SHARED}
    return {field: FORMATS[fmt].code for field, fmt in (found | {"inputs_format": prepared}).items()}


def settings_of(d: Decoder, layer: Layer, mode: str) -> dict[str, int | np.float32]:
    """How a layer is run: a mode that is an exact rung (dense, gate) overrides the stored rung."""
    exact = mode in RUNGS and RUNGS[mode].exact
    rung = RUNGS[mode if exact else layer.rung]
    return {
        "dense": int(rung.dense),
        "picks": int(rung.picks),
        "rank": layer.rank or 0,
        "limit": np.float32(d.threshold if exact else max(d.threshold, layer.threshold)),
        "norm_eps": np.float32(d.norm_eps),
    }


def _address(artifact: StoredArrays, start: str, name: str, expert: int = 0, alike: int = 1) -> int:
    """Address of an array, or of one expert's rows of it, of which so many are `alike`; 0 where there is none. Its name
    begins with `start`."""
    own = name.startswith(EXPERT_ARRAYS) and name != "ffn/down_bias"
    shared = f"{start}{name.replace('ffn/', 'ffn/shared_')}" if own and expert >= alike else ""
    if shared in artifact.manifest.arrays:
        return int(artifact.array(shared).ctypes.data)
    if start + name not in artifact.manifest.arrays:
        return 0
    stored = artifact.array(start + name)
    return int(stored.ctypes.data) + (expert % alike * stored.nbytes // alike if own else 0)
