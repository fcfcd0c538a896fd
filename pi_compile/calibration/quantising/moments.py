"""Second moments of what a layer's matrices multiply: what an error of a weight costs, and what can make it good.

    qkv, first and up   H = Σ x xᵀ            x the normed inputs of attention and FFN
    out                 H = Σ x xᵀ / r²       x the outputs of the heads, r the root mean square of the state before
    down                H = Σ h hᵀ / r²       h the neurons' values, r the root mean square of the state after

Sums run over the tokens of a text. `out` and `down` add to the state, which a norm divides by r before anything reads
it. Without r the few tokens whose state is a hundred times as large (the first one of a text, in many models) would be
all that counts. Neurons are kept together in ranges of one expert, of at most `MOST_NEURONS`.

Shape letters: B sequences, T tokens each, K inputs of a matrix.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.decoder import Decoder

QKV, OUT, FIRST = "attention/qkv", "attention/out", "ffn/first"
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
    plain = {QKV: d.d_model, OUT: d.mixed_width, FIRST: d.d_model}
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
    sums = {name: torch.zeros(k, k, dtype=torch.float64) for name, k in sizes(d).items()}

    def add(name: str, x: torch.Tensor) -> None:
        sums[name] += (x.T @ x).double().cpu()

    for batch in batches:
        x = to(batch)
        seen: dict[str, torch.Tensor] = {}

        def on_ffn(
            _layer: int, _batch: int, _w: td.NamedTensors, inputs: torch.Tensor, h: torch.Tensor
        ) -> torch.Tensor:
            seen[FIRST], seen["h"] = inputs[..., : d.d_model], h  # noqa: B023  called in this round
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
