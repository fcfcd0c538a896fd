"""The compiled forward pass against the NumPy reference: families, formats, rungs, and token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.kernels import reference

ODD = {"d_model": 44, "n_heads": 3, "n_kv_heads": 3, "head_dim": 10, "d_ff": 83, "n_layers": 3, "context_length": 160}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-odd": {**ODD, "n_kv_heads": 1},
    "llama-silu-tied-biases": {
        "activation": "silu",
        "tied_head": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    },
    "opt": {"family": "opt"},
    "opt-odd": {"family": "opt", **ODD},
    "opt-no-bias": {"family": "opt", "qkv_bias": False, "out_bias": False, "ffn_bias": False},
}


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_equal_the_reference_and_token_by_token_equals_the_block(name: str, fmt: str, tmp_path: Path) -> None:
    decoder = small_decoder(**DECODERS[name])
    ranks = [5] * decoder.n_layers
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=ranks)
    ids = np.random.default_rng(3).integers(0, decoder.vocab_size, min(decoder.context_length, 131))
    for mode in ("dense", "gate", "predicted"):
        with Artifact.open(path) as artifact:
            wanted = reference.forward(artifact, ids, mode)
        with load(path, mode=mode) as model:
            block = model.logits(ids)
            cache = model.new_cache()
            steps = [
                model._executor.run(ids[t : t + 1], cache, select=True, every=False)[0].copy() for t in range(len(ids))
            ]
        assert relative_error(block, wanted) < 1e-5, mode
        assert relative_error(np.stack(steps), wanted) < 1e-5, mode
