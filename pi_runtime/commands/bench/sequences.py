"""Sequences to decode in batches: they begin at tokens of their own and go on as the model samples them.

So a batch fires what texts fire, and needs no text.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from pi_runtime.engine.model import Model
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.kv_cache import KVCache, pages_of
from pi_runtime.sequence.sampling import Sampler, Sampling

LEAD, STEPS = 8, 4
"""Tokens that a sequence holds before it is timed, and steps that one repetition times."""


class Sequences:
    """Sequences that grow in number, each with `LEAD` tokens held and `STEPS` more that are its next ones."""

    most = math.inf
    """Most sequences that are decoded together."""

    def __init__(self, model: Model) -> None:
        self.mode, self._model = model.mode, model
        self._pool = model.executor.new_pool()
        self._caches: list[KVCache] = []
        self._tokens: list[list[int]] = []

    @property
    def held(self) -> int:
        """Sequences that are there."""
        return len(self._caches)

    def bytes_for(self, batch: int) -> int:
        """Bytes of keys and values that so many sequences take."""
        return batch * pages_of(LEAD + STEPS) * self._pool.page_nbytes

    def grow(self, batch: int) -> None:
        """See to it that there are `batch` sequences at least."""
        if new := range(self.held, batch):
            self._sample(new)

    def _sample(self, new: range) -> None:
        """Begin sequences at random tokens and let the model go on."""
        vocabulary, prefix = self._model.manifest.decoder.vocab_size, self._model.manifest.text.prefix_ids
        samplers = [Sampler(Sampling(temperature=1.0, seed=n), vocabulary) for n in new]
        self._tokens += [[*prefix, int(np.random.default_rng(n).integers(vocabulary))][-LEAD:] for n in new]
        self._caches += [self._model.executor.new_cache(self._pool) for _ in new]
        caches, at = self._caches[new.start :], 0
        while at + 1 < LEAD + STEPS:
            results = self._model.executor.step(self._steps(new, caches, at))
            at += 1
            for n, sampler, result in zip(new, samplers, results, strict=True):
                if at == len(self._tokens[n]):
                    self._tokens[n].append(sampler(result.logits_TV[0], self._tokens[n]))
        self._rewind(new)

    def _steps(self, numbers: Sequence[int], caches: Sequence[KVCache], at: int) -> list[SequenceStep]:
        token_1 = (np.array([self._tokens[n][at]], np.int64) for n in numbers)
        return [SequenceStep(cache=c, tokens=t, select=True) for c, t in zip(caches, token_1, strict=True)]

    def _rewind(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            self._caches[n].truncate(LEAD)

    def seconds_a_step(self, batch: int) -> float:
        """Run the first `batch` sequences through their steps; returns the mean time of one."""
        numbers, caches = range(batch), self._caches[:batch]
        steps = [self._steps(numbers, caches, LEAD + n) for n in range(STEPS)]
        began = time.perf_counter()
        for step in steps:
            self._model.executor.step(step)
        taken = time.perf_counter() - began
        self._rewind(numbers)
        return taken / STEPS

    def read_prompt(self, tokens: int) -> float:
        """Read a prompt of random tokens into an empty cache; returns the time."""
        executor, cache = self._model.executor, self._model.new_cache()
        token_T = np.random.default_rng(0).integers(0, self._model.manifest.decoder.vocab_size, tokens)
        began = time.perf_counter()
        for start in range(0, tokens, executor.block_tokens):
            block = token_T[start : start + executor.block_tokens]
            executor.step([SequenceStep(cache=cache, tokens=block, select=False)])
        return time.perf_counter() - began

    def close(self) -> None:
        """Let go of its sequences; the model is closed by whoever opened it."""
        self._caches.clear()
