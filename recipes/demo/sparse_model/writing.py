"""A synthetic sparse model as artifacts: its arrays encoded once, written for every layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pi_runtime.artifact.formats import Array
from pi_runtime.artifact.schema import Layer, Manifest, Text
from pi_runtime.artifact.sizes import array_specs, is_scales
from pi_runtime.artifact.writer import ArtifactWriter
from sparse_model.activity import Activity, calibrate, describe, margins, norms
from sparse_model.matrices import Matrices, Spec, make


def build(spec: Spec, paths: Mapping[float, Path], tokenizer: bytes) -> dict[float, Activity]:
    """Write an artifact for each predictor, {rows it names ÷ rows that fire: path}; what was measured of it.

    They differ in the predictors' biases only, and never end a text. `tokenizer` is a whole `tokenizer.json`.
    """
    d = spec.decoder
    assert (d.norm, d.ffn, d.activation, d.ffn_bias, d.tied_head) == ("rms", "gated", "relu", False, False), d
    matrices = make(spec)
    calibrated = calibrate(spec, matrices)
    activities = {}
    for over_read, path in paths.items():
        margin_L = margins(calibrated, over_read)
        _write(path, spec, matrices, calibrated.threshold_L, margin_L, tokenizer)
        activities[over_read] = describe(calibrated, margin_L)
    return activities


def _write(
    path: Path,
    spec: Spec,
    matrices: Matrices,
    threshold_L: Sequence[float],
    margin_L: Sequence[float],
    tokenizer: bytes,
) -> None:
    d, ranks = spec.decoder, [spec.rank] * spec.decoder.n_layers
    vectors: dict[str, Array] = {"final_norm/weight": np.ones(d.d_model, np.float32)}
    for n, (threshold, margin) in enumerate(zip(threshold_L, margin_L, strict=True)):
        own = {**norms(d.d_model, threshold), "predictor/bias": np.full(d.d_ff, margin, np.float32)}
        vectors |= {f"layers/{n}/{name}": values for name, values in own.items()}
    with ArtifactWriter(path) as writer:
        for name, array in array_specs(d, spec.formats, ranks, profiled=False).items():
            if is_scales(name):
                continue  # written along with its matrix
            matrix = matrices.ends.get(name) or matrices.layer.get(name.split("/", 2)[-1])
            if matrix is None:
                writer.add_array(name, array, [vectors[name]])
            else:
                if len(matrix.stored) < array.shape[0]:
                    matrix = matrix.rows(np.arange(array.shape[0]) % len(matrix.stored))
                writer.add_stored(name, array, matrix.stored, matrix.scales)
        _write_head(writer, spec)
        writer.add_file("tokenizer.json", tokenizer)
        writer.finish(
            Manifest(
                decoder=d,
                formats=spec.formats,
                layers=(Layer(rung="predicted", rank=spec.rank),) * d.n_layers,
                profiled_tokens=0,
                text=Text(prefix_ids=(), end_ids=()),
                generation={"temperature": 1.0, "do_sample": False},
                recipe={},
                provenance={"made_by": "recipes/demo/sparse_model"},
                arrays={},
                files={},
                guess=spec.guess,
            )
        )


def _write_head(writer: ArtifactWriter, spec: Spec) -> None:
    """Write a guess head of random weights, whose short list are the first tokens, if one is wanted."""
    rng = np.random.default_rng(spec.seed)
    for name, array in () if spec.guess is None else spec.guess.arrays(spec.decoder):
        if array.format == "u32":
            values: Array = np.arange(array.shape[0])
        elif len(array.shape) == 1:
            values = np.ones(array.shape, np.float32)
        else:
            values = rng.standard_normal(array.shape, np.float32) * np.float32(array.shape[-1] ** -0.5)
        writer.add_array(name, array, [values])
