"""What a file uses, by name: a reader says which of it it lacks.

Every fact of a decoder that differs from its default is a feature, and so is every weight format. A kind of cache or
guess head is one more entry here.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import default_of
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import BY_NEURON, MIXED, PARTS


def _differs(d: Decoder, name: str, default: Any) -> bool:
    return bool(getattr(d, name) != default)


def _of_decoder(m: Manifest, uses: Callable[[Decoder], bool]) -> bool:
    return uses(m.decoder)


def _has_format(m: Manifest, name: str) -> bool:
    return name in m.formats.values() or (m.guess is not None and m.guess.format == name)


_OF_DECODER: dict[str, Callable[[Decoder], bool]] = {
    **{
        f"decoder.{f.name}": partial(_differs, name=f.name, default=f.default)
        for f in fields(Decoder)
        if default_of(f) is not MISSING
    },
    "decoder.block.reordered": lambda d: d.block == "reordered",
    "decoder.activation.clamped_swiglu": lambda d: d.activation == "clamped_swiglu",
    "decoder.block.sandwich": lambda d: d.block == "sandwich",
    "decoder.rotary_frequencies.negative": lambda d: min(d.rotary_frequencies, default=0) < 0,
}
FEATURES: dict[str, Callable[[Manifest], bool]] = {
    **{name: partial(_of_decoder, uses=uses) for name, uses in _OF_DECODER.items()},
    "ffn_layout": lambda m: m.ffn_layout != BY_NEURON,
    "ffn_layout.mixed": lambda m: m.ffn_layout == MIXED,
    "formats.matrices": lambda m: len(m.formats) > len(PARTS),
    **{f"formats.{name}": partial(_has_format, name=name) for name in WEIGHT_FORMATS},
    "guess_head": lambda m: m.guess is not None or m.guess_layers > 0,
    "plans.rows": lambda m: any(plan.rows is not None for plan in m.plans),
}
"""Name of each feature that is read → whether a manifest uses it."""
LACKING_ON_GPU = (
    "decoder.activation.clamped_swiglu", "decoder.attention_sinks", "decoder.expert_bias", "decoder.router_bias",
    "decoder.block.sandwich", "decoder.dense_layers", "decoder.experts_shared", "decoder.router_early",
    "decoder.latent_rank", "decoder.router_groups", "decoder.router_score", "decoder.router_scale", "decoder.window",
    "decoder.inner_norms",
)  # fmt: skip
"""Features that the GPU tier does not compute; a plan is for the CPU alone then."""


def lacking_on_gpu(d: Decoder) -> list[str]:
    """What a model does that the GPU tier does not compute, by name."""
    return sorted(name for name in LACKING_ON_GPU if _OF_DECODER[name](d))


def used(m: Manifest) -> tuple[str, ...]:
    """The features that a manifest uses, by name."""
    return tuple(sorted(name for name, uses in FEATURES.items() if uses(m)))


def feature_problems(m: Manifest) -> Iterator[str]:
    """Yield the problems of a manifest's features: what it lists is what it uses."""
    if m.features != used(m):
        yield f"features: {list(m.features)}, used are {list(used(m))}"
