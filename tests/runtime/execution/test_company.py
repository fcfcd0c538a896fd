"""A sequence gets the same bits alone and in any company, however its prompt is cut, on any number of threads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.stored import ROW_FORMATS
from support.synthetic import FACTS, random_artifact, small_decoder

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.execution.host_executor import HostExecutor, in_memory
from pi_runtime.execution.kv_cache import KVCache

SHAPES = {
    "plain": ({}, "predicted", 3),
    "experts": ({"n_experts": 4, "experts_per_token": 2, "d_ff": 70}, "predicted", 3),
    "wide": ({"d_ff": 700, "d_model": 288, "n_heads": 4, "head_dim": 72, "activation": "drelu"}, "predicted", 9),
    "shared heads": ({"n_kv_heads": 1, "activation": "silu"}, "threshold", None),
}
FURTHER = {name: (fields, "predicted", 3) for name, fields in FACTS.items()}
_WHOLE = {"d_ff": 700, "d_model": 288, "activation": "silu", "ffn_bias": True}
WHOLE = {"whole matrices": (_WHOLE, "dense", None), "mixed": (_WHOLE, "threshold", None)}
LAYOUTS = {"whole matrices": "matrices", "mixed": "mixed"}
ANSWER = (5, 9, 11)


CASES = [
    *((fmt, shape, "auto") for fmt in ROW_FORMATS for shape in SHAPES),
    *(("f16", shape, cache) for cache in ("q8", "q4") for shape in SHAPES),
    ("f32", "plain", "f16"),
    *(("f16", shape, "auto") for shape in FURTHER),
    *((fmt, shape, "auto") for fmt in ("f16", "q8", "q4_1") for shape in WHOLE),
]


@pytest.fixture(params=CASES, ids=" ".join)
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostExecutor]:
    fmt, shape, cache = request.param
    fields, rung, rank = (SHAPES | FURTHER | WHOLE)[shape]
    decoder = small_decoder(context_length=128, **fields)
    layers = (
        Layer(rung=rung, rank=rank, threshold=0.2 if rung == "threshold" else 0.0),
        *[Layer(rung="dense" if decoder.activation == "silu" else "gate")] * (decoder.n_layers - 1),
    )
    ranks = [rank, *[None] * (decoder.n_layers - 1)]
    layout = {"ffn_layout": LAYOUTS[shape]} if shape in WHOLE else {}
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=ranks, layers=layers, **layout)
    found = in_memory(Artifact.open(path), "auto", 128, 2, cache)
    yield found
    found.close()


def prompt_step(cache: KVCache, ids: np.ndarray) -> SequenceStep:
    return SequenceStep(cache=cache, tokens=ids, select=False, logits="all")


def answer_step(cache: KVCache, token: int) -> SequenceStep:
    return SequenceStep(cache=cache, tokens=np.array([token]), select=True)


def alone(executor: HostExecutor, ids: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Logits of a prompt that is read in pieces, and of the answer's tokens."""
    cache = executor.new_cache()
    steps = [prompt_step(cache, piece) for piece in np.split(ids, cuts)]
    steps += [answer_step(cache, token) for token in ANSWER]
    return np.concatenate([executor.step([s])[0].logits_TV for s in steps])


def test_company_and_pieces_change_no_bit(executor: HostExecutor) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, rng.integers(2, 60)) for _ in range(6)]
    wanted = [alone(executor, ids, []) for ids in prompts]
    for ids, whole in zip(prompts, wanted, strict=True):
        cuts = sorted(set(rng.integers(1, len(ids), 3).tolist()))
        np.testing.assert_array_equal(alone(executor, ids, cuts), whole)
    caches, found = [executor.new_cache() for _ in prompts], [[] for _ in prompts]
    while any(cache.length < len(ids) + len(ANSWER) for cache, ids in zip(caches, prompts, strict=True)):
        steps, who = [], []
        for n in rng.permutation(len(prompts)):
            held, ids = caches[n].length, prompts[n]
            if rng.random() < 0.3 or held == len(ids) + len(ANSWER):
                continue
            if held < len(ids):
                steps.append(prompt_step(caches[n], ids[held : held + int(rng.integers(1, 13))]))
            else:
                steps.append(answer_step(caches[n], ANSWER[held - len(ids)]))
            who.append(n)
        executor.host.threads = int(rng.integers(1, 3))
        results: list[SequenceResult] = executor.step(steps)
        for n, result in zip(who, results, strict=True):
            found[n].append(result.logits_TV)
    for rows, whole in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.concatenate(rows), whole)
