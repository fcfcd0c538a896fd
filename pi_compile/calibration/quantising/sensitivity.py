"""What an error of each weight costs, so that bits can go where they matter.

A change ΔW of the weights changes the distribution p of the next token by a Kullback–Leibler divergence of, to second
order and with errors that do not hang together,

    KL  ≈  ½ Σ_ij F_ij ΔW_ij²        F = E[(∂ log p(y) / ∂W)²]        y drawn from p

F is the diagonal of the Fisher information. A window's gradient is that of Σ_t ± log p(y_t), with signs by chance: the
square of it is then the sum of the tokens' own squares on average. Of F only the sums of its rows and of its columns
are kept, as if F_ij = r_i c_j / Σ r. The columns' also say what errors within a block of a row weigh, for `down` too,
whose blocks lie along the model's width.

The way is forward through all layers and backward again, with one layer in memory. Shape letters: N windows of T
tokens; R rows of k vectors of D values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.calibration.quantising.loss import Array
from pi_compile.checkpoint import Checkpoint
from pi_compile.torch_model import computing_with
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.formats import Format
from pi_runtime.artifact.quantisation import as_stored, dequantise, quantise
from pi_runtime.artifact.sizes import ALL_MATRICES

Weights = dict[str, torch.Tensor]
EVERY = 8
"""Every n-th row of a matrix is rounded to see what a format costs it."""


@dataclass(frozen=True)
class Sensitivity:
    """The Fisher information of a matrix, summed over its columns and over its rows."""

    rows_Rk: npt.NDArray[np.float64]
    columns_kD: npt.NDArray[np.float64]

    def divergence(self, fmt: Format, values: Array, kept: npt.NDArray[np.bool_]) -> float:
        """About the divergence that rounding (R, D) or (R, k, D) values to a format costs, by some of the rows.

        Those that are `kept`, (R,) or (R, k), cost nothing.
        """
        values_RkD, total = values.reshape(len(values), -1, values.shape[-1]), 0.0
        for k, columns_D in enumerate(self.columns_kD):
            changed = np.flatnonzero(~kept.reshape(len(values), -1)[:, k])
            if not len(changed):
                continue
            rows_R, w_RD = self.rows_Rk[changed[::EVERY], k], values_RkD[changed[::EVERY], k]
            error_RD = np.square(w_RD - rounded(fmt, w_RD, self.importance(k)), dtype=np.float64)
            share = self.rows_Rk[changed, k].sum() / max(rows_R.sum(), 1e-300)
            total += 0.5 * share * float(rows_R @ error_RD @ columns_D) / max(columns_D.sum(), 1e-300)
        return total

    def importance(self, k: int) -> Array:
        """What errors of the columns of vector k cost, relative to their mean."""
        columns_D = self.columns_kD[k].astype(np.float32)
        mean = columns_D.mean()
        return columns_D / mean if mean > 0 else np.ones_like(columns_D)


def rounded(fmt: Format, rows_RD: Array, importance_D: Array) -> Array:
    """Rows after a round trip through a format, with scales by the weighted error."""
    if not fmt.quantised:
        return as_stored(fmt.name, rows_RD)
    return dequantise(fmt, *quantise(fmt, rows_RD, importance_D), rows_RD.shape[-1])


def sensitivities(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, threads: int, progress: Callable[[int, int], None]
) -> dict[str, Sensitivity]:
    """The sensitivity of every matrix whose format may be chosen, by its name; those of a part's ends by theirs."""
    with computing_with(threads):
        return _sensitivities(checkpoint, ids_NT, progress)


def _sensitivities(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, progress: Callable[[int, int], None]
) -> dict[str, Sensitivity]:
    d, total = checkpoint.decoder, 2 * checkpoint.decoder.n_layers
    generator = torch.Generator().manual_seed(0)
    globals_w = td.global_weights(checkpoint, "cpu")
    found: dict[str, _Sums] = {}
    with torch.no_grad():
        states = [[td.embed(d, globals_w, ids_T[None]) for ids_T in ids_NT]]
        for n in range(d.n_layers):
            (after,) = td.layers(d, [td.layer_weights(checkpoint, n, "cpu")], states[-1], first=n)
            states.append(list(after))
            progress(n + 1, total)
    backward = []
    for x in states.pop():
        w, x_leaf = _leaves(globals_w), x.requires_grad_()
        log_p_TV = td.logits(d, w, x_leaf)[0].log_softmax(-1)
        y_T1 = torch.multinomial(log_p_TV.detach().exp(), 1, generator=generator)
        sign_T1 = 2 * torch.randint(2, y_T1.shape, generator=generator) - 1
        (log_p_TV.gather(1, y_T1) * sign_T1).sum().backward()  # type: ignore[no-untyped-call]
        backward.append(_gradient(x_leaf))
        _add(found, w)
    for n in reversed(range(d.n_layers)):
        plain = td.layer_weights(checkpoint, n, "cpu")
        for number, x in enumerate(states.pop()):
            w, x_leaf = _leaves(plain), x.requires_grad_()
            # Activations are computed in place.
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                ((y,),) = td.layers(d, [w], [x_leaf], first=n)
                y.backward(backward[number])  # type: ignore[no-untyped-call]
            backward[number] = _gradient(x_leaf)
            _add(found, {f"layers/{n}/{name}": w[name] for name in ALL_MATRICES if name in w})
        progress(2 * d.n_layers - n, total)
    for ids_T, x_grad in zip(ids_NT, backward, strict=True):
        w = _leaves(globals_w)
        td.embed(d, w, ids_T[None]).backward(x_grad)  # type: ignore[no-untyped-call]
        _add(found, w)
    return {name: sums.mean(ids_NT.numel()) for name, sums in found.items()}


@dataclass
class _Sums:
    rows: torch.Tensor
    columns: torch.Tensor

    def mean(self, tokens: int) -> Sensitivity:
        return Sensitivity((self.rows / tokens).numpy(), (self.columns / tokens).numpy())


def _add(found: dict[str, _Sums], leaves: td.NamedTensors) -> None:
    """Add the squares of a window's gradients of matrices."""
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            squares_RkD = leaf.grad.square().view(len(leaf), -1, leaf.shape[-1])
            rows, columns = squares_RkD.sum(2, dtype=torch.float64), squares_RkD.sum(0, dtype=torch.float64)
            sums = found.setdefault(name, _Sums(torch.zeros_like(rows), torch.zeros_like(columns)))
            sums.rows += rows
            sums.columns += columns


def _leaves(weights: td.NamedTensors) -> Weights:
    """The same numbers as variables of their own: matrices get gradients."""
    return {name: w.detach().requires_grad_(w.ndim > 1) for name, w in weights.items()}


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad
