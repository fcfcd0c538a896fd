"""What a model is taken to do in each layer before predictors are trained: a stated rule instead of a measurement."""

from fractions import Fraction

from pi_compile.cost_model.workload import LayerWork
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import parameters

PREDICTOR_SHARE = Fraction(709, 10_000)
"""Weights of all predictors ÷ weights of the model: the mean of PowerInfer's table 6 (SOSP'24)."""
RANK_STEP = 32


def exact_rung(decoder: Decoder) -> str:
    """The best rung that needs no training and loses nothing: `gate` where the activation has zeros, else `dense`."""
    return "gate" if decoder.sparse else "dense"


def untrained_layers(shape: Decoder) -> tuple[LayerWork, ...]:
    """Rung and rank of each layer by rule.

    A model whose activation has zeros has a predictor everywhere, of a rank that makes all of them `PREDICTOR_SHARE`
    of the weights, rounded down to a multiple of `RANK_STEP`, at least that; as many rows are read as fire. Others are
    dense.
    """
    if not shape.sparse:
        return (LayerWork(rung="dense"),) * shape.n_layers
    per_rank = shape.n_layers * shape.n_experts * (shape.d_model + shape.d_ff)
    rank = parameters(shape) * PREDICTOR_SHARE // per_rank // RANK_STEP * RANK_STEP
    return (LayerWork(rung="predicted", rank=max(int(rank), RANK_STEP)),) * shape.n_layers
