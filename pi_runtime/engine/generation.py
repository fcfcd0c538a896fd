"""Generation: prompt in, text out, one token at a time.

Shape letters: T tokens of a step, V vocabulary, L layers.
"""

import time
from collections.abc import Iterator

import numpy as np

from pi_runtime.execution.executor import Executor, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.drafts import NO_GUESS, Guess
from pi_runtime.sequence.logprobs import TokenLogprobs
from pi_runtime.sequence.sequence import Answer
from pi_runtime.sequence.speculation import Speculation
from pi_runtime.sequence.stats import Stats


class Generation(Iterator[str]):
    """An iterator over pieces of generated text. Joined, they are the whole text; no piece splits a character.

    `finish_reason` is None while it runs, then `end` (the model ended its text), `stop` (a stop string),
    `length` (`max_tokens`) or `context` (no position left).
    """

    def __init__(self, executor: Executor, cache: KVCache, answer: Answer, speculation: Speculation) -> None:
        self._executor, self._cache, self._answer = executor, cache, answer
        self._speculation = speculation
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended; None while it runs."""
        return self._answer.finish_reason

    @property
    def token_ids(self) -> list[int]:
        """The tokens generated up to now."""
        return self._answer.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens generated up to now, if they were asked for."""
        return self._answer.logprobs

    @property
    def seed(self) -> int | None:
        """The seed of its draws: with it the same text comes again. None where it is greedy."""
        return self._answer.seed

    @property
    def stats(self) -> Stats:
        """The figures up to now."""
        return self._answer.stats(self._executor.neurons)

    def _run(self) -> Iterator[str]:
        answer, cache = self._answer, self._cache
        began = time.perf_counter()
        answer.cached_tokens = cache.keep_common_prefix(answer.tokens)
        while answer.finish_reason is None:
            guess, ran = self._guess()
            while True:
                tokens, select = answer.next_block(cache.length, self._executor.block_tokens)
                block = np.append(tokens, np.array(guess.tokens[:ran], np.int64))
                step = SequenceStep(cache=cache, tokens=block, select=select, logits="all" if ran else "last")
                result = self._executor.step([step])[0]
                if cache.length >= len(answer.tokens):
                    break
            if select:
                self._speculation.times.count(1, 1 + ran, time.perf_counter() - began)
            right = len(answer.tokens) - answer.accepted_tokens
            try:
                for piece in answer.follow(result.logits_TV, result.rows_L2, guess, ran, began):
                    if piece:
                        yield piece
            finally:
                cache.truncate(right + answer.accepted_tokens)
            began = time.perf_counter()

    def _guess(self) -> tuple[Guess, int]:
        """What may come next, and how many tokens of it are to run."""
        if not self._speculation.is_on:
            return NO_GUESS, 0
        guess = self._answer.guess(self._cache.length)
        (length,) = self._speculation.lengths([self._answer.lookup.acceptance.expected(guess)])
        return guess, length
