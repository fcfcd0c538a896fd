"""Which neurons of a synthetic model fire: thresholds set by measurement, and what the sets look like.

L layers, T tokens, D model width, F neurons in stored order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi_runtime.artifact.formats import Array
from pi_runtime.kernels import reference
from sparse_model.matrices import Matrices, Spec, constant_coordinates

TOKENS = 64
_FACTORS = np.geomspace(0.25, 16, 417)


@dataclass(frozen=True, kw_only=True, eq=False)
class Activity:
    """What the reference forward measured over `TOKENS` pseudo-random tokens; means over layers where not by layer."""

    counts_LF: Array
    """Tokens for which each neuron fired."""
    density_L: tuple[float, ...]
    overlap: float
    """|A ∩ B| ÷ |A| of the sets of two consecutive tokens."""
    overlap_independent: float
    """The same of independent draws from the measured frequencies."""
    run_length: float
    """Mean length of runs of neighbours that fire together."""
    run_length_independent: float
    recall: float
    """Neurons named by the predictor among those that fire."""
    read_over_active: float
    """Neurons named by the predictor ÷ neurons that fire."""


@dataclass(frozen=True)
class Calibrated:
    """Each layer's thresholds, as the weight of the constant coordinates in its FFN's norm, and what fires then."""

    threshold_L: tuple[float, ...]
    active_LTF: tuple[Array, ...]
    score_LTF: tuple[Array, ...]
    """Of the predictor without a margin."""


class _Weights(dict[str, Array]):
    """Values by name, as the reference takes them; inputs of products are not rounded, which moves no threshold."""

    def product(self, name: str, x_TD: Array) -> Array:
        return np.tensordot(x_TD, self[name], (-1, -1))

    def as_cached(self, x_SGE: Array) -> Array:
        return x_SGE


def calibrate(spec: Spec, matrices: Matrices) -> Calibrated:
    """Run the reference forward layer by layer, setting each layer's thresholds to the density wanted."""
    d, fixed = spec.decoder, constant_coordinates(spec.decoder.d_model)
    embedding = matrices.ends["embedding"].values
    x_TD = embedding[np.random.default_rng(spec.seed + 1).integers(0, len(embedding), TOKENS)]
    w = _Weights({name: matrix.values for name, matrix in matrices.layer.items()} | dict(norms(d.d_model, 1.0)))
    thresholds, active_LTF, score_LTF = [], [], []
    for _ in range(d.n_layers):
        x_TD = x_TD + reference.attention(d, w, reference.norm(d, w, "attention/norm", x_TD))
        normed_TD = reference.norm(d, w, "ffn/norm", x_TD)
        thresholds.append(threshold_of(normed_TD, w["ffn/first"], fixed, spec.density))
        normed_TD[:, fixed] *= np.float32(thresholds[-1])
        active_LTF.append(normed_TD @ w["ffn/first"].T > 0)
        score_LTF.append(normed_TD @ w["predictor/down"].T @ w["predictor/up"].T)
        x_TD = x_TD + reference.ffn(d, w, normed_TD)
    return Calibrated(tuple(thresholds), tuple(active_LTF), tuple(score_LTF))


def margins(c: Calibrated, over_read: float) -> tuple[float, ...]:
    """What must be added to each layer's scores for the predictor to name `over_read` × the neurons that fire; 0 for 1,
    where the scores' own signs are as good as they get."""
    if over_read == 1:
        return (0.0,) * len(c.active_LTF)
    found = []
    for active_TF, score_TF in zip(c.active_LTF, c.score_LTF, strict=True):
        at = max(0, score_TF.size - round(over_read * int(active_TF.sum())))
        found.append(1e-6 - float(np.partition(score_TF, at, axis=None)[at]))
    return tuple(found)


def norms(d_model: int, threshold: float) -> Mapping[str, Array]:
    """Norm weights of a layer: attention does not see the constant, the FFN sees it `threshold` times."""
    fixed = constant_coordinates(d_model)
    attention, ffn = np.where(fixed, 0, 1), np.where(fixed, threshold, 1)
    return {"attention/norm/weight": attention.astype(np.float32), "ffn/norm/weight": ffn.astype(np.float32)}


def threshold_of(normed_TD: Array, first_FD: Array, fixed: Array, density: float) -> float:
    """The factor for the constant coordinates that brings the density wanted, or as near as a moderate one does."""
    some_TD = normed_TD[:: TOKENS // 16]
    constant_TF = some_TD[:, fixed] @ first_FD[:, fixed].T
    random_TF = some_TD @ first_FD.T - constant_TF
    found = np.array([np.mean(random_TF + np.float32(f) * constant_TF > 0) for f in _FACTORS])
    # Near 50 % the density hardly depends on the factor: prefer one that leaves the power law alone.
    return float(_FACTORS[np.argmin(np.abs(found / density - 1) + 0.05 * np.abs(np.log(_FACTORS)))])


def describe(c: Calibrated, margin_L: Sequence[float]) -> Activity:
    """Densities, overlaps and runs; the independent draws are pairs of different tokens, so they have no bias."""
    overlap, overlap_independent, run, run_independent = np.mean([_layer(a) for a in c.active_LTF], axis=0).tolist()
    named_LTF = [score_TF + np.float32(m) > 0 for score_TF, m in zip(c.score_LTF, margin_L, strict=True)]
    fire = sum(int(a.sum()) for a in c.active_LTF)
    both = sum(int((a & n).sum()) for a, n in zip(c.active_LTF, named_LTF, strict=True))
    return Activity(
        counts_LF=np.stack([a.sum(0, dtype=np.int64) for a in c.active_LTF]),
        density_L=tuple(float(a.mean()) for a in c.active_LTF),
        overlap=overlap,
        overlap_independent=overlap_independent,
        run_length=run,
        run_length_independent=run_independent,
        recall=both / fire,
        read_over_active=sum(int(n.sum()) for n in named_LTF) / fire,
    )


def _layer(a_TF: Array) -> tuple[float, float, float, float]:
    tokens, fire = len(a_TF), int(a_TF.sum())
    n_F = a_TF.sum(0, dtype=np.int64)
    neighbours = int((a_TF[:, 1:] & a_TF[:, :-1]).sum())
    # Σ over ordered pairs of different tokens of |A ∩ B|, and of neighbours of which each fires in one of the two.
    common = int((n_F * (n_F - 1)).sum())
    crossed = int((n_F[1:] * n_F[:-1]).sum()) - neighbours
    overlap = int((a_TF[1:] & a_TF[:-1]).sum()) / int(a_TF[:-1].sum())
    return overlap, common / (tokens - 1) / fire, _run(fire, neighbours), _run(fire, crossed / (tokens - 1))


def _run(fire: int, joined: float) -> float:
    """Mean length of runs: each pair of neighbours that fire together joins two runs."""
    return fire / (fire - joined)
