"""Generation: prompt in, text out, one token at a time.

Shape letters: T tokens of a step, V vocabulary, L layers.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pi_runtime.errors import PromptError
from pi_runtime.execution.executor import Executor, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sampling import Sampler
from pi_runtime.text.stop_strings import StopStrings
from pi_runtime.text.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Seconds and tokens of one generation; rates are None where nothing was timed."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the cache already held."""
    generated_tokens: int
    prefill_s: float
    decode_s: float
    first_token_s: float
    """Time from the call to the first token."""
    rows_read_share: float | None
    """Rows of `first` read ÷ neurons, over the decoded tokens; None where no token was decoded."""
    active_share: float | None
    """Neurons for which `rest` was read ÷ neurons."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        ran = self.prompt_tokens - self.cached_tokens
        return ran / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first, which comes from prefill."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 and self.decode_s else None


class Generation(Iterator[str]):
    """An iterator over pieces of generated text. Joined, they are the whole text; no piece splits a character.

    `finish_reason` is None while it runs, then `end` (the model ended its text), `stop` (a stop string),
    `length` (`max_tokens`) or `context` (no position left).
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        cache: KVCache,
        prompt: Sequence[int],
        *,
        end_ids: Sequence[int],
        sampler: Sampler,
        stop: Sequence[str],
        max_tokens: int | None,
    ) -> None:
        if not prompt:
            raise PromptError("the prompt is empty, and the model has no begin-of-text token to start from")
        if len(prompt) >= cache.context:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens",
                expected=f"fewer than the context of {cache.context}",
                remedy="shorten it, or raise --ctx-size if the model allows",
            )
        self.finish_reason: str | None = None
        self.token_ids: list[int] = []
        self._executor, self._cache, self._prompt = executor, cache, list(prompt)
        self._sampler, self._stop = sampler, StopStrings(stop)
        self._end_ids, self._text = frozenset(end_ids), TextStream(tokenizer)
        self._seen = list(prompt)
        self._limit = max_tokens
        self._began = time.perf_counter()
        self._cached = 0
        self._first = self._prefill_s = self._decode_s = 0.0
        self._rows = np.zeros(2, np.int64)
        self._steps = 0
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def stats(self) -> Stats:
        """The figures up to now."""
        neurons = self._steps * self._executor.neurons
        return Stats(
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached,
            generated_tokens=len(self.token_ids),
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            first_token_s=self._first,
            rows_read_share=float(self._rows[0]) / neurons if neurons else None,
            active_share=float(self._rows[1]) / neurons if neurons else None,
        )

    def _run(self) -> Iterator[str]:
        token = self._prefill()
        while True:
            if token in self._end_ids:
                self.finish_reason = "end"
                break
            self.token_ids.append(token)
            self._seen.append(token)
            piece, stopped = self._stop.push(self._text.push(token))
            if piece:
                yield piece
            if stopped:
                self.finish_reason = "stop"
                return
            if self._limit is not None and len(self.token_ids) >= self._limit:
                self.finish_reason = "length"
                break
            if self._cache.room == 0:
                self.finish_reason = "context"
                break
            token = self._step(token)
        piece, stopped = self._stop.push(self._text.finish())
        if tail := piece if stopped else piece + self._stop.finish():
            yield tail

    def _prefill(self) -> int:
        began = time.perf_counter()
        self._cached = self._cache.keep_common_prefix(self._prompt)
        step = self._executor.block_tokens
        for start in range(self._cached, len(self._prompt), step):
            block = np.array(self._prompt[start : start + step], np.int64)
            found = self._executor.step([SequenceStep(cache=self._cache, tokens=block, select=False)])[0]
        token = self._sampler(found.logits_TV[0], self._prompt)
        now = time.perf_counter()
        self._first, self._prefill_s = now - self._began, now - began
        return token

    def _step(self, token: int) -> int:
        began = time.perf_counter()
        step = SequenceStep(cache=self._cache, tokens=np.array([token], np.int64), select=True)
        found = self._executor.step([step])[0]
        assert found.rows_L2 is not None
        self._rows += found.rows_L2.sum(0)
        self._steps += 1
        token = self._sampler(found.logits_TV[0], self._seen)
        self._decode_s += time.perf_counter() - began
        return token
