"""Rounding a matrix so that its products come out right: GPTQ's compensation of errors.

A matrix is multiplied by inputs x (K,) whose second moment is H = E[x xᵀ]. If rounding changes W (K, N), the transposed
matrix, by E, the mean square of the change of the products Wᵀ x is Σₙ Eₙᵀ H Eₙ. Rows of W are rounded one after the
other, and what one of them loses is made good by those that are not rounded yet. With U the upper Cholesky factor of
(H + δ)⁻¹ the best change of those rows is

    e = (w_k − ŵ_k) / U_kk        w_j ← w_j − U_kj e   for j > k

(Frantar et al. 2022, *GPTQ*, equations 2 to 4). δ is `DAMPING` of the mean of H's diagonal. An input that is always 0
has no part in this: its row is rounded to nearest.

The second moments are of what a layer's matrices multiply:

    qkv, first and up   H = Σ x xᵀ            x the normed inputs of attention and FFN
    out                 H = Σ x xᵀ / r²       x the outputs of the heads, r the root mean square of the state before
    down                H = Σ h hᵀ / r²       h the neurons' values, r the root mean square of the state after

Sums run over the tokens of a text. `out` and `down` add to the state, which a norm divides by r before anything reads
it. Without r the few tokens whose state is a hundred times as large (the first one of a text, in many models) would be
all that counts. Neurons are kept together in ranges of one expert, of at most `MOST_NEURONS`.

Shape letters: K inputs, N outputs, B = 32 values of a block; of states, B sequences of T tokens.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.results import Stored
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import BLOCK, GROUP, Format
from pi_runtime.artifact.quantisation import beside, dequantise, empty_stored, nearest, pack_rows, quantise

Array = npt.NDArray[np.float32]
RoundRow = Callable[[int, Array], Array]
"""(number of a row, its values (N,)) → the rounded values."""

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to all of it, GPTQ's own."""
_ROWS_AT_ONCE = 2048
"""Rows of a matrix that are compensated together; each has its errors to itself."""


def importance(moment_KK: torch.Tensor) -> Array:
    """The mean squares (K,) of the inputs, relative to their mean: what a plain error of a column costs."""
    squares = moment_KK.diagonal()
    relative: torch.Tensor = squares / squares.mean().clamp_min(torch.finfo(squares.dtype).tiny)
    return relative.float().numpy()


def inverse_factor(moment_KK: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor U of (H + δ)⁻¹ in float32, so that UᵀU is the inverse."""
    h = moment_KK.clone()
    mean = float(h.diagonal().mean())
    h.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def round_along_inputs(fmt: Format, rows_NK: Array, factor_KK: torch.Tensor) -> Stored:
    """Round a matrix (N, K) whose blocks lie along its inputs, as those of all matrices but `down` by neuron do.

    A block's scale is chosen when its first column is reached, by the error (w − ŵ)² / U_kk² that nothing makes good;
    scales of groups when a group's first one is.
    """
    out = empty_stored(fmt, rows_NK.shape)
    for start in range(0, len(rows_NK), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        out[0][part], out[1][part] = pack_rows(fmt, *_along_inputs(fmt, rows_NK[part], factor_KK))
    return out


def _along_inputs(fmt: Format, rows_NK: Array, factor_KK: torch.Tensor) -> Stored:
    """The integers (N, K), in whole blocks, and what stands beside them, as `pack_rows` takes both."""
    weight_K = np.square(1 / factor_KK.diagonal().numpy())
    w_KN = torch.from_numpy(np.ascontiguousarray(rows_NK.T))
    span = BLOCK * (GROUP if fmt.grouped else 1)
    q_KN = np.zeros((-(-len(w_KN) // BLOCK) * BLOCK, len(rows_NK)), np.int8)
    found: list[npt.NDArray[np.generic]] = []

    def begin(first: int, left_KN: Array) -> RoundRow:
        if first % span == 0:
            _, scales = quantise(fmt, left_KN[:span].T, weight_K[first : first + span])
            found.append(scales[..., : fmt.scales_shape((span,))[-1]])
        scale_NS, offset_NS = beside(fmt, found[-1], span)

        def round_row(k: int, w_N: Array) -> Array:
            scale = scale_NS[:, k % span * scale_NS.shape[1] // span]
            offset = offset_NS[:, k % span * offset_NS.shape[1] // span] if fmt.offset else np.float32(0)
            q_KN[k] = q_N = nearest(fmt, w_N - offset, scale)
            rounded: Array = q_N * scale + offset
            return rounded

        return round_row

    _compensated(w_KN, factor_KK, begin)
    return q_KN.T, np.concatenate(found, axis=-1)


def round_inputs(fmt: Format, rows_KN: Array, moment_KK: torch.Tensor) -> Stored:
    """Round a matrix (K, N) whose blocks lie along its outputs, as those of `down` do: row k is what input k adds.

    Inputs of the largest mean square come first, so that the others make good what they lose.
    """
    order = torch.argsort(moment_KK.diagonal(), descending=True, stable=True)
    w_KN = torch.from_numpy(rows_KN)[order]
    out = empty_stored(fmt, rows_KN.shape)

    def begin(_first: int, _left_KN: Array) -> RoundRow:
        def round_row(k: int, w_N: Array) -> Array:
            row = int(order[k])
            stored, scales = quantise(fmt, w_N[None])
            out[0][row], out[1][row] = stored[0], scales[0]
            rounded: Array = dequantise(fmt, stored, scales, len(w_N))[0]
            return rounded

        return round_row

    _compensated(w_KN, inverse_factor(moment_KK[order][:, order]), begin)
    return out


def _compensated(w_KN: torch.Tensor, factor_KK: torch.Tensor, begin: Callable[[int, Array], RoundRow]) -> None:
    """Round rows one after the other, moving each one's error to those after it; `w_KN` is used up.

    `begin` gets the rows from the next on, with its number, and returns what rounds each of the first `BLOCK`.
    """
    for first in range(0, len(w_KN), BLOCK):
        last = min(first + BLOCK, len(w_KN))
        w_BN, u_BB = w_KN[first:last].numpy(), factor_KK[first:last, first:last].numpy()
        error_BN = np.empty_like(w_BN)
        round_row = begin(first, w_KN[first:].numpy())
        for k in range(last - first):
            error_BN[k] = (w_BN[k] - round_row(first + k, w_BN[k])) / u_BB[k, k]
            w_BN[k + 1 :] -= u_BB[k, k + 1 :, None] * error_BN[k]
        # All later blocks at once: one product in place of 32 passes over the rest of the matrix.
        w_KN[last:] -= factor_KK[first:last, last:].T @ torch.from_numpy(error_BN)


QKV, GATE, OUT, FIRST = "attention/qkv", "attention/gate", "attention/out", "ffn/first"
MOST_NEURONS = 8192
"""Neurons whose second moments are kept together: 512 MiB in float64."""
_LEAST = 1e-20


def neuron_ranges(d: Decoder) -> list[range]:
    """The neurons that make each other's errors good: an expert's, in equal parts where it has many."""
    parts = -(-d.d_ff // MOST_NEURONS)
    bounds = [d.d_ff * n // parts for n in range(parts + 1)]
    starts = range(0, d.neurons, d.d_ff)
    return [range(e + start, e + stop) for e in starts for start, stop in pairwise(bounds)]


def down(n: int) -> str:
    """Name of the second moment of the n-th range of neurons."""
    return f"ffn/down/{n}"


def sizes(d: Decoder) -> dict[str, int]:
    """K of each second moment of a layer."""
    plain = {QKV: d.d_model, OUT: d.mixed_width, FIRST: d.neuron_width}
    return plain | {down(n): len(part) for n, part in enumerate(neuron_ranges(d))}


def second_moments(
    d: Decoder,
    layer: int,
    w: td.NamedTensors,
    batches: Iterable[torch.Tensor],
    to: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The sums (K, K) over all tokens of batches of states (B, T, D) before a layer, in float64.

    `to` brings states to the device of the weights. A batch's product is in float32.
    """
    sums = {name: torch.zeros(k, k, dtype=torch.float64) for name, k in sizes(d.of_layer(layer)).items()}

    def add(name: str, x: torch.Tensor) -> None:
        sums[name] += (x.T @ x).double().cpu()

    for batch in batches:
        x = to(batch)
        seen: dict[str, torch.Tensor] = {}

        def on_ffn(
            _layer: int, _batch: int, _w: td.NamedTensors, inputs: torch.Tensor, h: torch.Tensor
        ) -> torch.Tensor:
            seen[FIRST], seen["h"] = inputs[..., : d.neuron_width], h  # noqa: B023  called in this round
            return h

        ((after,),) = td.layers(d, [w], [x], on_ffn, seen.__setitem__, first=layer)
        tokens = {name: values.flatten(0, 1) for name, values in seen.items()}
        add(QKV, tokens[QKV])
        add(FIRST, tokens[FIRST])
        add(OUT, tokens[OUT] / _rms(x))
        h = tokens["h"] / _rms(after)
        for n, part in enumerate(neuron_ranges(d)):
            add(down(n), h[:, part.start : part.stop])
    return sums


def _rms(states: torch.Tensor) -> torch.Tensor:
    return states.flatten(0, 1).square().mean(1, keepdim=True).sqrt().clamp_min(_LEAST)
