"""What a choice of predictors costs on a text: perplexity, and per layer what is read and lost.

The text goes through the decoder with the selection applied at every position of every layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile import torch_decoder as td
from pi_compile.checkpoint import Checkpoint
from pi_compile.predictor import Predictor
from pi_compile.trained import LayerRow
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import FfnBytes

BATCH = 8
"""Windows at once."""


def gate_bytes(neuron: FfnBytes, density: float) -> float:
    """Bytes per token of the gate rung: every row of `first`, `rest` where it fires."""
    return neuron.d.d_ff * (neuron.first + density * neuron.rest)


def predicted_bytes(neuron: FfnBytes, rank: int, read: float, kept: float) -> float:
    """Bytes per token of the predicted rung: predictor, `first` of the share `read`, `rest` of the share `kept`."""
    return neuron.predictor(rank) + neuron.d.d_ff * (read * neuron.first + kept * neuron.rest)


@dataclass
class Tally:
    """Sums over the tokens of a text for one layer."""

    tokens: int = 0
    fires: int = 0
    predicted: int = 0
    both: int = 0
    lost: float = 0.0
    state: float = 0.0

    def add(
        self, h: torch.Tensor, predicted: torch.Tensor | None, lost_y: torch.Tensor | None, x: torch.Tensor
    ) -> None:
        fires = h != 0
        self.tokens += h.shape[:-1].numel()
        self.fires += int(fires.sum())
        self.predicted += h.numel() if predicted is None else int(predicted.sum())
        self.both += int(fires.sum() if predicted is None else (fires & predicted).sum())
        self.lost += 0.0 if lost_y is None else float((lost_y**2).sum())
        self.state += float((x**2).sum())

    def row(self, neuron: FfnBytes, rung: str, rank: int | None) -> LayerRow:
        """The table row; without a predictor every neuron counts as predicted."""
        neurons = self.tokens * neuron.d.d_ff
        density, read, kept = self.fires / neurons, self.predicted / neurons, self.both / neurons
        gate = gate_bytes(neuron, density)
        exact = gate_bytes(neuron, 1.0) if rung == "dense" else gate
        return LayerRow(
            rung=rung,
            density=density,
            rank=rank,
            ffn_bytes=exact if rank is None else predicted_bytes(neuron, rank, read, kept),
            gate_bytes=gate,
            recall=self.both / max(self.fires, 1),
            precision=self.both / max(self.predicted, 1),
            rows_read_over_active=self.predicted / max(self.fires, 1),
            error=self.lost / max(self.state, 1e-30),
        )


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a text looks like under one choice of predictors."""

    states: list[torch.Tensor]
    """Last hidden states (B, T, D) of each batch."""
    tallies: list[Tally]
    perplexity: float
    divergence: float
    """Mean Kullback–Leibler divergence of the next-token distributions from those of another verdict, in nats.

    To first order what the mean log-perplexity rises by. Never negative and free of the luck of which words the text
    happens to hold, it ranks choices where differences of perplexity are noise.
    """


def judge(
    checkpoint: Checkpoint,
    ids_NT: torch.Tensor,
    predictors: Sequence[Predictor | None],
    *,
    device: str,
    dense: Verdict | None = None,
) -> Verdict:
    """Push a text through a choice of predictors; None skips nothing in that layer. `dense`: what to diverge from."""
    d = checkpoint.decoder
    with torch.inference_mode():
        ends = td.end_weights(checkpoint, device)
        batches = [ids.to(device) for ids in torch.split(ids_NT, BATCH)]
        states = [td.embed(d, ends, ids) for ids in batches]
        tallies = [Tally() for _ in predictors]
        for n, predictor in enumerate(predictors):
            w = td.layer_weights(checkpoint, n, device)
            states = [layer_step(d, w, x, predictor, tallies[n]) for x in states]
        loss = divergence = 0.0
        for n, (x, ids) in enumerate(zip(states, batches, strict=True)):
            logp = td.logits(d, ends, x)[:, :-1].log_softmax(-1)
            loss += float(F.nll_loss(logp.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
            if dense is not None:
                wanted = td.logits(d, ends, dense.states[n])[:, :-1].log_softmax(-1)
                divergence += float(F.kl_div(logp, wanted, log_target=True, reduction="sum"))
    tokens = ids_NT.shape[0] * (ids_NT.shape[1] - 1)
    return Verdict(states, tallies, math.exp(loss / tokens), divergence / tokens)


def layer_step(d: Decoder, w: td.Weights, x: torch.Tensor, predictor: Predictor | None, tally: Tally) -> torch.Tensor:
    """One layer with selection; adds to the tally."""
    x, inputs = td.before_ffn(d, w, x)
    h = td.neurons(d, w, inputs)
    if predictor is None:
        x = td.after_ffn(d, w, x, td.ffn_output(w, h))
        tally.add(h, None, None, x)
        return x
    predicted = predictor.scores(inputs) > 0
    kept = torch.where(predicted, h, 0.0)
    x = td.after_ffn(d, w, x, td.ffn_output(w, kept))
    tally.add(h, predicted, (h - kept) @ w["ffn/rest"][:, -1], x)
    return x
