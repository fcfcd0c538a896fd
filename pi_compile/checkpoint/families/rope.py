"""Rotary positions: the angles that a config describes, in float32 as transformers computes them.

The types default, linear, llama3 and yarn have fixed angles. Those of longrope are fixed within the original context,
to which it is cut; those of dynamic depend on the length of the text, and are refused.

Source: `modeling_rope_utils.py` of transformers.
Shape letters: J angles, 2J rotated columns of a head.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint.config import Config, short

F32 = npt.NDArray[np.float32]
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
"""Config keys that are read; `partial_rotary_factor` too, where the family has it."""
THETA = 10000.0
KINDS = ("full_attention", "sliding_attention")
"""Names of layers without and with a window."""
MOST_COLUMNS = 1 << 16
"""Rotated columns of a head: far more than any model has, and few enough to compute with."""


def rotary(config: Config, head_dim: int, *, theta: float = THETA, partial: float | None = None) -> dict[str, Any]:
    """The decoder's fields `positions`, `rotary_frequencies` and `rotary_scale`; `context_length` where angles cut it.

    `theta` is the family's base where the config has none. `partial` is its fraction of a head that is rotated; None
    for whole heads.
    """
    rope = _Rope(config, theta, partial)
    width = head_dim if rope.rope_type == "proportional" else int(head_dim * rope.rotated_fraction)
    if width % 2 or not 2 <= width <= min(head_dim, MOST_COLUMNS):
        expected = f"an even number of rotated columns of a head, {MOST_COLUMNS} at most: its two halves are rotated"
        raise config.error(
            "head_dim" if rope.rotated_fraction == 1 else "partial_rotary_factor", width, expected=expected
        )
    with np.errstate(all="ignore"):  # numbers out of range are found in the angles
        frequencies_J, scale = TYPES[rope.rope_type](rope, width)
    if not (np.isfinite(frequencies_J).all() and frequencies_J.min() > 0 and 0 < scale < math.inf):
        raise rope.error("angles", f"rope_theta {rope.theta:g}", "angles that float32 can hold", None)
    angles = (*frequencies_J.tolist(), *[0.0] * (width // 2 - len(frequencies_J)))
    found = {"positions": "rope", "rotary_frequencies": angles, "rotary_scale": scale}
    return found | ({"context_length": rope.cut_context()} if rope.rope_type in _LONG else {})


def of_kind(config: Config, kind: str, base: str) -> Config:
    """The config with the rope parameters of one kind of layers (`fields.KINDS`) alone.

    `base` is the key that configs without such parameters have for its base. A `rope_scaling` beside them is that of
    layers without a window: it is joined to theirs, and does not take their place.
    """
    nested = config.get("rope_parameters", {})
    if not isinstance(nested, dict) or not {*nested} <= {*KINDS}:
        raise config.error("rope_parameters", nested, expected=f"those of {' and of '.join(KINDS)} layers, each apart")
    own = {"rope_type": "default"} if nested.get(kind) is None else nested[kind]
    scaling = config.get("rope_scaling", {}) if kind == KINDS[False] else {}
    if not isinstance(own, dict) or not isinstance(scaling, dict):
        raise config.error("rope_parameters", nested, expected="an object for each kind of layers")
    fields = {key: value for key, value in config.fields.items() if key not in KEYS}
    fields["rope_scaling" if scaling else "rope_parameters"] = own | scaling
    return config.with_fields(fields | ({} if config.get(base) is None else {"rope_theta": config.get(base)}))


class _Rope:
    """The rope parameters of a config, wherever it keeps them.

    The rules are those of transformers: a `rope_scaling` that is not empty replaces `rope_parameters`, and keys inside
    them take precedence over the same keys beside them.
    """

    def __init__(self, config: Config, theta: float, partial: float | None) -> None:
        self.config = config
        self.key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        self.fields: Mapping[str, Any] = config.get(self.key, {})
        if not isinstance(self.fields, dict):
            raise config.error(self.key, self.fields, expected="an object")
        self.rope_type: Any = self.fields.get("rope_type", self.fields.get("type", "default"))
        older = self.fields.get("type", self.rope_type)
        self._check_type(self.rope_type if older in (self.rope_type, "default") else older)
        if older not in (self.rope_type, "default"):
            raise self.error("type", older, f"{self.rope_type}, which its rope_type is", None)
        self._check_keys()
        self.theta = self.number("rope_theta", config.fields.get("rope_theta", theta), name="rope_theta")
        partial = 1.0 if partial is None and self.rope_type == "proportional" else partial
        # Null rotates whole heads, where a missing key has the family's fraction.
        beside = config.fields.get("partial_rotary_factor", partial)
        self.rotated_fraction = self.number(
            "partial_rotary_factor", 1.0 if beside is None else beside, name="partial_rotary_factor"
        )
        if self.rotated_fraction != 1 and (partial is None or self.rotated_fraction > 1):
            most = "1: this family rotates whole heads" if partial is None else "at most 1"
            raise config.error("partial_rotary_factor", self.rotated_fraction, expected=most)

    def _check_type(self, rope_type: Any) -> None:
        if rope_type == "dynamic":
            raise self.error(
                "rope type",
                rope_type,
                "angles that do not depend on how long the text is",
                "no such type is supported",
            )
        if not isinstance(rope_type, str) or rope_type not in TYPES:
            raise self.error("rope type", rope_type, f"one of {', '.join(TYPES)}", "no other is supported")

    def _check_keys(self) -> None:
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KEYS_OF[self.rope_type]}
        others = sorted(k for k, v in self.fields.items() if k not in known and v is not None)
        others = [key for key in others if self.fields[key] is not False or key not in _OFF]
        unknown = [key for key in others if key not in _PASSED_OVER]
        if unknown:
            names = ", ".join(unknown)
            raise self.error(names, self.fields[unknown[0]], f"keys that the rope type {self.rope_type} has", None)
        if others:
            said = ", ".join(f"{key} = {short(self.fields[key])}" for key in others)
            line = (
                f"config.json: {self.key}: {said} has no effect on the rope type {self.rope_type}, as in transformers"
            )
            self.config.notices += [line] * (line not in self.config.notices)

    def error(self, name: str, value: object, expected: str, remedy: str | None) -> Exception:
        return self.config.error(f"{self.key}: {name}", value, expected=expected, remedy=remedy)

    def number(self, key: str, default: float | None = None, name: str | None = None) -> float:
        """The value of a parameter that must be a positive number."""
        value: Any = self.fields.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.config.error(name or f"{self.key}: {key}", value, expected="a positive number")
        return float(value)

    def original_length(self) -> float:
        """Number of positions of the model before its context was extended."""
        beside = self.config.get("original_max_position_embeddings")
        if beside is not None:
            return float(self.config.size("original_max_position_embeddings"))
        return self.number("original_max_position_embeddings", self.config.get("max_position_embeddings", 2048))

    def cut_context(self) -> int:
        """The original context, within which LongRoPE has one set of angles; a notice tells of what is cut."""
        length = int(self.original_length())
        context = self.config.size("max_position_embeddings", length)
        if length < context:
            line = f"config.json: {self.key}: the context is cut from {context} positions to the original {length}, "
            line += f"behind which {self.rope_type} has other angles"
            self.config.notices += [line] * (line not in self.config.notices)
        return min(length, context)


def frequencies(width: int, theta: float) -> F32:
    """The angles theta^(−2j / width) for j < width / 2."""
    return np.float32(1) / _powers(width, theta)


def _powers(width: int, theta: float) -> F32:
    # In float64: float32 powers differ between processors in the last bit, and the angles are part of the artifact.
    exponents = (np.arange(0, width, 2, dtype=np.float32) / np.float32(width)).astype(np.float64)
    return np.asarray((theta**exponents), np.float32)


def _default(rope: _Rope, width: int) -> tuple[F32, float]:
    return frequencies(width, rope.theta), 1.0


def _proportional(rope: _Rope, width: int) -> tuple[F32, float]:
    """The angles of whole heads, of which a fraction is kept and the others are 0; divided by `factor`."""
    kept = int(rope.rotated_fraction * width // 2)
    if not kept:
        raise rope.config.error("partial_rotary_factor", rope.rotated_fraction, expected=f"a pair of {width} columns")
    return frequencies(width, rope.theta)[:kept] / np.float32(rope.number("factor", 1.0)), 1.0


def _linear(rope: _Rope, width: int) -> tuple[F32, float]:
    """All angles divided by `factor`."""
    return frequencies(width, rope.theta) / np.float32(rope.number("factor")), 1.0


def _llama3(rope: _Rope, width: int) -> tuple[F32, float]:
    """Low frequencies divided by `factor`, high ones kept, those between them blended (Llama 3.1)."""
    low, high, factor = rope.number("low_freq_factor"), rope.number("high_freq_factor"), rope.number("factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"more than low_freq_factor = {low}", None)
    length, slow = rope.original_length(), np.float32(factor)
    f_J = frequencies(width, rope.theta)
    wavelength_J = (np.float32(1) / f_J) * np.float32(2 * math.pi)
    scaled_J = np.where(wavelength_J > np.float32(length / low), f_J / slow, f_J)
    smooth_J = ((np.float32(1) / wavelength_J) * np.float32(length) - np.float32(low)) / np.float32(high - low)
    blended_J = (np.float32(1) - smooth_J) * scaled_J / slow + smooth_J * scaled_J
    between_J = (wavelength_J >= np.float32(length / high)) & (wavelength_J <= np.float32(length / low))
    return np.where(between_J, blended_J, scaled_J), 1.0


def _yarn(rope: _Rope, width: int) -> tuple[F32, float]:
    """Low frequencies divided by `factor`, high ones kept, a ramp between them; and a scale (arXiv:2309.00071)."""
    length = rope.original_length()
    factor = rope.number("factor", rope.config.get("max_position_embeddings", 2048) / length)
    low, high = (
        _index_of_turns(rope, width, length, key, default) for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    truncate = rope.fields.get("truncate", True)
    if type(truncate) is not bool:
        raise rope.error("truncate", truncate, "true or false", None)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps_J = np.arange(width // 2, dtype=np.float32) - np.float32(low)
    ramp_J = np.clip(steps_J / np.float32((high + 0.001 if low == high else high) - low), 0, 1).astype(np.float32)
    kept_J = np.float32(1) - ramp_J
    powers_J = _powers(width, rope.theta)
    kept = np.float32(1) / powers_J
    divided = np.float32(1) / (np.float32(factor) * powers_J)
    return divided * (np.float32(1) - kept_J) + kept * kept_J, _yarn_scale(rope, factor)


def _index_of_turns(rope: _Rope, width: int, length: float, key: str, default: float) -> float:
    """The j whose angle makes a given number of turns over the original length."""
    turns = rope.number(key, default)
    if rope.theta == 1:
        raise rope.error("rope_theta", rope.theta, "another number than 1", None)
    return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_scale(rope: _Rope, factor: float) -> float:
    if rope.fields.get("attention_factor") is not None:
        return rope.number("attention_factor")
    mscale, whole = rope.fields.get("mscale"), rope.fields.get("mscale_all_dim")
    if mscale and whole:
        return _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _longrope(rope: _Rope, width: int) -> tuple[F32, float]:
    """Each angle divided by its own number, and a scale (arXiv:2402.13753); those of the original context."""
    short: Any = rope.fields.get("short_factor")
    numbers = short if isinstance(short, list) else []
    if len(numbers) != width // 2 or not all(type(n) in (int, float) and 0 < n < math.inf for n in numbers):
        raise rope.error("short_factor", short, f"{width // 2} positive numbers", None)
    length = rope.original_length()
    factor = rope.number("factor", rope.config.size("max_position_embeddings", int(length)) / length)
    usual = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 < length else 1.0
    return np.float32(1) / (np.array(short, np.float32) * _powers(width, rope.theta)), rope.number(
        "attention_factor", usual
    )


def score_scale(config: Config) -> float:
    """The factor of scores that DeepSeek's YaRN has: the square of the scale that `mscale_all_dim` gives."""
    rope = _Rope(config, THETA, None)
    if rope.rope_type == "default" or not rope.fields.get("mscale_all_dim"):
        return 1.0
    return _mscale(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


TYPES: Mapping[str, Callable[[_Rope, int], tuple[F32, float]]] = {
    "default": _default,
    "proportional": _proportional,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
_LONG = ("longrope", "su")
"""LongRoPE's name, and its older one."""
_EXTENDED = ("factor", "original_max_position_embeddings")
_KEYS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_LONG, (*_EXTENDED, "short_factor", "long_factor", "attention_factor")),
    "default": (),
    "proportional": ("factor",),
    "linear": _EXTENDED,
    "llama3": (*_EXTENDED, "low_freq_factor", "high_freq_factor"),
    # `finetuned` has no effect: in the code that introduced it (jquesnelle/yarn) only the dynamic type reads it.
    "yarn": (
        *_EXTENDED,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ),
}
_PASSED_OVER = {"attn_factor", *(key for keys in _KEYS_OF.values() for key in keys)} - {
    "finetuned",
    "short_factor",
    "long_factor",
}
"""Keys that transformers passes over, with a warning, in a type that does not have them. YaRN's `attention_factor` is
`attn_factor` in other programs, and stands so in published configs."""
_OFF = ("finetuned", "mrope_interleaved")
"""Keys of other programs that false switches off."""
