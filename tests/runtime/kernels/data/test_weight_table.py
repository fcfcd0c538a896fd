"""Two weights that change places are seen: whichever two they are, the logits are no longer the definition's.

So code that takes one for the other fails the tests against the reference.
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.formats import Array
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Manifest
from pi_runtime.execution.host import CpuModel
from pi_runtime.kernels import reference
from pi_runtime.kernels.data import weight_table

LAYERS = Layer(rung="predicted", rank=4), Layer(rung="gate")
BIASES = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "head_bias": True}
DECODERS: dict[str, dict[str, Any]] = {
    "biases": {**BIASES, "norm": "layer", "qk_norm": True, "d_embedding": 40},
    "experts": {"n_experts": 3, "experts_per_token": 2, "d_ff": 30},
    "positions": {**BIASES, "family": "opt"},
}


class Padded:
    """An artifact's arrays, each with room behind it for the largest: kernels may take any of them for any other."""

    def __init__(self, artifact: Artifact) -> None:
        self.manifest: Manifest = artifact.manifest
        arrays = {name: artifact.array(name) for name in artifact.manifest.arrays}
        room = max(array.nbytes for array in arrays.values())
        self._memory = {name: np.zeros(array.nbytes + room, np.uint8) for name, array in arrays.items()}
        self._arrays = {name: self._copy(name, array) for name, array in arrays.items()}

    def _copy(self, name: str, array: Array) -> Array:
        found = self._memory[name][: array.nbytes].view(array.dtype).reshape(array.shape)
        found[:] = array
        return found

    def array(self, name: str) -> Array:
        return self._arrays[name]

    def check_unchanged(self) -> None:
        """Nobody changes it."""

    def close(self) -> None:
        """Nothing to close."""


def swapped(model: CpuModel) -> Iterator[str]:
    """Swap each two addresses of a layer, or of the ends, for as long as the caller takes."""
    for layer, w_X in enumerate(model.table_LX):
        original = w_X.copy()
        for one, other in combinations([field for field in weight_table.ARRAYS if original[0][field]], 2):
            w_X[one], w_X[other] = original[other], original[one]
            yield f"layer {layer}: {one}, {other}"
            w_X[:] = original
    ends = model.ends
    for one, other in combinations([field for field, address in ends._asdict().items() if address], 2):
        if getattr(ends, one) == getattr(ends, other):  # a tied head
            continue
        model.ends = ends._replace(**{one: getattr(ends, other), other: getattr(ends, one)})
        yield f"ends: {one}, {other}"
        model.ends = ends


@pytest.mark.parametrize("fmt", ["f32", "q8"])
@pytest.mark.parametrize("name", DECODERS)
def test_no_two_weights_can_be_swapped_unseen(name: str, fmt: str, tmp_path: Path) -> None:
    decoder = small_decoder(**DECODERS[name])
    ranks = [layer.rank for layer in LAYERS]
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=ranks, layers=LAYERS, format=fmt)
    ids = np.random.default_rng(3).integers(0, decoder.vocab_size, 20)
    with Artifact.open(path) as artifact, load(path, mode="predicted") as loaded, np.errstate(all="ignore"):
        wanted, padded, model = reference.forward(artifact, ids, "predicted"), Padded(artifact), loaded.executor.host
        model.table_LX, model.ends = weight_table.table_of(padded, "predicted"), weight_table.ends_of(padded)

        def differs(other_TV: np.ndarray) -> float:
            return float(np.abs(loaded.logits(ids) - other_TV).max() / np.abs(wanted).max())

        # A byte of an input that hangs on a last bit makes a thousand times its difference.
        assert differs(wanted) < (1e-5 if fmt == "f32" else 0.02)
        right_TV = loaded.logits(ids)
        assert [swap for swap in swapped(model) if differs(right_TV) < 1e-3] == []
        assert differs(right_TV) == 0
