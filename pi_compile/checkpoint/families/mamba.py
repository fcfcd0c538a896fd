"""Mamba-2 as families with attention in some layers have it: its tensors, and the kinds of their layers.

`in_proj` makes z, the convolution's channels (values, keys, queries: x, B and C), and a step for each head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import FusedRows, SourceTensor, Table, stored
from pi_runtime.artifact.decoder import Decoder

STATES, ATTENTION = "linear_attention", "full_attention"
KINDS = {STATES: STATES, ATTENTION: ATTENTION, "mamba": STATES, "attention": ATTENTION}
"""Names of kinds of layers in configs, older ones too → the newer ones."""


def kinds(config: Config, key: str, named: object, allowed: Mapping[str, str]) -> list[str]:
    """The kind of each layer, of which one at least has attention, by a list of names."""
    names = named if isinstance(named, list) else [""]
    found = [allowed.get(kind, "") if isinstance(kind, str) else "" for kind in names]
    layers = config.get("num_hidden_layers", len(found))
    if "" in found or ATTENTION not in found or len(found) != layers:
        raise config.error(
            key,
            named,
            expected=f"one of {', '.join(allowed)} for each of {layers} layers, at least one of them attention",
        )
    return found


def recurrence(found: Sequence[str], **sizes: Any) -> dict[str, Any]:
    """The decoder's fields of layers with states; without such a layer there are none."""
    own = tuple(n for n, kind in enumerate(found) if kind == STATES)
    return {"recurrence": "mamba2", "recurrent_layers": own, **sizes} if own else {}


def check_groups(config: Config, key: str, d: Decoder) -> None:
    """Raise CheckpointError for groups that do not divide the heads."""
    if d.recurs and d.state_heads % d.state_key_heads:
        raise config.error(key, d.state_key_heads, expected=f"a divisor of {d.state_heads} heads")


def mixer(d: Decoder, block: str) -> Table:
    """The arrays of a layer's states, without its norm, from the tensors of `block`."""
    arrays = of_tensors(d, f"{block}.in_proj.weight", f"{block}.conv1d.weight", stacked=d.qkv_width)
    return {
        **arrays,
        "attention/conv_bias": stored(f"{block}.conv1d.bias"),
        "attention/decay": (SourceTensor(f"{block}.A_log", function="exp"),),
        "attention/decay_bias": stored(f"{block}.dt_bias"),
        "attention/skip": stored(f"{block}.D"),
        "attention/state_norm": stored(f"{block}.norm.weight"),
        "attention/out": stored(f"{block}.out_proj.weight"),
    }


def of_tensors(d: Decoder, projection: str, conv: str, *, stacked: int = 0) -> Table:
    """The arrays that are parts of the first matrix, and the convolution, whose channels may be `stacked` matrices."""
    inner, end = d.mixed_width, d.mixed_width + d.qkv_width
    whole = end + d.state_heads

    def rows(first: int, stop: int) -> tuple[SourceTensor, ...]:
        return (SourceTensor(projection, rows=FusedRows(1, whole, first, stop)),)

    taps = FusedRows(1, d.qkv_width, 0, d.qkv_width, transposed=True)
    return {
        "attention/gate": rows(0, inner),
        "attention/qkv": rows(inner, end),
        "attention/gates": rows(end, whole),
        "attention/conv": (SourceTensor(conv, rows=taps, stacked=stacked),),
    }
