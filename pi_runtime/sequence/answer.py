"""A sequence that is continued: how its next tokens are drawn from logits, what text they make, and how it ends.

Shape letters: T tokens of a step, V vocabulary, L layers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Unpack

import numpy as np

from pi_runtime.errors import ContextError, PromptError, Setting, UsageError
from pi_runtime.sequence.drafts import NO_DRAFT, Draft, ForcedText, PromptLookup
from pi_runtime.sequence.head_draft import HeadDraft
from pi_runtime.sequence.sampling import Sampler, Sampling, TokenLogprobs, check_logprobs, token_logprobs
from pi_runtime.sequence.sequence import Floats, Ints, Rank, ReadSequence, TokenSequence
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.sequence.stats import DraftFigures, Stats
from pi_runtime.text.stop_strings import StopStrings
from pi_runtime.text.tokenizer import TextStream, Tokenizer


class AnswerSequence(TokenSequence):
    """A prompt that is continued until the text ends."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        context: int,
        vocab_size: int,
        end_ids: Sequence[int],
        head: Callable[..., HeadDraft] | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> None:
        """`head`: makes the drafts of a guess head."""
        _check(prompt, context, settings)
        super().__init__(prompt)
        self._max_tokens, self._min_tokens = settings.get("max_tokens"), settings.get("min_tokens", 0)
        self._context, self._top_logprobs = context, settings.get("logprobs")
        # Compiled last: an answer that cannot be is refused sooner.
        grammar = settings.get("grammar")
        self._grammar = None if grammar is None else tokenizer.grammars.start(grammar, len(prompt))
        self._sampler = Sampler(
            settings.get("sampling") or Sampling(),
            vocab_size,
            prompt_tokens=len(prompt),
            end_ids=end_ids,
            min_tokens=self._min_tokens,
            allowed=None if self._grammar is None else self._grammar.allowed,
        )
        self._tokenizer, self._shown_tokens = tokenizer, frozenset(settings.get("shown_tokens", ()))
        stop = settings.get("stop", ())
        special = tokenizer.special_ids.items() if stop else ()
        self._hidden = {token: name for name, token in special if token not in self._shown_tokens}
        self._stop = StopStrings(stop, self._hidden.values())
        self._end_ids = self.ends_of_messages = frozenset(end_ids)
        self.may_go_on = True
        """Whether its text may come back in a prompt: of several answers to one prompt that is one at most."""
        self._logprobs: list[TokenLogprobs] = []
        self._began = time.perf_counter()
        self._first_token_s = self._prefill_s = self._decode_s = 0.0
        self._rows_2 = np.zeros(2, np.int64)
        self._steps, self._drafts = 0, DraftFigures()
        # What cannot come any more is of no use.
        expected = settings.get("expected", ())[: self.max_positions + 1 - len(prompt)]
        self.lookup = PromptLookup(self.tokens, self._end_ids, expected)
        self._head = None if head is None else head(self.tokens, self._sampler, self._end_ids)
        self._step_states: tuple[int, Floats | None] = 0, None
        self._forced = None if self._grammar is None else ForcedText(self._grammar)

    @property
    def prompt(self) -> list[int]:
        """The tokens that it continues."""
        return self.tokens[: self.prompt_tokens]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether its next token is drawn after one more token has run."""
        return self.num_pending == 1

    @property
    def complete(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    @property
    def num_reusable(self) -> int:
        """How many first tokens need not run if their keys and values are stored: the last one's logits are wanted."""
        return len(self.tokens) - 1

    @property
    def max_positions(self) -> int:
        """Most positions that its cache will hold: the last token never runs."""
        longest = self._context if self._max_tokens is None else self.prompt_tokens + self._max_tokens - 1
        return min(longest, self._context)

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
    def stop_string(self) -> str | None:
        """The stop string that ended it; None where something else did, or nothing yet."""
        return self._stop.met if self.finish_reason == "stop" else None

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen, with the seed."""
        return self._sampler.sampling

    @property
    def seed(self) -> int | None:
        """The seed of its draws; None where it is greedy."""
        return None if self.sampling.temperature == 0 else self.sampling.seed

    @property
    def as_prompt(self) -> ReadSequence | None:
        """What reads its tokens as a later prompt has them, dense; None where that gains nothing."""
        if self.num_computed <= self.prompt_tokens or not self.may_go_on:
            return None
        again = ReadSequence(self.tokens[: self.max_positions], Rank.AGAIN)
        again.origin, again.outcome = self.origin, self.outcome
        return again

    @property
    def states(self) -> tuple[int, ...]:
        """The layers whose inputs the guess head reads which drafts its tokens."""
        return () if self._head is None else self._head.states

    def take_states(self, first: int, states_TC: Floats | None) -> None:
        """Keep what a step computed of the tokens from position `first` on, until it is known which of them stay."""
        self._step_states = first, states_TC

    def drafts(self) -> list[Draft]:
        """What may follow the newest token, as many tokens as may still run; nothing unless it alone is left to run."""
        if self.num_computed < self.prompt_tokens or not self.is_decoding:
            return [NO_DRAFT]
        max_tokens = self.max_positions - len(self.tokens)
        forced = NO_DRAFT if self._forced is None else self._forced.draft(self.tokens, max_tokens)
        if forced.tokens:
            return [forced]
        found = [self.lookup.draft(max_tokens)]
        return found if self._head is None else [*found, self._head.draft(max_tokens)]

    def advance(self, logits_TV: Floats, rows_L2: Ints | None) -> Iterator[str]:
        """Count the tokens that have run, and draw the next ones if none is left to run."""
        self.num_computed += self.num_scheduled
        if self.num_pending:
            self._count_time()
        else:
            yield from self.draw(logits_TV, rows_L2)
        first, states_TC = self._step_states
        if self._head is not None and states_TC is not None:
            self._head.take(first, states_TC[: self.num_computed - first])

    def draw(self, logits_TV: Floats, rows_L2: Ints | None) -> Iterator[str]:
        """Draw and take the next token, and one more after each token of the draft that was right.

        Yields the text that each token completes. Raises PiError for logits without meaning.
        """
        draft = self.drafted
        if rows_L2 is not None:
            self._rows_2 += rows_L2.sum(0)
            self._steps += 1
        spent_s = time.perf_counter() - self._step_began if draft.num_run else 0.0
        drawn: list[int] = []
        for n, logits_V in enumerate(logits_TV):
            token = self._choose(logits_V)
            drawn.append(token)
            is_right = n < draft.num_run and token == draft.tokens[n]
            self.num_computed += is_right
            self._count_time()
            text = self._take(token)
            if not is_right or self.finish_reason is not None:
                draft.count(drawn)
                won_s = 0.0 if draft.plain_s is None else len(drawn) * draft.plain_s - spent_s
                self._drafts += draft.figures(n + is_right, won_s if draft.num_run else 0.0)
                yield text
                return
            yield text
            self.start_step()

    def _choose(self, logits_V: Floats) -> int:
        """Choose the next token from its logits, and keep its log-probability if that was asked for."""
        token = self._sampler(logits_V, self.tokens)
        if self._top_logprobs is not None:
            self._logprobs.append(token_logprobs(logits_V, token, self._top_logprobs))
        return token

    @cached_property
    def _text(self) -> TextStream:
        """What makes text of the tokens: that of the prompt goes on."""
        return TextStream(self._tokenizer, self._shown_tokens, after=self.prompt)

    def _take(self, token: int) -> str:
        """Continue the text by a token; returns what can be shown now. The text may end with it."""
        if token in self._end_ids:
            return self._end("end")
        self.tokens.append(token)
        self.selected.append(True)
        text, stopped = self._text.push(token), False
        may_stop = len(self.tokens) - self.prompt_tokens > self._min_tokens
        if may_stop:
            text, stopped = self._stop.push(text, self._hidden.get(token))
        if stopped:
            self.finish_reason = "stop"
            return text
        if self._grammar is not None and self._grammar.is_complete(self.tokens):
            return text + self._end("end")
        if self._max_tokens is not None and len(self.tokens) - self.prompt_tokens >= self._max_tokens:
            return text + self._end("length")
        return text + self._end("context") if len(self.tokens) > self._context else text

    def _end(self, reason: str) -> str:
        """End the text; returns what was held back."""
        self.finish_reason = reason
        text, stopped = self._stop.push(self._text.finish())
        return text if stopped else text + self._stop.finish()

    def _count_time(self) -> None:
        """Count the time since the step began: up to the first token it is prefill, then decoding."""
        ended = time.perf_counter()
        if len(self.tokens) > self.prompt_tokens:
            self._decode_s += ended - self._step_began
        else:
            self._prefill_s += ended - self._step_began
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
            **vars(self._drafts),
        )


def _check(prompt: Sequence[int], context: int, settings: AnswerSettings) -> None:
    """Raise PiError for settings that are impossible, and for a prompt that cannot be continued."""
    max_tokens, min_tokens = settings.get("max_tokens"), settings.get("min_tokens", 0)
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(setting=Setting("max_tokens", max_tokens), expected="1 or more")
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        most = "0 or more" if max_tokens is None else (f"0 to {max_tokens}, which ", Setting("max_tokens"), " says")
        raise UsageError(setting=Setting("min_tokens", min_tokens), expected=most)
    check_logprobs("logprobs", settings.get("logprobs"))
    check_prompt(prompt, context)


def check_prompt(prompt: Sequence[int], context: int) -> None:
    """Raise PromptError for a prompt that is empty, ContextError for one that leaves no room for an answer."""
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
