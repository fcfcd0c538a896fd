"""Rungs and predictor ranks before training: a stated rule instead of a measurement."""

from fractions import Fraction

from pi_compile.results import LayerWork
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import DENSE, PREDICTED
from pi_runtime.artifact.sizes import parameters

PREDICTOR_SHARE = Fraction(709, 10_000)
"""Weights of all predictors ÷ weights of the model: the mean of PowerInfer's table 6 (SOSP'24)."""
RANK_STEP = 32


def untrained_layers(decoder: Decoder) -> tuple[LayerWork, ...]:
    """Rung and rank of each layer by rule.

    Without zeros in the activation every layer is dense. With zeros every layer has a low-rank predictor and reads as
    many rows as fire. All ranks are equal: the largest multiple of `RANK_STEP` with which the predictors are at most
    `PREDICTOR_SHARE` of the model's weights, but at least `RANK_STEP`.
    """
    if not decoder.sparse:
        return (LayerWork(rung=DENSE),) * decoder.n_layers
    per_rank = decoder.n_layers * decoder.n_experts * (decoder.d_model + decoder.d_ff)
    rank = parameters(decoder) * PREDICTOR_SHARE // per_rank // RANK_STEP * RANK_STEP
    return (LayerWork(rung=PREDICTED, rank=max(int(rank), RANK_STEP)),) * decoder.n_layers
