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
from pi_runtime.artifact.footprint import input_nbytes
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.kernels import ffn
from pi_runtime.kernels.ops.attention import attend, store_kv
from pi_runtime.kernels.ops.linear import add_matmul, linear
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
        add_matmul(w.view, random(tokens, rows), y_TD := random(tokens, columns))
        note(f"add_matmul {tokens}", y_TD)
        qkv_TQ, cache_2GSW = random(tokens, 9 * 20), np.zeros((2, 2, 100, 20), np.uint16)
        store_kv(qkv_TQ, 5, 20, 30, cache_2GSW)
        attend(qkv_TQ, 5, 30, cache_2GSW, mixed_TQ := np.empty((tokens, 100), np.float32))
        note(f"attend {tokens}", mixed_TQ)
    width, ws = layer.decoder.d_model, layer.ws
    low, high = 5, layer.decoder.d_ff - 10
    for rung in RUNGS:
        read, kept = ffn.step(layer.cfg, layer.on(rung), random(width), low, high, np.float32(1), False, ws)
        assert 0 < kept <= read
        note(f"step {rung}", ws.sums_CP[:, :width], ws.kept_F[:kept], ws.h_F[:kept])
        y_TD, x_TD = np.zeros((7, width), np.float32), random(7, width)
        ffn.block(layer.cfg, layer.on(rung), x_TD, low, high, True, ws, ws.tally_L3[0], y_TD)
        note(f"block {rung}", y_TD)


def models(path: str, threads: int) -> None:
    name = Path(path).stem
    for mode in ("dense", "gate", "predicted"):
        with load(path, mode=mode, threads=threads) as model:
            for tokens in (1, 7, 64):
                cache = model.new_cache()
                prompt = step(model._executor, np.arange(tokens) * 37 % 257, cache, select=False)
                note(f"{name} {mode} prefill {tokens}", prompt.logits_TV)
                steps = [step(model._executor, [t], cache, select=True) for t in (5, 6, 7)]
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
