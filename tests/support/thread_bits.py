"""Digests of what operators and models compute, one after the other at several numbers of threads.

`thread_bits.py FORMAT ARTIFACT:… THREADS…` prints {name: [digest, …]} as JSON. A process of its own, because numba
starts its threads once: NUMBA_NUM_THREADS is the largest of THREADS.
"""

import hashlib
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import numba
import numpy as np

from pi_runtime import load
from pi_runtime.artifact.footprint import ATTENTION_TOKENS, CHUNKS, POSITIONS, input_nbytes
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.kernels.data.matrix_view import F16
from pi_runtime.kernels.ffn.network import add_neurons
from pi_runtime.kernels.ops.attention import LayerCache, attend, store_kv
from pi_runtime.kernels.ops.linear import linear
from support.steps import step
from support.stored import Layer, StoredMatrix, ffn_layer, store
from support.synthetic import small_decoder

FOUND: dict[str, list[str]] = defaultdict(list)


def note(what: str, *arrays: np.ndarray) -> None:
    FOUND[what].append(hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest())


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def operators(w: StoredMatrix, layer: Layer) -> None:
    rows, columns = w.values.shape
    for tokens in (1, 7, 64):
        room, y_TN = np.empty(tokens * input_nbytes(columns), np.uint8), np.empty((tokens, rows), np.float32)
        linear(w.view, rows, 0, random(tokens, columns), room.ctypes.data, y_TN)
        note(f"linear {tokens}", y_TN)
        qkv_TQ, pages = random(tokens, 8 * 20), np.zeros((4, 2, 2, POSITIONS, 20), np.float16)
        table = np.array([page.ctypes.data for page in pages])
        run_R4 = np.array([[0, tokens, 30, table.ctypes.data]])
        store_kv(cache := LayerCache(F16, F16, 0, 2, 20, 0), qkv_TQ, run_R4)
        scratch_CX = np.empty((CHUNKS, ATTENTION_TOKENS * 2 * (20 + POSITIONS + 4)), np.float32)
        unpacked_CBE = np.empty((CHUNKS, 0, 20), np.float32)
        attend(cache, qkv_TQ, run_R4, unpacked_CBE, scratch_CX, mixed_TQ := np.empty((tokens, 80), np.float32))
        note(f"attend {tokens}", mixed_TQ)
    width = layer.decoder.d_model
    low, high = 5, layer.decoder.d_ff - 10
    for rung in RUNGS:
        for tokens in (1, 7, 40):
            x_TD, y_TD = random(tokens, width), np.zeros((tokens, width), np.float32)
            tally_T3 = np.zeros((tokens, 3), np.int64)
            add_neurons(layer.ffn, layer.batch(rung, low, high, tokens), x_TD, tally_T3, y_TD)
            assert np.all(tally_T3[:, 1:] > 0)
            note(f"ffn {rung} {tokens}", y_TD, tally_T3)


def models(path: str, threads: int) -> None:
    name = Path(path).stem
    for mode in ("dense", "gate", "predicted"):
        with load(path, mode=mode, threads=threads) as model:
            for tokens in (1, 7, 64):
                cache = model.new_cache()
                prompt = step(model.executor, np.arange(tokens) * 37 % 257, cache, select=False)
                note(f"{name} {mode} prefill {tokens}", prompt.logits_TV)
                steps = [step(model.executor, [t], cache, select=True) for t in (5, 6, 7)]
                note(f"{name} {mode} decode {tokens}", *(s.logits_TV for s in steps))
            note(f"{name} {mode} logits", model.logits(np.arange(90) * 11 % 257))


def main(fmt: str, paths: str, *threads: str) -> None:
    w = store(fmt, np.random.default_rng(0).standard_normal((333, 701), np.float32))
    layer = ffn_layer(small_decoder(d_model=133, d_ff=1500), fmt, 9, 0)
    for n in map(int, threads):
        numba.set_num_threads(n)
        operators(w, layer)
        for path in paths.split(os.pathsep):
            models(path, n)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main(*sys.argv[1:])
