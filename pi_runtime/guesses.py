"""Guesses: the tokens that may come next, looked up in prompt and answer, so that one step can check several.

The last tokens are found where they stood before, and what followed them there is the guess. The model runs the guess
as one block; a guessed token is right if the draw at its position gives the same token. So guesses change no text.

How many tokens are guessed follows from two measurements. With a_L the share of guesses that were right after L equal
tokens, and c(S, T) the seconds of a step of S sequences and T tokens, the number of guesses maximises

    expected tokens / seconds  =  (S + Σ a_L a_{L+1} …) / c(S, T)

and is 0 where no number gains. What a guess would have been worth is counted even where none is run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi_runtime.errors import Setting, UsageError

GRAMS = (8, 4, 2)
"""Tokens that are looked up, the longest first."""
LONGEST_MATCH = 16
"""Equal tokens beyond these are not counted."""
MOST_GUESSES = 32
"""Most guesses for one sequence in a step."""
FORGET = 0.98
"""What a trial counts after the next one."""
GAIN = 1.02
"""Least gain for which guesses run, because times vary."""
LATEST = 0.25
"""Weight of the latest time of a step."""
NO_TOKEN = -1
"""Ends what may be copied."""
STALE_STEPS = 128
"""Steps after which times that were not taken again are forgotten, so that other numbers of guesses are tried."""
PLAIN_STEPS = 64
"""Steps with guesses in a row, so that the time of one without is measured now and then."""


@dataclass(frozen=True)
class Guess:
    """Tokens that may come next, after so many that are equal."""

    tokens: list[int]
    match: int


class Acceptance:
    """The share of guesses that were right, by the number of equal tokens before them: recent ones count most."""

    def __init__(self) -> None:
        length_L = np.arange(LONGEST_MATCH + 1)
        # Few at first: guesses that do not run are counted too, so a text that repeats itself is soon found out.
        self._tried_L = np.full(LONGEST_MATCH + 1, 3.0)
        self._right_L = self._tried_L * length_L / (length_L + 8)

    def count(self, match: int, right: bool) -> None:
        """Count a guess that came after so many equal tokens."""
        length = min(match, LONGEST_MATCH)
        self._tried_L[length] = FORGET * self._tried_L[length] + 1
        self._right_L[length] = FORGET * self._right_L[length] + right

    def expected(self, guess: Guess) -> list[float]:
        """For each token of a guess the probability that it and all before it are right."""
        if not guess.tokens:
            return []
        lengths = np.minimum(guess.match + np.arange(len(guess.tokens)), LONGEST_MATCH)
        found: list[float] = np.cumprod(self._right_L[lengths] / self._tried_L[lengths]).tolist()
        return found


class PromptLookup:
    """Finds where the last tokens of one sequence stood before. Each token is put into the index once."""

    def __init__(
        self, tokens: Sequence[int], end_ids: frozenset[int] = frozenset(), expected: Sequence[int] = ()
    ) -> None:
        """`tokens` is the sequence itself, which grows. `expected`: what may follow the tokens that it has now."""
        self.acceptance = Acceptance()
        self._tokens, self._end_ids = tokens, end_ids
        self._known: list[int] = []
        """What is copied from: the sequence, with what is expected inserted where it is."""
        self._followed_by: dict[tuple[int, ...], int] = {}
        """Position in `known` after the latest occurrence of some tokens."""
        self._indexed = self._inserted = 0
        self._expected, self._begins = expected, len(tokens)
        self._shared: Mapping[tuple[int, ...], int] = {}
        """The same of what is expected, and of the tokens before it: other answers to the prompt have it too."""

    def prepare(self) -> None:
        """Put what is expected into the index. It may take long, and happens with the first guess otherwise."""
        if self._expected:
            expected, self._expected = self._expected, ()
            self._index([*self._tokens[: self._begins], *expected], 0)
            self._known.append(NO_TOKEN)
            self._indexed, self._inserted = self._begins, len(expected) + 1
            self._shared, self._followed_by = self._followed_by, {}

    def beside(self, tokens: Sequence[int]) -> "PromptLookup":
        """One for another answer to the same prompt: what is expected is put into an index once for both.

        To be called before either has grown.
        """
        self.prepare()
        assert len(tokens) == len(self._tokens)
        found = PromptLookup(tokens, self._end_ids)
        found._known, found._shared = list(self._known), self._shared
        found._indexed, found._inserted = self._indexed, self._inserted
        return found

    def guess(self, most: int) -> Guess:
        """The tokens that followed the last ones before, at most so many and none that ends the text."""
        self.prepare()
        tokens, end = self._tokens, len(self._tokens)
        self._index(tokens, self._indexed)
        self._indexed = end
        for size in GRAMS:
            gram = tuple(tokens[-size:])
            source = self._followed_by.get(gram, self._shared.get(gram)) if size <= end else None
            if source is not None:
                return Guess(self._copied(source, min(most, MOST_GUESSES)), self._match(source))
        return Guess([], 0)

    def count(self, guess: Guess, drawn: Sequence[int]) -> None:
        """Count how far a guess was right about the tokens that came, whether it was run or not."""
        for n, (guessed, token) in enumerate(zip(guess.tokens, drawn, strict=False)):
            self.acceptance.count(guess.match + n, guessed == token)
            if guessed != token:
                return

    def _index(self, tokens: Sequence[int], first: int) -> None:
        """Put tokens from `first` on into the index."""
        for at in range(first, len(tokens)):
            for size in GRAMS:
                if size <= at:
                    self._followed_by[tuple(tokens[at - size : at])] = at + self._inserted
        self._known.extend(tokens[first:])

    def _copied(self, source: int, most: int) -> list[int]:
        """What follows at `source`; where that reaches the end, it goes on with what was copied."""
        period = len(self._known) - source
        found: list[int] = []
        for n in range(most):
            token = self._known[source + n] if n < period else found[n - period]
            if token in self._end_ids or token == NO_TOKEN:
                break
            found.append(token)
        return found

    def _match(self, source: int) -> int:
        """How many tokens before `source` equal the last ones."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(source, end, LONGEST_MATCH)
        return next((n for n in range(most) if self._known[source - 1 - n] != tokens[end - 1 - n]), most)


class StepTimes:
    """Seconds of steps with selection, by sequences and tokens; one object may serve several threads."""

    def __init__(self) -> None:
        self._by_sequences: dict[int, dict[int, float]] = {}
        self._taken_at: dict[tuple[int, int], int] = {}
        self._steps = 0

    def count(self, sequences: int, tokens: int, seconds: float) -> None:
        """Count a step of so many sequences, with so many tokens in all."""
        self._steps += 1
        times = self._by_sequences.setdefault(sequences, {})
        known = times.get(tokens)
        if known is None or (tokens > sequences and not self._is_fresh(sequences, tokens)):
            times[tokens] = seconds
        else:
            # One step that was held up by something else says little.
            times[tokens] = known + LATEST * (min(seconds, 2 * known) - known)
        self._taken_at[sequences, tokens] = self._steps

    def taken(self, sequences: int) -> dict[int, float]:
        """The times that were taken of steps of so many sequences, by tokens."""
        return dict(self._by_sequences.get(sequences, {}))

    def seconds(self, sequences: int, most: int) -> list[float]:
        """Seconds of a step with `sequences` tokens, one more, and so on up to `most`, as far as anything is known.

        Between two times that were taken lies a line. At most twice as many guesses as were ever tried are foreseen.
        """
        times = {t: s for t, s in self.taken(sequences).items() if self._is_fresh(sequences, t)}
        plain = times.pop(sequences, None)
        if plain is None:
            return []
        tokens = [sequences, *sorted(times)]
        # No step takes longer than one with more tokens: a time that says so was held up by something else.
        seconds = np.minimum.accumulate([plain, *(times[t] for t in sorted(times))][::-1])[::-1]
        furthest = sequences + max(2, 2 * (tokens[-1] - sequences))
        if furthest > tokens[-1]:
            # Beyond the last time the line goes on; before anything is known, a further token seems to cost nothing.
            slope = (seconds[-1] - seconds[0]) / (tokens[-1] - sequences) if len(tokens) > 1 else 0.0
            seconds = np.append(seconds, seconds[-1] + slope * (furthest - tokens[-1]))
            tokens.append(furthest)
        wanted = np.arange(sequences, min(most, furthest) + 1)
        found: list[float] = np.interp(wanted, tokens, seconds).tolist()
        return found

    def _is_fresh(self, sequences: int, tokens: int) -> bool:
        limit = PLAIN_STEPS if tokens == sequences else STALE_STEPS
        return self._steps - self._taken_at[sequences, tokens] < limit


class Speculation:
    """The rule for how many tokens are guessed. `setting`: `auto` as it pays, `off`, or that many."""

    def __init__(self, setting: str | int, times: StepTimes, *, can_gain: bool, most: int) -> None:
        """`can_gain`: whether a step computes several tokens of a sequence at once. `most`: tokens of a step."""
        if setting not in ("auto", "off") and not (type(setting) is int and 1 <= setting <= MOST_GUESSES):
            raise UsageError(setting=Setting("speculate", setting), expected=f"auto, off, or 1 to {MOST_GUESSES}")
        if type(setting) is int and not can_gain:
            raise UsageError(
                (Setting("speculate", setting), " does not go with a placement: it runs one token after the other"),
                remedy=(Setting("speculate", "auto"), ", or ", Setting("device", "cpu")),
            )
        self.times, self._most, self._setting = times, most, setting
        self.is_on = setting != "off" and can_gain

    def lengths(self, expected: Sequence[Sequence[float]]) -> list[int]:
        """How many guesses each sequence of a step runs; `expected` is what `Acceptance.expected` says of each."""
        count = len(expected)
        if self._setting != "auto":
            left = max(0, self._most - count)
            lengths = []
            for probabilities in expected:
                lengths.append(min(int(self._setting), len(probabilities), left))
                left -= lengths[-1]
            return lengths
        lengths = [0] * count
        # Probabilities of a sequence fall, so the best ones of all are always its first ones.
        ranked = sorted(((p, n) for n, row in enumerate(expected) for p in row), key=lambda pair: -pair[0])
        seconds = self.times.seconds(count, self._most) if ranked else []
        if not seconds:
            return lengths
        gains = np.cumsum([count, *(p for p, _ in ranked)])[: len(seconds)]
        rates = gains / np.array(seconds[: len(gains)])
        best = int(rates.argmax())
        if rates[best] >= GAIN * rates[0]:
            for _, n in ranked[:best]:
                lengths[n] += 1
        return lengths
