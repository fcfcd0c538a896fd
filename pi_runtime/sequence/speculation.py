"""Speculation: how many drafted tokens a step runs, which follows from two measurements.

With a_L the share of drafts that were right after L equal tokens, and c(S, T) the seconds of a step of S sequences and
T tokens, the number of drafted tokens maximises

    expected tokens / seconds  =  (S + Σ a_L a_{L+1} …) / c(S, T)

and is 0 where no number gains. Tokens of a guess head take time to draft as well: it is added to c where they are
among them. What a draft would have been worth is counted even where none is run.
"""

import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from pi_runtime.errors import Setting, UsageError
from pi_runtime.sequence.drafts import MAX_DRAFT_TOKENS, Draft

GAIN = 1.05
"""Least gain for which drafts run, because times vary."""
LATEST = 17
"""Times of a step whose median counts: one that was held up by something else says nothing."""
STALE_STEPS = 128
"""Steps after which times that were not taken again are forgotten, so that other numbers of tokens are tried."""
ONCE_STEPS = 16
"""The same for a time that was taken once: it may have been held up."""
LEAST_DRAFTINGS = 3
"""Draftings by a guess head before their time counts: the first one may have compiled kernels."""
PLAIN_STEPS = 64
"""Steps with drafts in a row, so that the time of one without is measured now and then."""


class StepTimes:
    """Seconds of steps with selection, by sequences and tokens; one object may serve several threads."""

    def __init__(self) -> None:
        self._by_sequences: dict[int, dict[int, float]] = {}
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._taken_at: dict[tuple[int, int], int] = {}
        self._steps = 0
        self._drafting: deque[float] = deque(maxlen=LATEST)
        self._drafted_at = 0

    def count(self, sequences: int, tokens: int, seconds: float) -> None:
        """Count a step of so many sequences, with so many tokens in all."""
        self._steps += 1
        latest = self._latest.setdefault((sequences, tokens), deque(maxlen=LATEST))
        if tokens > sequences and len(latest) > 1 and not self._is_fresh(sequences, tokens):
            latest.clear()
        latest.append(seconds)
        self._by_sequences.setdefault(sequences, {})[tokens] = statistics.median_low(latest)
        self._taken_at[sequences, tokens] = self._steps

    def count_drafting(self, tokens: int, seconds: float) -> None:
        """Count how long a guess head took to draft so many tokens."""
        if self._steps - self._drafted_at >= STALE_STEPS:
            self._drafting.clear()
        self._drafting.append(seconds / tokens)
        self._drafted_at = self._steps

    @property
    def drafting_s(self) -> float:
        """Seconds in which a guess head drafts a token; 0 as long as that is to be found out."""
        known = len(self._drafting) >= LEAST_DRAFTINGS and self._steps - self._drafted_at < STALE_STEPS
        return statistics.median_low(self._drafting) if known else 0.0

    def taken(self, sequences: int) -> dict[int, float]:
        """The times that were taken of steps of so many sequences, by tokens."""
        return dict(self._by_sequences.get(sequences, {}))

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step of so many sequences without drafts; None before there was one."""
        return self._by_sequences.get(sequences, {}).get(sequences)

    def seconds(self, sequences: int, max_tokens: int) -> list[float]:
        """Seconds of a step with `sequences` tokens, one more, and so on up to `max_tokens`, as far as is known.

        Between two times that were taken lies a line. At most twice as many drafted tokens as were ever tried
        are foreseen.
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
        wanted = np.arange(sequences, min(max_tokens, furthest) + 1)
        found: list[float] = np.interp(wanted, tokens, seconds).tolist()
        return found

    def _is_fresh(self, sequences: int, tokens: int) -> bool:
        limit = PLAIN_STEPS if tokens == sequences else STALE_STEPS
        if tokens > sequences and len(self._latest[sequences, tokens]) == 1:
            limit = ONCE_STEPS
        return self._steps - self._taken_at[sequences, tokens] < limit


class Speculation:
    """The rule for how many tokens are drafted. `setting`: `auto` as it pays, `off`, or that many."""

    def __init__(self, setting: str | int, times: StepTimes, *, can_gain: bool, max_tokens: int) -> None:
        """`can_gain`: whether a step computes several tokens of a sequence at once. `max_tokens`: most in a step."""
        if setting not in ("auto", "off") and not (type(setting) is int and 1 <= setting <= MAX_DRAFT_TOKENS):
            raise UsageError(setting=Setting("speculate", setting), expected=f"auto, off, or 1 to {MAX_DRAFT_TOKENS}")
        if type(setting) is int and not can_gain:
            raise UsageError(
                (Setting("speculate", setting), " does not go with a placement: it runs one token after the other"),
                remedy=(Setting("speculate", "auto"), ", or ", Setting("device", "cpu")),
            )
        self.times, self._max_tokens, self._setting = times, max_tokens, setting
        self.is_on = setting != "off" and can_gain

    def planned(self, drafts: Sequence[Sequence[Draft]]) -> list[tuple[Draft, int]]:
        """For each sequence of a step one of its possible drafts, and how many tokens of it run."""
        best = [self._best(of_one, len(drafts)) for of_one in drafts]
        costs = [self.times.drafting_s if draft.by_head else 0.0 for draft in best]
        return list(zip(best, self.lengths([draft.expected for draft in best], costs), strict=True))

    def _best(self, drafts: Sequence[Draft], count: int) -> Draft:
        """The one of a sequence's possible drafts that gains most where `count` sequences run; of equals the first."""
        some = [draft for draft in drafts if draft.expected]
        seconds = self.times.seconds(count, self._max_tokens) if len(some) > 1 and self._setting == "auto" else []
        if not seconds:
            return some[0] if some else drafts[0]

        def rate(draft: Draft) -> float:
            tokens = count + np.cumsum([0.0, *draft.expected])[: len(seconds)]
            cost = self.times.drafting_s if draft.by_head else 0.0
            return float((tokens / (np.array(seconds[: len(tokens)]) + cost * np.arange(len(tokens)))).max())

        return max(some, key=rate)

    def run(self, draft: Draft, length: int, plain_s: float | None) -> Draft:
        """Make a draft of so many tokens, and count how long a guess head took."""
        found = draft.run(length, plain_s)
        if length and found.by_head:
            self.times.count_drafting(length, found.made_s)
        return found

    def lengths(self, expected: Sequence[Sequence[float]], costs: Sequence[float] = ()) -> list[int]:
        """How many drafted tokens each sequence of a step runs; `expected` is that of `Acceptance` for each.

        `costs`: seconds that drafting a token takes, for each sequence.
        """
        count = len(expected)
        if self._setting != "auto":
            left = max(0, self._max_tokens - count)
            lengths = []
            for probabilities in expected:
                lengths.append(min(int(self._setting), len(probabilities), left))
                left -= lengths[-1]
            return lengths
        lengths = [0] * count
        # Probabilities of a sequence fall, so the best ones of all are always its first ones.
        ranked = sorted(((p, n) for n, row in enumerate(expected) for p in row), key=lambda pair: -pair[0])
        seconds = self.times.seconds(count, self._max_tokens) if ranked else []
        if not seconds:
            return lengths
        gains = np.cumsum([count, *(p for p, _ in ranked)])[: len(seconds)]
        drafting = np.cumsum([0.0, *(costs[n] if costs else 0.0 for _, n in ranked)])[: len(gains)]
        rates = gains / (np.array(seconds[: len(gains)]) + drafting)
        best = int(rates.argmax())
        if rates[best] >= GAIN * rates[0]:
            for _, n in ranked[:best]:
                lengths[n] += 1
        return lengths
