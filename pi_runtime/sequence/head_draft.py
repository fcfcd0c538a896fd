"""Drafts of a guess head: a small layer foretells tokens from the states that the model computed for the last ones.

A drafted token is chosen as the model's own is: with the same settings, and with the random number of its position. So
it is often right at any temperature.

Shape letters: T tokens, C·D the states of some layers side by side, D model width, S tokens of the short list.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import PiError
from pi_runtime.sequence.drafts import NO_DRAFT, Acceptance, Draft

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

HEAD_RIGHT = 0.7
"""Share of right tokens of a head, before any is known."""
MAX_HEAD_TOKENS = 8
"""Most tokens that a head drafts at a time."""
MAX_WAITING = 512
"""Most tokens for which a head that drafts nothing keeps states; it sees no others, when it begins."""


class HeadRunner(Protocol):
    """What computes a guess head."""

    ids_S: Ints
    """The ids of the tokens that it can draft, rising."""
    vocabulary: int
    states: tuple[int, ...]
    """The layers whose inputs it reads."""

    def new_cache(self) -> Any:
        """An empty cache for one sequence: with `length` and `truncate`."""

    def draft(self, cache: Any, tokens: list[int], states_TC: Floats | None, y_TD: Floats) -> tuple[Floats, Floats]:
        """Go on by some tokens, each of which follows a state; returns the last y (1, D) and its logits (S,).

        `states_TC`: what the model computed of the tokens before them; None: `y_TD` is what the head computed itself.
        """


class HeadDraft:
    """Drafts the tokens of one sequence by a guess head."""

    def __init__(
        self,
        runner: HeadRunner,
        acceptance: Acceptance,
        tokens: Sequence[int],
        choose: Callable[[Floats, Sequence[int]], int],
        end_ids: frozenset[int],
    ) -> None:
        """`tokens` is the sequence itself, which grows. `choose` is its sampler. Sequences share the `acceptance`."""
        self._runner, self._tokens, self._choose, self._end_ids = runner, tokens, choose, end_ids
        self._acceptance, self.states = acceptance, runner.states
        acceptance.approach(HEAD_RIGHT)
        self._cache: Any = None
        self._begin = self._end = 0
        """The positions whose states it was given, without a gap; its cache holds the first of them."""
        self._waiting: deque[Floats] = deque()
        """States behind those that its cache holds."""
        self._num_waiting = 0

    def take(self, first: int, states_TC: Floats) -> None:
        """Take the states of tokens from position `first` on."""
        if first != self._end:  # others were computed elsewhere, or these are computed again
            self._begin_at(first)
        self._end += len(states_TC)
        self._waiting.append(states_TC)
        self._num_waiting += len(states_TC)
        while (excess := self._num_waiting - MAX_WAITING) > 0:
            oldest = self._waiting.popleft()
            if len(oldest) > excess:
                self._waiting.appendleft(oldest[excess:])
            self._num_waiting -= min(excess, len(oldest))
            self._leave_before(self._end - self._num_waiting)

    def _begin_at(self, position: int) -> None:
        self._waiting.clear()
        self._num_waiting, self._end = 0, position
        self._leave_before(position)

    def _leave_before(self, position: int) -> None:
        """Forget the states before a position, those in the cache among them."""
        self._begin = position
        if self._cache is not None:
            self._cache.truncate(0)

    def draft(self, max_tokens: int) -> Draft:
        """A draft of at most so many tokens, which are made if any are to run."""
        if self._begin == self._end or self._end != len(self._tokens) - 1:
            return NO_DRAFT
        planned = max(0, min(max_tokens, MAX_HEAD_TOKENS))
        return Draft([], 0, acceptance=self._acceptance, planned=planned, make=self._make)

    def _make(self, count: int) -> list[int]:
        """The tokens that may follow, at most so many and none that ends the text."""
        if self._cache is None:
            self._cache = self._runner.new_cache()
        cache, end = self._cache, self._end
        states_TC = np.concatenate(self._waiting)
        next_tokens = list(self._tokens[end - len(states_TC) + 1 : end + 1])
        y_TD, logits_S = self._runner.draft(cache, next_tokens, states_TC, states_TC[:0])
        self._waiting.clear()
        self._num_waiting = 0
        length, found, seen = cache.length, list[int](), list(self._tokens)
        while (token := self._token(logits_S, seen)) is not None:
            found.append(token)
            seen.append(token)
            if len(found) == count:
                break
            y_TD, logits_S = self._runner.draft(cache, [token], None, y_TD)
        cache.truncate(length)
        return found

    def _token(self, logits_S: Floats, seen: Sequence[int]) -> int | None:
        """The token after those seen; None where the text may end, or none can be chosen: a grammar lets none of the
        short list follow or becomes too complex there, or the head's logits have no meaning."""
        logits_V = np.full(self._runner.vocabulary, -np.inf, np.float32)
        logits_V[self._runner.ids_S] = logits_S
        try:
            token = self._choose(logits_V, seen)
        except PiError:  # a draft that ends here changes no text
            return None
        return None if token in self._end_ids else token
