"""What is listed as kept is what a run keeps: neuron by neuron, for every kind of layer, and in any batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.steps import examined
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.commands.bench.kept_neurons import Flags, KeptNeurons
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels import reference

SHAPES: dict[str, tuple[dict[str, Any], tuple[Layer, ...]]] = {
    "predicted": ({"d_ff": 700}, (Layer(rung="predicted", rank=3), Layer(rung="gate"))),
    "experts": ({"n_experts": 4, "experts_per_token": 2}, (Layer(rung="predicted", rank=3), Layer(rung="gate"))),
    "threshold": ({"activation": "silu"}, (Layer(rung="threshold", threshold=0.2),) * 2),
    "drelu": ({"activation": "drelu"}, (Layer(rung="gate"),) * 2),
}


def steps(caches: list[KVCache], tokens: list[int], **how: Any) -> list[SequenceStep]:
    return [
        SequenceStep(cache=c, tokens=np.array([t], np.int64), select=True, **how)
        for c, t in zip(caches, tokens, strict=True)
    ]


def listed(path: Path, tokens: list[int], caches: list[KVCache]) -> Flags:
    kept = KeptNeurons(path, "auto", context=64, threads=2, cache_format="auto")
    try:
        return kept.step(steps(caches, tokens))
    finally:
        kept.close()


@pytest.mark.parametrize("fmt", ["f32", "q8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_are_listed_as_a_run_counts(shape: str, fmt: str, tmp_path: Path) -> None:
    fields, layers = SHAPES[shape]
    decoder, ranks = small_decoder(**fields), [layer.rank for layer in layers]
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=ranks, layers=layers, scale=3.0)
    tokens = list(range(70))  # more than one call takes
    with load(path) as model:
        caches = [model.new_cache() for _ in tokens]
        for first in ([n * 3 % 257 for n in tokens], tokens):  # the second token looks back at the first
            forks = [cache.fork() for cache in caches]
            found_LTN = listed(path, first, forks)
            wanted_TL = [
                examined(model.executor, path, model.mode, [token], cache)[1][:, 2].tolist()
                for token, cache in zip(first, caches, strict=True)
            ]
            assert found_LTN.sum(2).T.tolist() == wanted_TL
            assert [fork.tokens for fork in forks] == [cache.tokens for cache in caches]


def test_the_neurons_are_those_of_the_definition(tmp_path: Path) -> None:
    decoder = small_decoder(n_layers=1, d_ff=150)
    path = random_artifact(tmp_path / "a.pi", decoder, scale=3.0)
    tokens = [3, 200, 41]
    with load(path) as model:
        found_TF = listed(path, tokens, [model.new_cache() for _ in tokens])[0]
    with Artifact.open(path) as artifact:
        w = reference.ArtifactWeights(artifact, "layers/0/")
        for token, found_F in zip(tokens, found_TF, strict=True):
            x_1D = artifact.values("embedding")[[token]]
            x_1D = x_1D + reference.attention(decoder, w, reference.norm(decoder, w, "attention/norm", x_1D))
            score_F = (reference.norm(decoder, w, "ffn/norm", x_1D) @ artifact.values("layers/0/ffn/first").T)[0]
            sure_F = np.abs(score_F) > 1e-3
            assert 20 < found_F.sum() < 130
            assert np.array_equal(found_F[sure_F], score_F[sure_F] > 0)


def test_a_dense_layer_keeps_everything(tmp_path: Path) -> None:
    layers = (Layer(rung="dense"), Layer(rung="gate"))
    path = random_artifact(tmp_path / "a.pi", small_decoder(), layers=layers)
    with load(path) as model:
        dense_TF, gated_TF = listed(path, [1, 2], [model.new_cache() for _ in range(2)])
    assert dense_TF.all()
    assert not gated_TF.all()
