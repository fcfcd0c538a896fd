"""What rounding costs: how much less likely a text is by the weights as they are packed than as the source has them.

Both go through the decoder in float32, layer by layer, with one layer in memory. Windows are paired, so that how hard a
window is to predict cancels:

    increase  =  exp( mean over windows of  loss packed − loss of the source ) − 1

where a loss is the mean −log p of a window's next tokens. Shape letters: N windows of T tokens each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint
from pi_compile.results import QuantisedWeights
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model import flops_per_s, layer_parameters
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.quantisation import dequantise
from pi_runtime.artifact.sizes import array_specs

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
    """About how long `text_losses` takes with weights that are rounded, by a short measurement."""
    products = flops_per_s(WINDOWS_AT_ONCE * window, d.d_model, min(d.d_ff, 4096), "cpu")
    read = d.n_layers * layer_parameters(d, d.experts_per_token) + d.vocab_size * d.d_model
    return (2 * windows * window * read + _ROUNDING * d.n_layers * layer_parameters(d, d.n_experts)) / products


def packed_values(
    checkpoint: Checkpoint, formats: Mapping[str, str], quantised: QuantisedWeights | None = None
) -> Values:
    """The values of each array as an artifact has them: rounded already in `quantised`, or by its format."""
    d = checkpoint.decoder
    specs = array_specs(d, formats, [None] * d.n_layers, False, checkpoint.layout)

    def values(name: str, source: Array) -> Array:
        fmt = specs[name].format
        if quantised is not None and name in quantised:
            return dequantise(FORMATS[fmt], *quantised[name], source.shape[-1])
        return source if fmt == "f32" else np.concatenate(list(checkpoint.as_stored(name, fmt)))

    return values


def source_values(_name: str, source: Array) -> Array:
    """The values as the source has them."""
    return source


def text_losses(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, values: Values, progress: Callable[[int, int], None]
) -> Losses:
    """The mean −log p of the next token in each of N windows; `progress` counts layers, the head as one more."""
    d = checkpoint.decoder
    with torch.inference_mode():
        ends, states_NTD = text_states(checkpoint, ids_NT, values, progress)
        losses = [
            F.cross_entropy(td.logits(d, ends, x_TD[None])[0, :-1], ids[1:]).item()
            for ids, x_TD in zip(ids_NT, states_NTD, strict=True)
        ]
    progress(d.n_layers + 1, d.n_layers + 1)
    return np.array(losses)


def text_states(
    checkpoint: Checkpoint, ids_NT: torch.Tensor, values: Values, progress: Callable[[int, int], None]
) -> tuple[td.NamedTensors, torch.Tensor]:
    """The arrays outside the layers, and the states (N, T, D) after all layers."""
    d = checkpoint.decoder
    names = [name for name in checkpoint.array_shapes if not name.startswith(("layers/", PREFIX))]

    def layer(n: int) -> td.NamedTensors:
        found = checkpoint.layer_values(n)
        return {name: torch.from_numpy(values(f"layers/{n}/{name}", source)) for name, source in found.items()}

    ends = {name: torch.from_numpy(values(name, checkpoint.values(name))) for name in names}
    states: Sequence[torch.Tensor] = [td.embed(d, ends, ids) for ids in torch.split(ids_NT, WINDOWS_AT_ONCE)]
    for n in range(d.n_layers):
        (states,) = td.layers(d, [layer(n)], states, first=n)
        progress(n + 1, d.n_layers + 1)
    return ends, torch.cat(list(states))
