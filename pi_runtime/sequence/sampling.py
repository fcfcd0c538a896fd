"""The settings by which the tokens of an answer are chosen, and what each does: penalties, biases, and filters.

They are transformers' filters in transformers' order.

    x_V  logits      p = softmax(x)      C  the candidates still in play      n_i  how often the answer has i so far

    repetition penalty   x_i ← x_i · r  if x_i < 0  else  x_i / r,   for every i seen so far
    frequency penalty    x_i ← x_i − f · n_i
    presence penalty     x_i ← x_i − a · [n_i > 0]
    logit bias           x_i ← x_i + b_i
    grammar              x_i ← −∞  for tokens that may not follow
    end of text          x_i ← −∞  for its ids, in the first tokens of an answer that is to have so many
    temperature          x ← x / t
    top-k                C = {i : x_i ≥ the k-th largest x}
    top-p                C without the least likely tokens, as long as those removed sum to at most 1 − p
    min-p                C = {i : p_i ≥ m · max p}

Temperature 0 is greedy: the largest penalised logit, the lowest id on ties; the filters then change nothing.
"""

import math
import secrets
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import ArtifactError, Setting, UsageError

Float64s = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]

GROUPS, LIKELY = 1024, 256
"""Groups of logits, whose maxima bound the k-th largest logit from below; tokens among which a top-p is looked for."""

DEFAULT_TOP_K = 50  # what transformers samples with where a checkpoint names no top_k
FROM_CHECKPOINT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a checkpoint's own generation defaults may set."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which the next token is chosen. Raises UsageError naming an impossible one.

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
    """Added to the logits of these tokens; −100 to 100, or −∞, with which they never come."""
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
        biases = all(_is_integer(token) and (bias == -math.inf or _is_number(bias, -100, 100)) for token, bias in pairs)
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


def candidates(scores: Float32s, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Float64s]:
    """The ids that may be drawn from penalised logits, in rising order, and their probabilities (float64)."""
    top = float(scores.max())
    ids, mass = _shortlist(scores, top, sampling)
    # The shift changes no probability and lets any temperature > 0 divide without reaching +inf or NaN.
    with np.errstate(over="ignore"):
        x: Float64s = (scores[ids].astype(np.float64) - top) / sampling.temperature
    if 0 < sampling.top_k < x.size:
        ids, x = _keep(top_k(x, sampling.top_k), ids, x)
    if mass < 1:
        ids, x = _keep(top_p(x, mass), ids, x)
    if sampling.min_p > 0:
        ids, x = _keep(min_p(x, sampling.min_p), ids, x)
    return ids, softmax(x)


def _shortlist(scores: Float32s, top: float, sampling: Sampling) -> tuple[npt.NDArray[np.intp], float]:
    """Ids, few if possible, among which the filters find what they find among all; and the top-p to apply there.

    Sorting a large vocabulary, and its exponentials in float64, would take milliseconds.
    """
    s = sampling
    if scores.size >= 2 * GROUPS and 0 < s.top_k <= GROUPS:
        return _likeliest(scores, s.top_k), s.top_p
    if scores.size >= 2 * GROUPS and s.top_k == 0 and s.top_p < 1:
        ids = _likeliest(scores, LIKELY)
        with np.errstate(over="ignore"):
            e = np.exp((scores - np.float32(top)) / np.float32(s.temperature))
        mass = s.top_p * e.sum(dtype=np.float64) / e[ids].sum(dtype=np.float64)
        # Otherwise ids beyond these are kept too, or the sums do not tell.
        if mass < 1 - 1e-5:
            return ids, mass
    if s.top_k == 0 and s.top_p == 1 and s.min_p > 0:
        # One part in a million less, for rounding; the filter itself decides.
        least = top + s.temperature * math.log(s.min_p * (1 - 1e-6))
        return np.flatnonzero(scores.astype(np.float64) >= least), s.top_p
    return _possible(scores), s.top_p


def _likeliest(scores: Float32s, count: int) -> npt.NDArray[np.intp]:
    """At least `count` ids, if as many are possible: the likeliest, and all ties with the least likely of them."""
    # Of `count` groups the largest are at least this, so the count-th largest of all is, and so are its ties.
    largest = scores[: scores.size // GROUPS * GROUPS].reshape(-1, GROUPS).max(0)
    bound = np.partition(largest, GROUPS - count)[GROUPS - count]
    return np.flatnonzero(scores >= bound) if bound > -np.inf else _possible(scores)


def _possible(scores: Float32s) -> npt.NDArray[np.intp]:
    """The ids whose probability is not 0: a grammar may leave few."""
    return np.flatnonzero(scores > -np.inf)


def softmax(x: Float64s) -> Float64s:
    """exp(x_i) / Σ exp(x)."""
    e: Float64s = np.exp(x - x.max())
    p: Float64s = e / e.sum()
    return p


def penalise(logits: Float32s, seen_ids: Ids, penalty: float) -> Float32s:
    """x_i · r where x_i < 0, x_i / r elsewhere, once for each seen i (Keskar et al. 2019, section 4.1)."""
    if penalty == 1 or not len(seen_ids):
        return logits
    seen = np.unique(np.asarray(seen_ids, np.int64))
    seen = seen[seen < logits.size]
    scores, r = logits.copy(), np.float32(penalty)
    x = logits[seen]
    with np.errstate(all="ignore"):  # an overflow is the caller's to find
        scores[seen] = np.where(x < 0, x * r, x / r)
    return scores


def penalise_repeats(logits: Float32s, answer_ids: Ids, presence: float, frequency: float) -> Float32s:
    """x_i − presence − frequency · n_i for each i that the answer has n_i > 0 times (OpenAI's definition)."""
    if presence == frequency == 0 or not len(answer_ids):
        return logits
    ids, counts = np.unique(np.asarray(answer_ids, np.int64), return_counts=True)
    scores = logits.copy()
    scores[ids] -= (presence + frequency * counts).astype(np.float32)
    return scores


def top_k(x: Float64s, k: int) -> Mask:
    """Whether x_i is at least the k-th largest; ties with it stay."""
    k = min(k, x.size)
    keep: Mask = x >= np.partition(x, x.size - k)[x.size - k]
    return keep


def top_p(x: Float64s, p: float) -> Mask:
    """False for the least likely tokens as long as they sum to at most 1 − p (Holtzman et al. 2020); one is kept."""
    prob = softmax(x)
    # Those below (1 − p) / V are all removed and need no sorting; half of it, so that rounding never removes the most
    # likely one here.
    tail = prob < 0.5 * (1 - p) / x.size
    rising = np.flatnonzero(~tail)
    rising = rising[np.argsort(x[rising], kind="stable")]
    keep: Mask = np.zeros(x.size, np.bool_)
    keep[rising] = prob[tail].sum() + prob[rising].cumsum() > 1 - p
    keep[rising[-1]] = True
    return keep


def min_p(x: Float64s, m: float) -> Mask:
    """Whether a token is at least m times as likely as the most likely one (Nguyen et al. 2024)."""
    p = softmax(x)
    keep: Mask = p >= m * p.max()
    return keep


def _keep(mask: Mask, ids: npt.NDArray[np.intp], x: Float64s) -> tuple[npt.NDArray[np.intp], Float64s]:
    return ids[mask], x[mask]


class Sampler:
    """Chooses the next token of a sequence. It has no state: the same tokens before it give the same choice.

    `prompt_tokens`: how many of these are the prompt's. `end_ids`: tokens that end a text, which come only once the
    answer has `min_tokens` tokens, or where a grammar lets nothing else follow. `allowed`: says for the
    tokens so far, prompt included, which ones a grammar lets follow.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        *,
        prompt_tokens: int = 0,
        end_ids: Iterable[int] = (),
        min_tokens: int = 0,
        allowed: Callable[[Ids], Mask] | None = None,
    ) -> None:
        self._allowed = allowed
        self.sampling, self._vocab_size = sampling.seeded(), vocab_size
        self._prompt_tokens, self._min_tokens = prompt_tokens, min_tokens
        self._end_ids = np.array(list(end_ids), np.int64)
        self._bias_ids = np.array(list(sampling.logit_bias), np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), np.float32)
        outside = [token for token in sampling.logit_bias if token >= vocab_size]
        if outside:
            raise UsageError(f"token id {outside[0]}", setting=Setting("logit_bias"), expected=f"0 to {vocab_size - 1}")
        streams = np.random.SeedSequence(self.sampling.seed, spawn_key=(sampling.number,))
        self._key = streams.generate_state(2, np.uint64)

    def __call__(self, logits: Float32s, seen_ids: Ids) -> int:
        """Choose the next id from float32 logits (vocabulary,) and every id so far, prompt included.

        Raises ArtifactError for logits without meaning: a NaN, +inf, or −inf everywhere. `logits` is not changed.
        """
        assert logits.shape == (self._vocab_size,), logits.shape
        s = self.sampling
        scores = self._scores(logits, seen_ids)
        check_finite(scores)
        scores = self._constrained(scores, seen_ids)
        if s.temperature == 0 or (self._allowed is not None and np.isfinite(scores).sum() == 1):
            # Where a grammar leaves one token there is nothing to draw.
            return int(scores.argmax())
        ids, p = candidates(scores, s)
        cumulated = p.cumsum()
        # Below the total even where the product rounds up to it, so that an id of probability 0 is never drawn.
        point = min(self.draw(len(seen_ids)) * cumulated[-1], np.nextafter(cumulated[-1], 0))
        return int(ids[np.searchsorted(cumulated, point, side="right")])

    def _scores(self, logits: Float32s, seen_ids: Ids) -> Float32s:
        """The logits with penalties and biases; the given ones where nothing changes them."""
        s = self.sampling
        scores = penalise(logits, seen_ids, s.repetition_penalty)
        if s.presence_penalty or s.frequency_penalty:
            answer_ids = seen_ids[self._prompt_tokens :]
            scores = penalise_repeats(scores, answer_ids, s.presence_penalty, s.frequency_penalty)
        if self._bias_ids.size:
            scores = scores.copy()
            scores[self._bias_ids] += self._bias
        return scores

    def _constrained(self, scores: Float32s, seen_ids: Ids) -> Float32s:
        """The scores, −∞ for tokens that may not follow. Raises UsageError where none is left."""
        if self._allowed is not None:
            scores = np.where(self._allowed(seen_ids), scores, np.float32(-np.inf))
        if len(seen_ids) < self._prompt_tokens + self._min_tokens and self._end_ids.size:
            others = scores.copy()
            others[self._end_ids] = -np.inf
            if self._allowed is None or others.max() > -np.inf:
                scores = others
        if scores.max() == -np.inf:
            raise UsageError(
                "no token may follow",
                found="the grammar rules out every token that the model's logits do not",
                remedy="a grammar whose texts can be spelled with the model's tokens",
            )
        return scores

    def draw(self, position: int) -> float:
        """The random number in [0, 1) for a position: a counter-based generator's, keyed by seed and number."""
        return float(np.random.Generator(np.random.Philox(key=self._key, counter=position)).random())


PAIR = struct.Struct("<qd")
"""A token and its log-probability."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TokenLogprobs:
    """The log-probability of a token, and the likeliest tokens in its place.

    An answer keeps one for each of its tokens: packed they take a tenth of what Python's own numbers would.
    """

    token: int
    logprob: float
    _top: bytes

    def __init__(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> None:
        object.__setattr__(self, "token", token)
        object.__setattr__(self, "logprob", logprob)
        object.__setattr__(self, "_top", b"".join(PAIR.pack(*pair) for pair in top))

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Tokens and their log-probabilities, the likeliest first, the lowest id on ties."""
        return tuple(PAIR.iter_unpack(self._top))

    def __repr__(self) -> str:
        return f"TokenLogprobs(token={self.token}, logprob={self.logprob}, top={self.top})"


def token_logprobs(logits: Float32s, token: int, top: int) -> TokenLogprobs:
    """The log-softmax of logits (vocabulary,), at a token and at the `top` likeliest ones.

    >>> token_logprobs(np.log(np.array([1, 4, 3], np.float32)), 0, 1)
    TokenLogprobs(token=0, logprob=-2.0794415418798357, top=((1, -0.6931471805599452),))
    """
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    count = min(top, x.size)
    # All that are no less likely than the last one wanted, ties included.
    ids = np.flatnonzero(x >= np.partition(x, -count)[-count]) if count else np.arange(0)
    ids = ids[np.argsort(-x[ids], kind="stable")][:count]
    return TokenLogprobs(token, float(x[token]), tuple((int(i), float(x[i])) for i in ids))


def check_finite(logits: Float32s) -> None:
    """Raise ArtifactError for logits without meaning: a NaN, +inf, or −inf everywhere."""
    # max() is NaN if any logit is.
    if not math.isfinite(top := float(logits.max())):
        raise ArtifactError(
            f"the model's logits have the maximum {top}",
            expected="finite logits",
            remedy="`pi-compile verify` on the artifact; if it is whole, its weights overflow the arithmetic",
        )


def check_logprobs(name: str, count: int | None) -> None:
    """Raise UsageError for an impossible number of likeliest tokens."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise UsageError(setting=Setting(name, count), expected="an integer ≥ 0, the number of likeliest tokens")
