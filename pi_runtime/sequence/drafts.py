"""Drafts: the tokens that may come next, so that one step can check several, and how many of them a step runs.

A grammar may let one text follow alone: its tokens are the draft. Otherwise the last tokens are looked up in prompt and
answer, and what followed them where they stood before is the draft. The model runs the draft as one block; a drafted
token is right if the draw at its position gives the same token. So drafts change no text.

How many run follows from two measurements. With a_L the share of drafts that were right after L equal tokens, and
c(S, T) the seconds of a step of S sequences and T tokens, the number of drafted tokens maximises

    expected tokens / seconds  =  (S + Σ a_L a_{L+1} …) / c(S, T)

and is 0 where no number gains. Tokens of a guess head take time to draft as well: it is added to c where they are among
them. What a draft would have been worth is counted even where none is run.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pi_runtime.errors import Setting, UsageError
from pi_runtime.sequence.stats import DraftFigures
from pi_runtime.text.grammar import GrammarState

GRAMS = (8, 4, 2)
"""Tokens that are looked up, the longest first."""
LONGEST_MATCH = 16
"""Equal tokens beyond these are not counted."""
MAX_DRAFT_TOKENS = 32
"""Most drafted tokens of one sequence in a step."""
FORGET = 0.98
"""What a trial counts after the next one."""
APPROACH = 0.03
"""Part of the way to a share of right tokens that is gone at once."""
FORCED_RIGHT = 0.95
"""Share of right tokens in forced text, before any is known: models mostly spell as the tokenizer does."""
NO_TOKEN = -1
"""Ends what may be copied."""


class Acceptance:
    """How often drafted tokens were right, for each length of the match before them; recent ones count most."""

    def __init__(self, right: float | None = None) -> None:
        """`right`: the share to begin with; None has it grow with the number of equal tokens."""
        length_L = np.arange(LONGEST_MATCH + 1)
        # Few at first: drafts that do not run are counted too, so a text that repeats itself is soon found out.
        self._tried_L = np.full(LONGEST_MATCH + 1, 3.0)
        self._right_L = self._tried_L * (length_L / (length_L + 8) if right is None else right)

    def count(self, match: int, right: bool) -> None:
        """Count a drafted token that came after so many equal tokens."""
        length = min(match, LONGEST_MATCH)
        self._tried_L[length] = FORGET * self._tried_L[length] + 1
        self._right_L[length] = FORGET * self._right_L[length] + right

    def approach(self, right: float) -> None:
        """Come a bit nearer to a share: what seemed to be of no use is tried again in time."""
        self._right_L += APPROACH * (right * self._tried_L - self._right_L)

    def expected(self, draft: "Draft") -> list[float]:
        """For each token of a draft the probability that it and all before it are right."""
        count = len(draft.tokens) or draft.planned
        if not count:
            return []
        lengths = np.minimum(draft.match + np.arange(count), LONGEST_MATCH)
        found: list[float] = np.cumprod(self._right_L[lengths] / self._tried_L[lengths]).tolist()
        return found


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next, taken from behind `match` equal tokens; the first `num_run` run in the step."""

    tokens: list[int]
    match: int
    num_run: int = 0
    plain_s: float | None = None
    """What the step takes where nothing is drafted, if that was measured."""
    acceptance: Acceptance = field(default_factory=Acceptance, compare=False, repr=False)
    """What is known of drafts of its kind, where this one counts too."""
    planned: int = 0
    """How many tokens a guess head may draft, where `make` has not been called yet."""
    make: Callable[[int], list[int]] | None = field(default=None, compare=False, repr=False)
    """What drafts so many tokens, where a guess head does."""
    made_s: float = 0.0
    """How long that took."""

    @property
    def expected(self) -> list[float]:
        """For each token the probability that it and all before it are right."""
        return self.acceptance.expected(self)

    @property
    def by_head(self) -> bool:
        """Whether a guess head drafts it."""
        return self.make is not None

    def run(self, count: int, plain_s: float | None) -> "Draft":
        """The draft with so many tokens to run, or fewer where a guess head drafts fewer."""
        tokens, began = self.tokens, time.perf_counter()
        if self.make is not None and count:
            tokens = self.make(count)
        made_s = time.perf_counter() - began if self.make is not None else 0.0
        return replace(self, tokens=tokens, num_run=min(count, len(tokens)), plain_s=plain_s, made_s=made_s)

    def figures(self, accepted: int, won_s: float = 0.0) -> DraftFigures:
        """What became of it, if so many of its tokens were right."""
        ran, by_head = self.num_run, self.by_head
        return DraftFigures(
            guessed_tokens=ran,
            accepted_tokens=accepted,
            checked_drafts=int(ran > 0),
            drafts_won_s=won_s,
            head_guessed_tokens=ran * by_head,
            head_accepted_tokens=accepted * by_head,
        )

    def count(self, drawn: Sequence[int]) -> None:
        """Count how far it was right about the tokens that came, whether it was run or not."""
        for n, (drafted, token) in enumerate(zip(self.tokens, drawn, strict=False)):
            self.acceptance.count(self.match + n, drafted == token)
            if drafted != token:
                return


NO_DRAFT = Draft([], 0)


class ForcedText:
    """Drafts what must come next, where a grammar allows one text only.

    Such a draft is wrong only where the model spells the text in other tokens than the tokenizer does.
    """

    def __init__(self, grammar: GrammarState) -> None:
        self._grammar = grammar
        self._acceptance = Acceptance(right=FORCED_RIGHT)

    def draft(self, tokens: Sequence[int], max_tokens: int) -> Draft:
        """The tokens that must follow a sequence, at most so many."""
        forced = self._grammar.forced(tokens)[: max(0, min(max_tokens, MAX_DRAFT_TOKENS))]
        return Draft(forced, LONGEST_MATCH, acceptance=self._acceptance) if forced else NO_DRAFT


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
        """Put what is expected into the index. It may take long, and happens with the first draft otherwise."""
        if self._expected:
            expected, self._expected = self._expected, ()
            self._index([*self._tokens[: self._begins], *expected], 0)
            self._known.append(NO_TOKEN)
            self._indexed, self._inserted = self._begins, len(expected) + 1
            self._shared, self._followed_by = self._followed_by, {}

    def beside(self, tokens: Sequence[int]) -> "PromptLookup":
        """A look-up for another answer to the same prompt; the index of what is expected is made once for both.

        To be called before either has grown.
        """
        self.prepare()
        assert len(tokens) == len(self._tokens)
        found = PromptLookup(tokens, self._end_ids)
        found._known, found._shared = list(self._known), self._shared
        found._indexed, found._inserted = self._indexed, self._inserted
        return found

    def draft(self, max_tokens: int) -> Draft:
        """The tokens that followed the last ones before, at most so many and none that ends the text."""
        self.prepare()
        tokens, end = self._tokens, len(self._tokens)
        self._index(tokens, self._indexed)
        self._indexed = end
        for size in GRAMS:
            gram = tuple(tokens[-size:])
            source = self._followed_by.get(gram, self._shared.get(gram)) if size <= end else None
            if source is not None:
                tokens = self._copied(source, min(max_tokens, MAX_DRAFT_TOKENS))
                return Draft(tokens, self._match(source), acceptance=self.acceptance)
        return NO_DRAFT

    def _index(self, tokens: Sequence[int], first: int) -> None:
        """Put tokens from `first` on into the index."""
        for at in range(first, len(tokens)):
            for size in GRAMS:
                if size <= at:
                    self._followed_by[tuple(tokens[at - size : at])] = at + self._inserted
        self._known.extend(tokens[first:])

    def _copied(self, source: int, max_tokens: int) -> list[int]:
        """The tokens from position `source` on; beyond the end of what is known they repeat themselves."""
        period = len(self._known) - source
        found: list[int] = []
        for n in range(max_tokens):
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
