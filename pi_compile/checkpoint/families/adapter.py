"""Adapters: the config keys of a family, its decoder, and the checkpoint tensors that make each artifact array.

An adapter is data, a function from config to `Decoder` and one from `Decoder` to tensor names. Names are relative to a
prefix, since a model is saved under another prefix with its head than without. Shape letters: D model width, F neurons.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint.config import Config
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import PREFIX, block_of

FUNCTIONS: Mapping[str, Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]] = {
    "exp": np.exp,
    "negative": np.negative,
}


@dataclass(frozen=True)
class FusedRows:
    """Rows of a fused tensor that make one array: `start` to `stop` in each of its `groups` blocks of `size` rows."""

    groups: int
    size: int
    start: int
    stop: int
    step: int = 1
    """Every so many of them."""
    transposed: bool = False
    """Whether those of each block are wanted as columns."""


@dataclass(frozen=True)
class SourceTensor:
    """One checkpoint tensor, or some rows of it, that becomes an array or a part of one."""

    name: str
    """Name without the family's prefix; `{n}` stands for the layer."""
    transposed: bool = False
    """Whether it is stored as [D, F] and wanted as [F, D]."""
    rows: FusedRows | None = None
    """The rows to take, where several arrays are stored in one tensor; None for all."""
    addend: float = 0.0
    """A number that is added to every value: 1 where the model multiplies by 1 + weight."""
    factor: float = 1.0
    """A number that every value is multiplied by, after all else."""
    function: str = ""
    """A function of `FUNCTIONS` whose results are wanted in place of its values; empty for none."""
    stacked: int = 0
    """Number of matrices that are stored in one tensor [X, …, …], one under the other in the array; 0 for a matrix."""
    item: int | None = None
    """The one of these matrices that is taken; None for all."""
    padded: int = 0
    """Rows that it has with zeros behind its own; 0 for its own alone."""

    def taken(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The wanted rows of its values, and zeros behind them where it is padded."""
        if self.rows is None:
            return values
        blocks = values.reshape(self.rows.groups, self.rows.size, *values.shape[1:])
        wanted = blocks[:, self.rows.start : self.rows.stop : self.rows.step]
        wanted = wanted.mT if self.rows.transposed else wanted
        wanted = wanted.reshape(-1, *wanted.shape[2:])
        missing = max(0, self.padded - len(wanted))
        return np.concatenate([wanted, np.zeros((missing, *wanted.shape[1:]), wanted.dtype)]) if missing else wanted

    @property
    def is_changed(self) -> bool:
        """Whether the array has other values than the tensor."""
        return self.function != "" or self.addend != 0 or self.factor != 1

    def changed(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The values that the array has."""
        values = FUNCTIONS[self.function](values) if self.function else values
        values = values + np.float32(self.addend) if self.addend else values
        return values * np.float32(self.factor) if self.factor != 1 else values


Table = Mapping[str, tuple[SourceTensor, ...]]
"""Artifact array → the tensors it is made of, joined along axis 0; an array of no tensors is ones.

`ffn/rest` [F, rows_per_neuron, D] takes `rows_per_neuron` tensors for each expert, joined along axis 1.
"""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One family of checkpoints."""

    family: str
    """`model_type` of its config.json."""
    aliases: tuple[str, ...] = ()
    """Further values of `model_type`, which older configs have."""
    architectures: tuple[str, ...]
    """Class names of checkpoints that hold the whole decoder."""
    prefixes: tuple[str, ...] = ("model.", "")
    """Possible prefixes of the names in `global_tensors` and `layer_tensors`, tried in turn."""
    global_tensors: Table
    """Tensors that belong to no layer, except the head's."""
    layer_tensors: Callable[[Decoder], Table]
    """Tensors of a layer, which may depend on the decoder."""
    other_layers: tuple[Callable[[Decoder], Table], ...] = ()
    """The same where a checkpoint is saved in another form: that is taken of which it lacks least."""
    head: str = "lm_head"
    """Name of the output head without `.weight` and `.bias`; it has no prefix."""
    text_key: str = ""
    """Config key that holds the text's own config, beside those of pictures; empty for none."""
    passed_over: Sequence[str] = ()
    """Keys beside it that are no text's."""
    read_keys: frozenset[str]
    """Config keys that `decoder` reads."""
    neutral_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config keys with the values at which they have no effect; see `check_keys`."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of tensors without effect, such as buffers that older versions saved."""
    unused_tensors: Mapping[str, str] = field(default_factory=dict)
    """Pattern of tensors that are not used → the notice that says so."""
    quantised: Mapping[str, Callable[[Decoder], Table]] = field(default_factory=dict)
    """Method by which a checkpoint is quantised → its `layer_tensors`, where these differ."""
    draft_layer: Table = field(default_factory=dict)
    """Tensors of a layer behind the last that drafts further tokens, beside those of any layer (see `guess_head`), by
    the names of the arrays; and those that are copies of the model's. By `fc` it is known as such."""
    plan_only: str = ""
    """The reason why its checkpoints can be planned for but not read; empty where they can be read."""
    decoder: Callable[[Config], Decoder]
    """Makes the decoder of a config. Raises CheckpointError for a value that it does not know."""

    def text_config(self, config: Config) -> Config:
        """The config of the text alone, where a config holds it in a key; what stands beside both counts first."""
        if self.text_key not in config.fields:
            return config
        own = config.get(self.text_key)
        if not isinstance(own, dict):
            raise config.error(self.text_key, own, expected="an object")
        beside = {key: value for key, value in config.fields.items() if key not in (self.text_key, *self.passed_over)}
        if len(config.fields) > len(beside) + 1:
            config.notices.append(f"config.json: {self.text_key} alone is read: what reads pictures is left out")
        return config.with_fields({**own, **beside})

    def source_tensors(self, array: str, prefix: str, decoder: Decoder) -> tuple[SourceTensor, ...]:
        """The tensors that an artifact array is made of, with their full names."""
        if array in ("head", "head_bias"):
            return linear("head", self.head)[array]
        if array.startswith(PREFIX):
            tensors = {**self.layer_tensors(block_of(decoder)), **self.draft_layer}[array.removeprefix(PREFIX)]
            return tuple(_with_full_name(tensor, prefix, str(decoder.n_layers)) for tensor in tensors)
        if not array.startswith("layers/"):
            return tuple(_with_full_name(tensor, prefix) for tensor in self.global_tensors[array])
        _, n, name = array.split("/", 2)
        table = self.layer_tensors(decoder.of_layer(int(n)))
        return tuple(_with_full_name(tensor, prefix, n) for tensor in table[name])


def _with_full_name(tensor: SourceTensor, prefix: str, layer: str = "") -> SourceTensor:
    return replace(tensor, name=prefix + tensor.name.replace("{n}", layer))


def stored(*names: str) -> tuple[SourceTensor, ...]:
    """Whole tensors that are used as they are stored."""
    return tuple(SourceTensor(name) for name in names)


def weight_and_bias(array: str, name: str) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays `array/weight` and `array/bias`, from the norm `name`."""
    return {f"{array}/{part}": stored(f"{name}.{part}") for part in ("weight", "bias")}


def linear(array: str, name: str, *, transposed: bool = False) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays `array` and `array_bias`, from the linear layer `name`."""
    return {array: (SourceTensor(f"{name}.weight", transposed),), f"{array}_bias": stored(f"{name}.bias")}


def separate_qkv(name: str) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays of queries, keys and values, from the linear layers `name.q_proj`, `name.k_proj`, `name.v_proj`."""
    weights, biases = (stored(*(f"{name}.{p}_proj.{part}" for p in "qkv")) for part in ("weight", "bias"))
    return {"attention/qkv": weights, "attention/qkv_bias": biases}


def experts_ffn(n_experts: int, block: str, gate: str, up: str, down: str) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays of a router and of gated experts: `block.gate`, and `block.experts.E` with linear layers so named."""
    names = [[f"{block}.experts.{e}.{part}.weight" for e in range(n_experts)] for part in (gate, up, down)]
    gates, ups, downs = (stored(*found) for found in names)
    router = {"ffn/router": stored(f"{block}.gate.weight")}
    return router | gated_experts(gates, ups, tuple(replace(tensor, transposed=True) for tensor in downs))


def gated_experts(*parts: tuple[SourceTensor, ...]) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays of gated experts, from the tensors gate, up and down of each."""
    gates, ups, downs = parts
    return {"ffn/first": gates, "ffn/rest": tuple(tensor for pair in zip(ups, downs, strict=True) for tensor in pair)}


def cut_into_experts(
    name: str, neurons: int, of_expert: int, n_experts: int, *, transposed: bool = False, part: int = 0, parts: int = 1
) -> tuple[SourceTensor, ...]:
    """A matrix of one FFN as those of experts: the last ones have its neurons, the others are zeros.

    The matrix is one of so many `parts` of a tensor, one behind the other.
    """
    ends = [min(e * of_expert, neurons) for e in range(-(-neurons // of_expert) + 1)]
    ends = [0] * (n_experts + 1 - len(ends)) + ends
    first, whole = part * neurons, parts * neurons
    rows = (FusedRows(1, whole, first + start, first + stop) for start, stop in pairwise(ends))
    return tuple(SourceTensor(name, transposed, own, padded=of_expert) for own in rows)


def uncut(tensors: Sequence[SourceTensor], *, shared: bool) -> tuple[SourceTensor, ...]:
    """Those that are not cut, if there are any and none `shared` is asked for; else what the others are cut of."""
    parts, others = (tuple(tensor for tensor in tensors if bool(tensor.padded) is cut) for cut in (True, False))
    if not parts or (others and not shared):
        return others
    ends = [tensor.rows for tensor in parts if tensor.rows is not None]
    rows = replace(ends[0], stop=ends[-1].stop)
    return (replace(parts[0], rows=None if rows.stop - rows.start == rows.size else rows, padded=0),)


def cut_ffn(names: Sequence[str], neurons: int, of_expert: int, n_experts: int) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays of one FFN, cut into experts; `names` are those of its gate, up and down, or of a plain one's two."""
    cuts = [cut_into_experts(name, neurons, of_expert, n_experts, transposed=name == names[-1]) for name in names]
    return gated_experts(*cuts) if len(cuts) > 2 else dict(zip(("ffn/first", "ffn/rest"), cuts, strict=True))


def plain_ffn(first: str, rest: str, *, transposed: bool = False) -> dict[str, tuple[SourceTensor, ...]]:
    """The arrays of an FFN of two linear layers, whose matrices may be stored `transposed`."""
    down = {"ffn/rest": (SourceTensor(f"{rest}.weight", not transposed),), "ffn/down_bias": stored(f"{rest}.bias")}
    return linear("ffn/first", first, transposed=transposed) | down


def draft_layer(block: str, norm: str, head: str) -> Table:
    """The tensors of a `block` that drafts tokens, beside those of any layer; `norm` and `head` are names within it."""
    parts = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": norm}
    copies = {"embedding": "embed_tokens", "head": head}
    return {array: stored(f"{block}.{part}.weight") for array, part in (parts | copies).items()}
