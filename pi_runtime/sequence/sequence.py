"""A sequence: the tokens of a prompt and its answer, what becomes of logits, and how it ends.

Shape letters: T tokens of a step, V vocabulary, L layers.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import ContextError, PromptError, Setting, UsageError
from pi_runtime.sequence.drafts import NO_GUESS, Guess, PromptLookup
from pi_runtime.sequence.logprobs import TokenLogprobs, check_finite, check_logprobs, token_logprobs
from pi_runtime.sequence.sampler import Sampler
from pi_runtime.sequence.sampling import Sampling
from pi_runtime.sequence.stats import Stats
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.stop_strings import StopStrings
from pi_runtime.text.tokenizer import TextStream, Tokenizer

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Answer:
    """The state of one answer: its tokens, what becomes of logits, and how it ends.

    A single generation and an engine that serves many both use it, so both give the same text. Whoever runs it brings
    the tokens of `next_block` to the executor until none is left, then goes through `follow`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        context: int,
        vocab_size: int,
        end_ids: Sequence[int],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        expected: Sequence[int] = (),
        shown_tokens: Sequence[int] = (),
        selected: Sequence[bool] = (),
        stop_tokens: Sequence[int] = (),
    ) -> None:
        """`selected`: for the first tokens of the prompt whether they run with selection, as those of earlier answers
        in it do. `stop_tokens` end the answer, and become part of it."""
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(setting=Setting("max_tokens", max_tokens), expected="1 or more")
        if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
            most = "0 or more" if max_tokens is None else (f"0 to {max_tokens}, which ", Setting("max_tokens"), " says")
            raise UsageError(setting=Setting("min_tokens", min_tokens), expected=most)
        check_logprobs("logprobs", logprobs)
        if not prompt:
            raise PromptError(
                "the prompt is empty, and the model has no begin-of-text token to start from",
                remedy="give a prompt of at least one character",
            )
        if len(prompt) >= context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens",
                expected=f"fewer than the context of {context}",
                remedy=("shorten it, or raise ", Setting("context"), " if the model allows"),
            )
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        """Prompt and answer. The newest token has not run yet."""
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        # Compiled last: an answer that cannot be is refused sooner.
        self._grammar = None if grammar is None else tokenizer.grammars.start(grammar)
        self._sampler = Sampler(
            sampling or Sampling(),
            vocab_size,
            prompt_tokens=len(prompt),
            end_ids=end_ids,
            min_tokens=min_tokens,
            allowed=None if self._grammar is None else self._grammar.allowed,
        )
        self._stop = StopStrings(stop)
        self._end_ids, self._tokenizer = frozenset(end_ids), tokenizer
        self._limit, self._least, self._context = max_tokens, min_tokens, context
        self._top, self._logprobs = logprobs, list[TokenLogprobs]()
        self._began = time.perf_counter()
        self._first_token_s = self._prefill_s = self._decode_s = 0.0
        self._rows_2 = np.zeros(2, np.int64)
        self._steps = self.guessed_tokens = self.accepted_tokens = 0
        # What cannot come any more is of no use.
        self.lookup = PromptLookup(self.tokens, self._end_ids, expected[: self.most_positions + 1 - len(prompt)])
        self._stop_tokens, self._shown_tokens = frozenset(stop_tokens), frozenset(shown_tokens)
        self.selected = [*selected, *[False] * (len(prompt) - len(selected))]
        """For each token whether it runs with selection."""

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]

    @property
    def reusable(self) -> int:
        """How many first tokens need not run if their keys and values are there: the last one's logits are wanted."""
        return len(self.tokens) - 1

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the generated tokens, if they are kept."""
        return self._logprobs[: len(self.tokens) - self.prompt_tokens]  # not the end's, which is no token of the text

    @property
    def ending(self) -> TokenLogprobs | None:
        """The log-probability of the token that ended the text and is no part of it, if they are kept."""
        count = len(self.tokens) - self.prompt_tokens
        return self._logprobs[count] if len(self._logprobs) > count else None

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen, with the seed."""
        return self._sampler.sampling

    @property
    def seed(self) -> int | None:
        """The seed of its draws; None where it is greedy."""
        return None if self.sampling.temperature == 0 else self.sampling.seed

    @property
    def most_positions(self) -> int:
        """Most positions that its cache will hold: the last token never runs."""
        return self._context if self._limit is None else min(self.prompt_tokens + self._limit - 1, self._context)

    def next_block(self, held: int, most: int) -> tuple[Ints, bool]:
        """The tokens to run after the first `held` ones, at most so many; and whether they run with selection.

        A block has one kind of token: those of the prompt run dense, those of answers with selection.
        """
        kinds = self.selected[held : held + most]
        count = next((n for n, select in enumerate(kinds) if select != kinds[0]), len(kinds))
        return np.array(self.tokens[held : held + count], np.int64), kinds[0]

    def guess(self, held: int) -> Guess:
        """Tokens that may follow the newest one, as many as may still run; none unless it alone is left to run."""
        if held < self.prompt_tokens or held + 1 != len(self.tokens):
            return NO_GUESS
        return self.lookup.guess(self.most_positions - len(self.tokens))

    def follow(
        self,
        logits_TV: Floats,
        rows_L2: Ints | None,
        guess: Guess,
        ran: int,
        began: float,
    ) -> Iterator[str]:
        """Draw and take the next tokens, as long as what ran after the newest token was guessed right.

        `ran`: how many tokens of the guess ran; there are logits for each of them. `began`: when the step did.
        Yields the text that each token completes. Raises PiError for logits without meaning.
        """
        if rows_L2 is not None:
            self._rows_2 += rows_L2.sum(0)
            self._steps += 1
        self.guessed_tokens += ran
        drawn: list[int] = []
        for n, logits_V in enumerate(logits_TV):
            token = self._choose(logits_V)
            drawn.append(token)
            is_right = n < ran and token == guess.tokens[n]
            self.accepted_tokens += is_right
            self.spend(began, time.perf_counter())
            piece = self.take(token)
            if not is_right or self.finish_reason is not None:
                self.lookup.count(guess, drawn)
                yield piece
                return
            yield piece
            began = time.perf_counter()

    def _choose(self, logits_V: Floats) -> int:
        """Choose the next token from its logits, and keep its log-probability if that was asked for."""
        token = self._sampler(logits_V, self.tokens)
        if self._top is not None:
            self._logprobs.append(token_logprobs(logits_V, token, self._top))
        return token

    @cached_property
    def _text(self) -> TextStream:
        """What makes text of the tokens. Where nothing came after an earlier answer, its text goes on."""
        text, prompt = TextStream(self._tokenizer, self._shown_tokens), self.prompt_tokens
        written = next((n for n in range(prompt) if not self.selected[prompt - 1 - n]), prompt)
        for token in self.tokens[prompt - written : prompt]:
            text.push(token)
        return text

    def take(self, token: int) -> str:
        """Continue the answer by a token; returns the text that can be shown now. The answer may end with it."""
        if token in self._end_ids:
            return self._end("end")
        self.tokens.append(token)
        self.selected.append(True)
        piece, stopped = self._text.push(token), False
        may_stop = len(self.tokens) - self.prompt_tokens > self._least
        if may_stop:
            piece, stopped = self._stop.push(piece)
        if stopped:
            self.finish_reason = "stop"
            return piece
        if may_stop and token in self._stop_tokens:
            return piece + self._end("stop")
        if self._grammar is not None and self._grammar.is_complete(self.token_ids):
            return piece + self._end("end")
        if self._limit is not None and len(self.tokens) - self.prompt_tokens >= self._limit:
            return piece + self._end("length")
        return piece + self._end("context") if len(self.tokens) > self._context else piece

    def _end(self, reason: str) -> str:
        """End the text; returns what was held back."""
        self.finish_reason = reason
        piece, stopped = self._stop.push(self._text.finish())
        return piece if stopped else piece + self._stop.finish()

    def spend(self, began: float, ended: float) -> None:
        """Count the time of a step: up to the first token it is prefill, then decoding."""
        if len(self.tokens) > self.prompt_tokens:
            self._decode_s += ended - began
        else:
            self._prefill_s += ended - began
            self._first_token_s = ended - self._began

    def stats(self, neurons: int) -> Stats:
        """The figures up to now, for a model with so many neurons."""
        ran = self._steps * neurons
        return Stats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=len(self.tokens) - self.prompt_tokens,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            first_token_s=self._first_token_s,
            rows_read_share=float(self._rows_2[0]) / ran if ran else None,
            active_share=float(self._rows_2[1]) / ran if ran else None,
            guessed_tokens=self.guessed_tokens,
            accepted_tokens=self.accepted_tokens,
        )


class Scoring:
    """The log-probabilities of a sequence's own tokens from `first` on, with selection at every position.

    An engine runs it beside answers, and asks of it what it asks of an `Answer`. The last token never runs.
    """

    def __init__(self, ids: Sequence[int], *, context: int, first: int, top: int) -> None:
        check_logprobs("prompt_logprobs", top)
        if len(ids) > context:
            raise ContextError(f"{len(ids)} tokens", expected=f"at most the context of {context}")
        if first < 1:
            raise UsageError(f"log-probabilities from token {first} on", expected="1 or more: nothing precedes token 0")
        self.tokens, self._ids, self._first, self._top = list(ids[:-1]), list(ids), first, top
        self.prompt_tokens, self.most_positions = len(self.tokens), len(self.tokens)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.cached_tokens = 0

    @property
    def complete(self) -> bool:
        """Whether all log-probabilities are there."""
        return self._first + len(self.logprobs) >= len(self._ids)

    @property
    def reusable(self) -> int:
        """How many first tokens need not run if their keys and values are there: the next one's logits are wanted."""
        return self._first + len(self.logprobs) - 1

    @property
    def selected(self) -> list[bool]:
        """For each token whether it runs with selection."""
        return [True] * len(self.tokens)

    def next_block(self, held: int, most: int) -> tuple[Ints, bool]:
        """The tokens to run after the first `held` ones, at most so many; and that they run with selection."""
        return np.array(self.tokens[held : held + most], np.int64), True

    def take(self, logits_TV: Floats, held: int) -> None:
        """Take the logits of a block that ended with the first `held` tokens.

        Raises PiError for logits without meaning.
        """
        for n, logits in enumerate(logits_TV, held - len(logits_TV) + 1):
            if n == self._first + len(self.logprobs):
                check_finite(logits)
                self.logprobs.append(token_logprobs(logits, self._ids[n], self._top))
