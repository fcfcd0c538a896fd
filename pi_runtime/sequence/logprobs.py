"""Log-probabilities of tokens, as the model's own logits have them."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import ArtifactError, Setting, UsageError

PAIR = struct.Struct("<qd")
"""A token and its log-probability."""
Float32s = npt.NDArray[np.float32]


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
