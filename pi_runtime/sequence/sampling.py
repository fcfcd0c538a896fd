"""The settings by which the tokens of an answer are chosen; `sampler` says what each does to logits."""

import math
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pi_runtime.errors import ArtifactError, Setting, UsageError

DEFAULT_TOP_K = 50  # what transformers samples with where a checkpoint names no top_k
FROM_CHECKPOINT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a checkpoint's own generation defaults may set."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which the next token is chosen. Raises UsageError naming the flag of an impossible value.

    >>> Sampling(temperature=0.7, top_k=40, seed=1).top_p
    1.0
    """

    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens (and ties with the last of them); 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together hold this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Makes every token of prompt and answer less likely to come again; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the answer has already; −2 to 2, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time that the answer has it; −2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; −100 to 100."""
    seed: int | None = None
    """Seed of all draws; None takes a fresh one for each answer."""
    number: int = 0
    """Number of this answer among several to one prompt, which have draws of their own with the same seed."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, "a number ≥ 0", _is_number(self.temperature, 0))
        _check("top_k", self.top_k, "an integer ≥ 0 (0 keeps all)", _is_integer(self.top_k))
        _check("top_p", self.top_p, "a number in 0…1", _is_number(self.top_p, 0, 1))
        _check("min_p", self.min_p, "a number in 0…1", _is_number(self.min_p, 0, 1))
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, "a number > 0", _is_number(penalty, 0) and penalty > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), "a number in −2…2", _is_number(getattr(self, name), -2, 2))
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else ()
        biases = all(_is_integer(token) and _is_number(bias, -100, 100) for token, bias in pairs)
        expected = "token ids, each with a number in −100…100"
        _check("logit_bias", self.logit_bias, expected, isinstance(self.logit_bias, Mapping) and biases)
        _check("seed", self.seed, "an integer ≥ 0", self.seed is None or _is_integer(self.seed))
        _check("number", self.number, "an integer ≥ 0", _is_integer(self.number))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """The checkpoint's own defaults, changed by the given fields; None changes nothing.

        As in transformers, a config without `do_sample: true` means greedy, and one without `top_k` means 50. An
        explicit temperature, or a filter that is not off, asks for sampling. Raises ArtifactError for an invalid
        config, UsageError for an invalid override.
        """
        given = {name: config[name] for name in FROM_CHECKPOINT if config.get(name) is not None}
        try:
            defaults = cls(**{"temperature": 1.0, "top_k": DEFAULT_TOP_K, **given})
        except UsageError as error:
            raise ArtifactError(f"the model's generation defaults: {error}") from None
        changed = replace(defaults, **{name: value for name, value in overrides.items() if value is not None})
        off = cls()
        filtered = any(overrides.get(name) not in (None, getattr(off, name)) for name in ("top_k", "top_p", "min_p"))
        if config.get("do_sample") or filtered or overrides.get("temperature") is not None:
            return changed
        return replace(changed, temperature=0.0)

    def seeded(self) -> Self:
        """The same settings with a seed: a fresh one where there was none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(48))


def parse_logit_bias(pairs: Iterable[Sequence[Any]]) -> dict[int, float] | None:
    """The biases that texts, or pairs of a JSON object, spell; None where there are none.

    >>> parse_logit_bias([("12", "-5"), ("7", 0.5)])
    {12: -5.0, 7: 0.5}
    """
    found: dict[int, float] = {}
    for pair in pairs:
        try:
            token, bias = pair
            found[int(token)] = float(bias)
        except (TypeError, ValueError, OverflowError):
            shown = "=".join(map(str, pair))
            raise UsageError(setting=Setting("logit_bias", shown), expected="ID=BIAS, such as 12=-5") from None
    return found or None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Comparing makes no float of an integer that none can hold.
    return low <= value <= min(high, sys.float_info.max)


def _check(name: str, value: object, expected: str, ok: bool) -> None:
    if not ok:
        raise UsageError(setting=Setting(name, value), expected=expected, found=repr(value))
