"""The weights of a synthetic sparse model, as they are stored. All layers share them: only norms and margins differ.

D model width, F neurons, R predictor rank, V vocabulary; S the coordinates that hold a constant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import BLOCK, FORMATS, Array
from pi_runtime.artifact.guess_head import GuessHead
from pi_runtime.artifact.quantisation import dequantise, quantise

CONSTANT = 3.0
"""What the constant coordinates hold; the others are normally distributed around 0 with deviation 1."""
WRITE = 0.25
"""Deviation of what attention (at the first position) and FFN add to a coordinate: states change from layer to layer
and stay of one size."""
TILE_ROWS = 2048
"""Rows drawn of a matrix whose rows need not differ; they repeat, because drawing gigabytes takes long."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to make."""

    decoder: Decoder
    """A gated ReLU decoder with rms norms."""
    formats: Mapping[str, str]
    """Weight format of each part."""
    density: float
    """Share of the neurons that fire."""
    rank: int
    """Of the predictor and of the gate matrix."""
    exponent: float = 0.83
    """Of the power law of the neurons' frequencies; the larger, the more of the neurons that fire do several tokens
    share."""
    likeness: float = 0.0
    """Correlation of the embeddings of tokens whose ids follow each other: texts that count up keep neurons active."""
    seed: int = 0
    guess: GuessHead | None = None
    """A guess head beside it, with random weights."""


@dataclass(frozen=True)
class Stored:
    """A matrix as it is stored, and the values this leaves; scales only where its format has them."""

    values: Array
    stored: Array
    scales: Array | None

    def rows(self, index: Array) -> "Stored":
        return Stored(self.values[index], self.stored[index], None if self.scales is None else self.scales[index])


def store(name: str, values: Array) -> Stored:
    """Values → what the format `name` makes of them."""
    fmt = FORMATS[name]
    if not fmt.quantised:
        stored = fmt.encode(values)
        return Stored(np.ascontiguousarray(fmt.decode(stored, values.shape[-1])), stored, None)
    stored, scales = quantise(fmt, values)
    return Stored(dequantise(fmt, stored, scales, values.shape[-1]), stored, scales)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model by their short names in the artifact."""

    ends: Mapping[str, Stored]
    """Embedding and head; of few rows, which repeat."""
    layer: Mapping[str, Stored]


def constant_coordinates(d_model: int) -> Array:
    """S as a mask over D: one coordinate in each quantisation block."""
    return np.arange(d_model) % BLOCK == 0


def power_law(density: float, neurons: int, exponent: float) -> Array:
    """Frequencies min(1, c / rank^exponent) of mean `density`.

    With 0.83 a quarter of the neurons has four fifths of the mass, as in OPT-30B (figure 5 of the PowerInfer paper,
    Song et al. 2023). With 1.5 the union over a batch grows as in OPT-6.7B by the router settings of Polar Sparsity's
    repository: at 10 % density to 30, 42 and 57 % for 8, 16 and 32 tokens (there 29, 40 and 52); with 0.83 to 43, 62
    and 81 %.
    """
    shape = np.arange(1.0, neurons + 1) ** -exponent
    low, high = 0.0, float(neurons) ** max(1.0, exponent)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * shape, 1).mean() < density else (low, middle)
    # 1 itself has no finite threshold.
    return np.clip(high * shape, None, 1 - 1e-4)


def make(spec: Spec) -> Matrices:
    """Draw and round the weights; neurons hottest first."""
    d, rng = spec.decoder, np.random.default_rng(spec.seed)
    fixed = constant_coordinates(d.d_model)
    embedding = _normal(rng, (min(d.vocab_size, TILE_ROWS), d.d_model), 1.0)
    for token in range(1, len(embedding) if spec.likeness else 0):
        embedding[token] *= np.sqrt(1 - spec.likeness**2)
        embedding[token] += np.float32(spec.likeness) * embedding[token - 1]
    embedding[:, fixed] = CONSTANT
    head = _normal(rng, (min(d.vocab_size, TILE_ROWS), d.d_model), d.d_model**-0.5)
    qkv_rows, heads = (d.n_heads + 2 * d.n_kv_heads) * d.head_dim, d.n_heads * d.head_dim
    qkv = _normal(rng, (qkv_rows, d.d_model), d.d_model**-0.5)
    out = _normal(rng, (d.d_model, heads), WRITE * heads**-0.5)
    out[fixed] = 0
    ends = {"embedding": store(spec.formats["embedding"], embedding), "head": store(spec.formats["head"], head)}
    attention = {"qkv": qkv, "out": out}
    layer = {f"attention/{k}": store(spec.formats["attention"], v) for k, v in attention.items()}
    return Matrices(ends, layer | neurons(spec, fixed, rng))


def neurons(spec: Spec, fixed: Array, rng: np.random.Generator) -> dict[str, Stored]:
    """Predictor, gate (`first`), up and down (`rest`)."""
    d, free = spec.decoder, ~fixed
    # The normed state: √D · cos along u; beside it, deviation `spread` along any unit vector of the other coordinates.
    cos = CONSTANT / np.sqrt(CONSTANT**2 + BLOCK - 1)
    spread = np.sqrt((1 - cos**2) * d.d_model / free.sum())
    t_F = np.array([NormalDist().inv_cdf(1 - f) for f in power_law(spec.density, d.d_ff, spec.exponent)])
    # Rows of `basis`: u, then orthonormal rows of the other coordinates; a rotation spreads u over all of them.
    basis_RD = np.zeros((spec.rank, d.d_model), np.float32)
    basis_RD[0, fixed] = fixed.sum() ** -0.5
    basis_RD[1:, free] = _orthonormal(rng, spec.rank - 1, int(free.sum()))
    rotation_RR = _orthonormal(rng, spec.rank, spec.rank)
    up_FR = _normal(rng, (d.d_ff, spec.rank), 1.0)
    up_FR /= np.linalg.norm(up_FR[:, 1:], axis=1, keepdims=True)
    up_FR[:, 0] = -t_F * spread / (cos * np.sqrt(d.d_model))
    up = store(spec.formats["predictor"], up_FR @ rotation_RR)
    down = store(spec.formats["predictor"], rotation_RR.T @ basis_RD)
    # The gate is made of what rounding left of the predictor, and sorted by the thresholds that it really has.
    first = store(spec.formats["ffn"], up.values @ down.values)
    order = np.argsort(-first.values[:, fixed].sum(1), kind="stable")
    rest_F2D = _normal(rng, (min(d.d_ff, TILE_ROWS), 2, d.d_model), 1.0)
    rest_F2D[:, :, fixed] = 0
    rest_F2D[:, 0] *= d.d_model**-0.5
    rest_F2D[:, 1] *= WRITE / np.sqrt(spread**4 * _second_moment(t_F).sum())
    rest = store(spec.formats["ffn"], rest_F2D).rows(np.arange(d.d_ff) % len(rest_F2D))
    return {"ffn/first": first.rows(order), "ffn/rest": rest, "predictor/down": down, "predictor/up": up.rows(order)}


def _second_moment(t_F: Array) -> Array:
    """E max(0, z − t)² of a standard normal z."""
    density = np.exp(-(t_F**2) / 2) / np.sqrt(2 * np.pi)
    tail = np.array([NormalDist().cdf(-t) for t in t_F])
    return (1 + t_F**2) * tail - t_F * density


def _normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Random orthonormal rows."""
    q, _ = np.linalg.qr(rng.standard_normal((columns, rows), np.float32))
    return np.ascontiguousarray(q.T)
