"""What rounding costs: how much less likely a text is by the weights as they are packed than as the source has them.

Both go through the decoder in float32, layer by layer, with one layer of each in memory. Windows are paired, so that
how hard a window is to predict cancels:

    increase  =  exp( mean over windows of  loss packed − loss of the source ) − 1

where a loss is the mean −log p of a window's next tokens.

What an error of each weight costs says where bits matter. A change ΔW of the weights changes the distribution p of the
next token by a Kullback–Leibler divergence of, to second order and with errors that do not hang together,

    KL  ≈  ½ Σ_ij F_ij ΔW_ij²        F = E[(∂ log p(y) / ∂W)²]        y drawn from p

F is the diagonal of the Fisher information. A window's gradient is that of Σ_t ± log p(y_t), with signs by chance: the
square of it is then the sum of the tokens' own squares on average. Of F only the sums of its rows and of its columns
are kept, as if F_ij = r_i c_j / Σ r. The columns' also say what errors within a block of a row weigh, for `down` too,
whose blocks lie along the model's width.

The way is forward through all layers and backward again, with one layer in memory. Shape letters: N windows of T
tokens; R rows of k vectors of D values.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint, stored_blocks
from pi_compile.results import QuantisedWeights
from pi_compile.torch_model import computing_with, flops_per_s, layer_parameters
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, Format
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.quantisation import as_stored, dequantise, quantise
from pi_runtime.artifact.sizes import ALL_MATRICES, APART, array_specs

Array = npt.NDArray[np.float32]
Losses = npt.NDArray[np.float64]
Values = Callable[[str, Array], Array]
"""(name of an array of the artifact, its values in the source) → the values to compute with."""

WINDOWS_AT_ONCE = 4
_ROUNDING = 5000
"""Operations of a product that take about as long as the rounding of one weight: the search for its scale."""


@dataclass(frozen=True)
class RoundingLoss:
    """The relative increase of perplexity that rounding costs on a text."""

    increase: float
    error: float | None
    """Its standard error over the windows; None for a single one, which tells nothing of others."""
    tokens: int

    @classmethod
    def between(cls, packed_N: Losses, source_N: Losses, tokens: int) -> "RoundingLoss":
        change = packed_N - source_N
        error = float(change.std(ddof=1) / math.sqrt(len(change))) if len(change) > 1 else None
        return cls(math.expm1(float(change.mean())), error, tokens)


def text_windows(d: Decoder, tokens: npt.NDArray[np.integer], window: int) -> torch.Tensor:
    """Tokens as N sequences of a window, or of the model's context where that is shorter."""
    return td.windows(tokens, d.within_context(window))


def seconds_of_a_pass(d: Decoder, windows: int, window: int) -> float:
    """About how long `text_losses` takes with one way's values, which are rounded, by a short measurement."""
    products = flops_per_s(WINDOWS_AT_ONCE * window, d.d_model, min(d.d_ff, 4096), "cpu")
    read = d.n_layers * layer_parameters(d, d.experts_per_token) + d.vocab_size * d.d_model
    return (2 * windows * window * read + _ROUNDING * d.n_layers * layer_parameters(d, d.n_experts)) / products


def packed_values(
    checkpoint: Checkpoint, formats: Mapping[str, str], quantised: QuantisedWeights | None = None
) -> Values:
    """The values of each array as an artifact has them: rounded already in `quantised`, or by its format."""
    d, checkpoint = checkpoint.decoder, checkpoint.with_formats(formats)
    specs = array_specs(d, formats, [None] * d.n_layers, False, checkpoint.layout)

    def stored(name: str) -> Iterator[Array]:
        """Blocks of a matrix; keys and values that stand apart follow queries."""
        layer, _, local = name.rpartition("attention/qkv")
        for own in (name, *(f"{layer}{apart}" for apart in APART if not local)):
            if own in specs:
                yield from stored_blocks.as_stored(checkpoint, own, specs[own].format)

    def values(name: str, source: Array) -> Array:
        fmt = specs[name].format
        if quantised is not None and name in quantised:
            return dequantise(FORMATS[fmt], *quantised[name], source.shape[-1])
        kept = FORMATS[fmt].number == "float32" or (FORMATS[fmt].quantised and checkpoint.keeps(name, fmt))
        return source if kept else np.concatenate(list(stored(name)))

    return values


def source_values(_name: str, source: Array) -> Array:
    """The values as the source has them."""
    return source


def text_losses(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, ways: Sequence[Values], progress: Callable[[int, int], None]
) -> list[Losses]:
    """The mean −log p of the next token in each of N windows, with each way's values; see `text_states`."""
    d, found = checkpoint.decoder, []
    with torch.inference_mode():
        for ends, states_NTD in text_states(checkpoint, ids_NT, ways, progress):
            losses = [
                F.cross_entropy(td.logits(d, ends, x_TD[None])[0, :-1], ids[1:]).item()
                for ids, x_TD in zip(ids_NT, states_NTD, strict=True)
            ]
            found.append(np.array(losses))
    progress(d.n_layers + 1, d.n_layers + 1)
    return found


def text_states(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, ways: Sequence[Values], progress: Callable[[int, int], None]
) -> list[tuple[td.NamedTensors, torch.Tensor]]:
    """The arrays outside the layers, and the states (N, T, D) after all layers, with each way's values.

    Each array is read once for all ways, and what goes through the same values is computed once. `progress` counts
    layers, the head as one more.
    """
    d = checkpoint.decoder
    names = [name for name in checkpoint.array_shapes if not name.startswith(("layers/", PREFIX))]
    arrays = {name: checkpoint.values(name) for name in names}
    ends = [{name: values(name, source) for name, source in arrays.items()} for values in ways]
    first = [{name: w[name] for name in names if name.startswith(("embedding", "positions"))} for w in ends]
    batches = list(torch.split(ids_NT, WINDOWS_AT_ONCE))
    states = _once([((), w) for w in first], lambda _none, w: [td.embed(d, w, ids) for ids in batches])
    for n in range(d.n_layers):
        source_w = checkpoint.layer_values(n)
        layer = [{name: values(f"layers/{n}/{name}", w) for name, w in source_w.items()} for values in ways]
        states = _once(list(zip(states, layer, strict=True)), partial(_through, d, n))
        progress(n + 1, d.n_layers + 1)
    return [(_tensors(w), torch.cat(list(x))) for w, x in zip(ends, states, strict=True)]


_States = Sequence[torch.Tensor]


def _once(
    inputs: Sequence[tuple[_States, Mapping[str, Array]]], compute: Callable[[_States, td.NamedTensors], _States]
) -> list[_States]:
    """What is computed from states and arrays; once for those that are the same objects."""
    found: dict[tuple[int, ...], _States] = {}
    keys = [(id(states), *map(id, w.values())) for states, w in inputs]
    for key, (states, w) in zip(keys, inputs, strict=True):
        if key not in found:
            found[key] = compute(states, _tensors(w))
    return [found[key] for key in keys]


def _through(d: Decoder, layer: int, states: _States, w: td.NamedTensors) -> _States:
    (after,) = td.layers(d, [w], states, first=layer)
    return after


def _tensors(arrays: Mapping[str, Array]) -> td.NamedTensors:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


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
            error_RD = np.square(w_RD - rounded(fmt, w_RD, self.importances[k]), dtype=np.float64)
            share = self.rows_Rk[changed, k].sum() / max(rows_R.sum(), 1e-300)
            total += 0.5 * share * float(rows_R @ error_RD @ columns_D) / max(columns_D.sum(), 1e-300)
        return total

    @cached_property
    def importances(self) -> Array:
        """What errors of the columns (k, D) of each vector cost, relative to their mean."""
        columns_kD = self.columns_kD.astype(np.float32)
        mean_k1 = columns_kD.mean(1, keepdims=True)
        known = mean_k1 > 0
        found: Array = (np.where(known, columns_kD, 1) / np.where(known, mean_k1, 1)).astype(np.float32)
        return found


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
