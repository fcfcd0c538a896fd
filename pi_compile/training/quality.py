"""What a choice of rungs costs on a text: perplexity, and per layer what is read and lost.

The text goes through the decoder with the selection applied at every position of every layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint
from pi_compile.cost_model.ffn_time import Reads
from pi_compile.cost_model.processors import Processor
from pi_compile.results.predictor_set import LayerRow
from pi_compile.torch_model import decoder as td
from pi_compile.torch_model.sparse_ffn import Selection
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import FfnBytes

BATCH = 8
"""Windows at once."""


@dataclass
class Tally:
    """Sums over the tokens of a text for one layer."""

    tokens: int = 0
    nonzero: int = 0
    """Neuron values that are not 0 before the layer's threshold."""
    fires: int = 0
    """… after it."""
    read: int | None = 0
    """Neurons whose `first` is read; None for all that a token's experts have."""
    both: int = 0
    lost: float = 0.0
    state: float = 0.0
    fired: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """(F,): tokens for which each neuron fired."""

    def add(self, h: torch.Tensor, kept: torch.Tensor, read: torch.Tensor | None, rest: torch.Tensor) -> None:
        """(…, F) neuron values, what a selection leaves of them, whose `first` it reads (None: all) and (F, D) `down`,
        or any matrix that keeps the length of what it yields."""
        nonzero = h != 0
        fires = nonzero if read is not None else kept != 0
        self.tokens += h.shape[:-1].numel()
        self.nonzero += int(nonzero.sum())
        self.fires += int(fires.sum())
        self.read = None if read is None else (self.read or 0) + int(read.sum())
        self.both += int(fires.sum() if read is None else (fires & read).sum())
        if kept is not h:
            self.lost += float(((h - kept) @ rest).square().sum())
        self.fired = self.fired + fires.flatten(0, -2).sum(0).cpu()

    @property
    def error(self) -> float:
        """E‖Δy‖² ÷ E‖x‖²."""
        return self.lost / max(self.state, 1e-30)

    def reads(self, neuron: FfnBytes, rung: str, rank: int | None = None) -> Reads:
        """What a rung reads that has these sums."""
        neurons = self.tokens * neuron.d.neurons
        return Reads.of(neuron, rung, rank, (self.read or 0) / neurons, self.both / neurons)

    def gate(self, neuron: FfnBytes) -> Reads:
        """What the gate rung reads."""
        return Reads.of(neuron, "gate", None, 1.0, self.nonzero / (self.tokens * neuron.d.neurons))

    def row(self, neuron: FfnBytes, processor: Processor, how: Selection) -> LayerRow:
        """The table row; without a predictor every neuron counts as predicted."""
        rank = None if how.predictor is None else how.predictor.up.shape[1]
        reads = self.reads(neuron, how.rung, rank)
        # Of experts, those that a token goes to.
        neurons = self.tokens * neuron.d.experts_per_token * neuron.d.d_ff
        read = neurons if self.read is None else self.read
        return LayerRow(
            rung=how.rung,
            density=self.fires / neurons,
            rank=rank,
            threshold=how.threshold,
            margin=how.margin,
            ffn_bytes=reads.total,
            gate_bytes=self.gate(neuron).total,
            ffn_us=reads.ps(processor, neuron) / 1e6,
            recall=self.both / max(self.fires, 1),
            precision=self.both / max(read, 1),
            rows_read_over_active=read / max(self.fires, 1),
            error=self.error,
        )


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a text looks like under one choice of rungs."""

    states: list[torch.Tensor]
    """Last hidden states (B, T, D) of each batch."""
    tallies: list[Tally]
    losses: torch.Tensor
    """(windows,) mean of −log p of the next token."""
    divergence: float
    """Mean Kullback–Leibler divergence of the next-token distributions from those of another verdict, in nats.

    To first order what the mean log-perplexity rises by. Never negative and free of the luck of which words the text
    happens to hold, it ranks choices where differences of perplexity are noise.
    """

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def increase_over(self, dense: "Verdict") -> tuple[float, float]:
        """The relative increase of perplexity, and its standard error over the windows (0 for a single one)."""
        change = self.losses - dense.losses
        error = float(change.std() / math.sqrt(len(change))) if len(change) > 1 else 0.0
        return math.expm1(float(change.mean())), error


def judge(
    checkpoint: Checkpoint,
    ids_NT: torch.Tensor,
    choice: Sequence[Selection],
    *,
    device: str,
    dense: Verdict | None = None,
    stepped: Callable[[], None] = lambda: None,
) -> Verdict:
    """Push a text through a choice of rungs. `dense`: what to diverge from. `stepped` is called after each layer."""
    d = checkpoint.decoder
    with torch.inference_mode():
        ends = td.end_weights(checkpoint, device)
        batches = [ids.to(device) for ids in torch.split(ids_NT, BATCH)]
        states = [td.embed(d, ends, ids) for ids in batches]
        tallies = [Tally() for _ in choice]
        for n, how in enumerate(choice):
            w = td.layer_weights(checkpoint, n, device)
            states = [layer_step(d, w, x, how, tallies[n]) for x in states]
            stepped()
        losses, divergence = [], 0.0
        for n, (x, ids) in enumerate(zip(states, batches, strict=True)):
            logp = td.logits(d, ends, x)[:, :-1].log_softmax(-1)
            losses.append(F.nll_loss(logp.transpose(1, 2), ids[:, 1:], reduction="none").double().mean(1).cpu())
            if dense is not None:
                wanted = td.logits(d, ends, dense.states[n])[:, :-1].log_softmax(-1)
                divergence += float(F.kl_div(logp, wanted, log_target=True, reduction="sum"))
    tokens = ids_NT.shape[0] * (ids_NT.shape[1] - 1)
    return Verdict(states, tallies, torch.cat(losses), divergence / tokens)


def layer_step(d: Decoder, w: td.Weights, x: torch.Tensor, how: Selection, tally: Tally) -> torch.Tensor:
    """One layer with selection; adds to the tally."""
    x, inputs = td.before_ffn(d, w, x)
    h = td.neurons(d, w, inputs)
    read = how.reads(d, w, inputs)
    kept = how.keeps(d, w, inputs, h, read)
    tally.add(h, kept, read, w["ffn/rest"][:, -1])
    x = td.after_ffn(d, w, x, td.ffn_output(w, kept))
    tally.state += float(x.square().sum())
    return x
