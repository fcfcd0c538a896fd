"""Which share of the neurons of SiLU experts can be left out without training, and what that costs.

nox -s bench -- expert_neurons CHECKPOINT --text FOLDER [--shares 0.3,0.5,0.6,0.7] [--windows 32]

The rung `threshold` leaves out neurons whose |a(gate · x)| is at most a limit. Limits are quantiles of these magnitudes
on the first half of the text: one for a layer, as the ladder has it, or one for each expert. The other half gives the
perplexity, and what was left out of the expert that loses least and of the one that loses most. (published: about
60 %, arXiv 2510.05781.)
Shape letters: B windows, T tokens of each, N tokens, X experts, F neurons of one expert.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model import routed_neurons
from pi_compile.torch_model.predictor import magnitudes

WINDOW, BATCH = 128, 8
Tensor = torch.Tensor
OnLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, magnitudes (N, X, F), whether a token takes the expert (N, X, F), values h) → the values to go on with."""


def perplexity(checkpoint: Checkpoint, ids_BT: Tensor, on_layer: OnLayer) -> float:
    """Of all windows, with the neuron values that `on_layer` leaves."""
    d, ends = checkpoint.decoder, td.global_weights(checkpoint, "cpu")

    def on_ffn(layer: int, _batch: int, w: td.NamedTensors, x: Tensor, h: Tensor) -> Tensor:
        routed = routed_neurons(d, w, x)
        taken = torch.ones_like(h, dtype=torch.bool) if routed is None else routed.bool()
        by_expert = (t.reshape(-1, d.n_experts, d.d_ff) for t in (magnitudes(d, w, x), taken, h))
        return on_layer(layer, *by_expert).view(h.shape)

    states = [td.embed(d, ends, some) for some in ids_BT.split(BATCH)]
    for after in td.layers(d, td.stored_layers(checkpoint, "cpu"), states, on_ffn):
        states = list(after)
    logits = torch.cat([td.logits(d, ends, x)[:, :-1] for x in states])
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten()).exp())


class Magnitudes:
    """The magnitudes that each layer's experts have on a text."""

    def __init__(self, checkpoint: Checkpoint, ids_BT: Tensor) -> None:
        experts = range(checkpoint.decoder.n_experts)
        self._seen: dict[tuple[int, int], list[Tensor]] = {}

        def see(layer: int, size: Tensor, taken: Tensor, h: Tensor) -> Tensor:
            for e in experts:
                self._seen.setdefault((layer, e), []).append(size[:, e][taken[:, e]])
            return h

        self.perplexity = perplexity(checkpoint, ids_BT, see)

    def limits(self, share: float, *, each: bool) -> Callable[[int], Tensor]:
        """For a layer the limits (X, 1) below which a share of the neurons is, of its experts together or of each."""

        def of_layer(layer: int) -> Tensor:
            found = [np.concatenate(sizes) for (n, _), sizes in sorted(self._seen.items()) if n == layer]
            cut = [np.quantile(sizes, share) if len(sizes) else 0.0 for sizes in found]
            return torch.tensor(cut if each else [np.quantile(np.concatenate(found), share)])[:, None]

        return of_layer


def left_out(checkpoint: Checkpoint, ids_BT: Tensor, limits: Callable[[int], Tensor]) -> tuple[float, np.ndarray]:
    """The perplexity, and of each layer's experts (L, X) the share of their neurons' values that are left out."""
    d = checkpoint.decoder
    gone_L2X = np.zeros((d.n_layers, 2, d.n_experts))

    def cut(layer: int, size: Tensor, taken: Tensor, h: Tensor) -> Tensor:
        low = size <= limits(layer).float()
        gone_L2X[layer] += torch.stack([(low & taken).sum((0, 2)), taken.sum((0, 2))]).numpy()
        return h.masked_fill(low, 0.0)

    found = perplexity(checkpoint, ids_BT, cut)
    return found, gone_L2X[:, 0] / np.maximum(gone_L2X[:, 1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--shares", default="0.2,0.3,0.4,0.5,0.6,0.7")
    parser.add_argument("--windows", type=int, default=128)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    files = [args.text] if args.text.is_file() else sorted(args.text.iterdir())
    tokenizer = tokenizers.Tokenizer.from_file(str(args.model / "tokenizer.json"))
    text = "\n\n".join(path.read_text("utf-8") for path in files)[: 20 * WINDOW * args.windows]
    ids_BT = td.windows(np.array(tokenizer.encode(text).ids), WINDOW)[: args.windows]
    first, second = ids_BT.chunk(2)
    with torch.inference_mode():
        seen, dense = Magnitudes(checkpoint, first), perplexity(checkpoint, second, lambda _layer, _size, _taken, h: h)
        print(f"dense: perplexity {dense:.3f} on {second.numel()} tokens")
        for share in map(float, args.shares.split(",")):
            for each in (False, True):
                found, gone_LX = left_out(checkpoint, second, seen.limits(share, each=each))
                print(
                    f"{share:.2f} by {'expert' if each else 'layer '}: perplexity {100 * (found / dense - 1):+.2f} %, "
                    f"left out {gone_LX.mean():.3f}, of experts {gone_LX.min():.3f} to {gone_LX.max():.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
