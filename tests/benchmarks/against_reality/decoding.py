"""Single tokens of one artifact, run in several ways."""

import statistics
import time
from collections.abc import Mapping

import numpy as np

from pi_runtime import Model
from pi_runtime.execution.kv_cache import KVCache


class Decoding:
    """One artifact, open in several ways by name, which share a cache of `positions` tokens."""

    def __init__(self, models: Mapping[str, Model], positions: int) -> None:
        self.models, self._positions = models, positions
        first = next(iter(models.values()))
        self._vocabulary = first.manifest.decoder.vocab_size
        self._cache: KVCache = first.new_cache()
        self._rng = np.random.default_rng(0)
        for model in models.values():
            model.warm_up()
        # As normed states leave keys and values: a prompt would take longer than everything else.
        self._cache.reserve(positions)
        self._cache.append(np.array(self._ids(positions), np.int64), select=False)
        for page in self._cache.page_values():
            for layer in page:
                layer[:] = self._rng.standard_normal(layer.shape, np.float32)

    def token(self, name: str, token: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits, and rows read by layer, of one token at the end of the context."""
        self._cache.truncate(self._positions)
        return self.models[name].decode(token, self._cache)

    def seconds(self, name: str, tokens: int) -> float:
        """Median of so many single tokens; one before them, whose time does not count, finds the threads asleep."""
        found = []
        for token in self._ids(tokens + 1):
            began = time.perf_counter()
            self.token(name, token)
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def close(self) -> None:
        for model in self.models.values():
            model.close()

    def _ids(self, tokens: int) -> list[int]:
        return self._rng.integers(0, self._vocabulary, tokens).tolist()
