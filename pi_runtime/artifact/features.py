"""What a file uses, by name: a reader says which of it it lacks.

Every fact of a decoder that differs from its default is a feature, and so is every weight format. A kind of cache or
guess head is one more entry here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from functools import partial

from pi_runtime.artifact.decoder import BODIES, Decoder, facts
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import APART, BY_NEURON, MIXED, PARTS
from pi_runtime.errors import DoesNotFitError, Text

COMPUTED_BY = {
    **{f"decoder.{name}": own.bodies for name, own in facts().items() if own.default is not MISSING},
    **{f"decoder.{name}.{v}": bodies for name, own in facts().items() for v, bodies in own.later.items()},
}
"""Each fact that a decoder may have or not, and each value that is a feature of its own → who computes it."""


def _has_fact(of: Manifest | Decoder, feature: str) -> bool:
    _, name, *value = feature.split(".")
    found = getattr(of.decoder if isinstance(of, Manifest) else of, name)
    if value == ["negative"]:
        return min(found, default=0) < 0
    return bool(found == value[0] if value else found != facts()[name].default)


def _has_format(m: Manifest, name: str) -> bool:
    return name in m.formats.values() or (m.guess is not None and m.guess.format == name)


FEATURES: dict[str, Callable[[Manifest], bool]] = {
    **{name: partial(_has_fact, feature=name) for name in COMPUTED_BY},
    "ffn_layout": lambda m: m.ffn_layout != BY_NEURON,
    "ffn_layout.mixed": lambda m: m.ffn_layout == MIXED,
    "formats.apart": lambda m: any(name.endswith(tuple(APART)) for name in m.formats),
    "formats.matrices": lambda m: len(m.formats) > len(PARTS),
    **{f"formats.{name}": partial(_has_format, name=name) for name in WEIGHT_FORMATS},
    "guess_head": lambda m: m.guess is not None or m.guess_layers > 0,
    "plans.rows": lambda m: any(plan.rows is not None for plan in m.plans),
}
"""Name of each feature that is read → whether a manifest uses it."""


def lacking(d: Decoder, body: str, formats: Mapping[str, str] | None = None) -> list[str]:
    """What a model does, or which of its formats, a body (`decoder.BODIES`) does not compute, by name."""
    found = {name for name, bodies in COMPUTED_BY.items() if body not in bodies and _has_fact(d, name)}
    if body == "gpu" and formats is not None:
        found |= {f"formats.{name}" for name in formats.values() if not FORMATS[name].summed}
        found |= {"formats.apart" for name in formats if name.endswith(tuple(APART))}
    return sorted(found)


def refuse_lacking(d: Decoder, body: str, remedy: Text | None = None, formats: Mapping[str, str] | None = None) -> None:
    """Raise DoesNotFitError for a model that does what a body does not compute, by name."""
    if found := lacking(d, body, formats):
        raise DoesNotFitError(
            f"{BODIES[body]} does not compute what this model does", found=", ".join(found), remedy=remedy
        )


def used(m: Manifest) -> tuple[str, ...]:
    """The features that a manifest uses, by name."""
    return tuple(sorted(name for name, uses in FEATURES.items() if uses(m)))


def feature_problems(m: Manifest) -> Iterator[str]:
    """Yield the problems of a manifest's features: what it lists is what it uses."""
    if m.features != used(m):
        yield f"features: {list(m.features)}, used are {list(used(m))}"
