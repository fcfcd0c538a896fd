"""What decoding a token takes: its time, and the bytes that must be read for it."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_runtime import Model
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import BY_NEURON, FfnBytes
from pi_runtime.execution.kv_cache import KVCache


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Single tokens, one after the other."""

    seconds: tuple[float, ...]
    read: float
    """Share of the rows of `first` that were read."""
    density: float
    """Share of the neurons whose `rest` was read; of `down` alone it may be less, see `_added`."""
    bytes_per_token: float
    """Without keys and values."""


def decode(model: Model, cache: KVCache, tokens: Sequence[int]) -> Decoding:
    """Decode tokens into a cache. The first one wakes the threads, and is not counted."""
    seconds, rows_2 = [], np.zeros(2)
    for n, token in enumerate(tokens):
        began = time.perf_counter()
        _, rows_L2 = model.decode(token, cache)
        if n:
            seconds.append(time.perf_counter() - began)
            rows_2 += rows_L2.sum(0)
    d = model.manifest.decoder
    read, kept = (rows_2 / (len(seconds) * d.n_layers * d.d_ff)).tolist()
    added = None
    if model.mode == "dense":
        read = kept = 1.0
        by_neuron = model.manifest.ffn_layout == BY_NEURON
        added = _added(model, cache, tokens[0]) if by_neuron else None
    nbytes = bytes_per_token(model.manifest, read, kept, added, with_predictor=model.mode == "predicted")
    return Decoding(seconds=tuple(seconds), read=read, density=kept, bytes_per_token=nbytes)


def _added(model: Model, cache: KVCache, token: int) -> float:
    """Share of the rows of `down` that a token reads when all neurons are computed: those whose factor is 0 are not.

    Where most of a chunk's factors are not 0, all its rows are read.
    """
    cache.truncate(cache.length - 1)
    _, counts_L3 = model.examine([*cache.tokens, token], cache=cache)
    fired = float(counts_L3[:, 0].mean() / model.manifest.decoder.d_ff)
    return fired if fired < 0.5 else 1.0


def bytes_per_token(
    m: Manifest, read: float = 1.0, kept: float = 1.0, added: float | None = None, *, with_predictor: bool = False
) -> float:
    """Attention, norms, head; the shares of `first`, `rest` and its `down` that are read; the predictors.

    `added` is `down`'s share where that is not `kept`.
    """
    d, neuron = m.decoder, FfnBytes.of(m.decoder, m.formats)
    total = d.n_layers * d.d_ff * (read * neuron.first + kept * neuron.rest)
    if added is not None:
        total -= d.n_layers * d.d_ff * (kept - added) * neuron.first  # a row of `down` is as long
    for name, entry in m.arrays.items():
        if not re.search(r"^embedding|^positions|/predictor/|/ffn/(first|rest|up|down|order|counts)(_scales)?$", name):
            total += entry.nbytes
    return total + sum(neuron.predictor(layer.rank or 0) for layer in m.layers) * with_predictor
