"""Quality of a choice of rungs on a text: perplexity, and what each layer reads and loses.

The text goes through the decoder with the choice applied at every position of every layer. Shape letters: N windows of
the text, B of them at a time, T tokens each, D model width, F neurons of all experts.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint
from pi_compile.cost_model import Processor, Reads
from pi_compile.results import LayerRow
from pi_compile.torch_model import SparseFfn
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import GATE
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes

BATCH = 8
"""Windows at once."""


@dataclass
class LayerSums:
    """Sums over the tokens of a text for one layer."""

    tokens: int = 0
    nonzero: int = 0
    """Neuron values that are not 0 before the layer's threshold."""
    fires: int = 0
    """Neuron values that are not 0 after it."""
    read: int | None = 0
    """Neurons whose `first` is read; None for all neurons of the experts that a token is routed to."""
    fires_and_read: int = 0
    lost: float = 0.0
    """Σ ‖Δy‖², Δy what the layer's output lacks."""
    state: float = 0.0
    """Σ ‖x‖² of the states after the layer."""
    fired: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """(F,): tokens for which each neuron fired."""

    def add(self, h: torch.Tensor, kept: torch.Tensor, read: torch.Tensor | None, down: torch.Tensor) -> None:
        """Add tokens: neuron values h, what is `kept` of them, the neurons whose `first` is `read`, all (…, F).

        `read` is None where `first` is read for all neurons. `down` is (F, D), or any matrix whose products with h have
        the same length.
        """
        nonzero = h != 0
        fires = nonzero if read is not None else kept != 0
        self.tokens += h.shape[:-1].numel()
        self.nonzero += int(nonzero.sum())
        self.fires += int(fires.sum())
        self.read = None if read is None else (self.read or 0) + int(read.sum())
        self.fires_and_read += int(fires.sum() if read is None else (fires & read).sum())
        if kept is not h:
            self.lost += float(((h - kept) @ down).square().sum())
        self.fired = self.fired + fires.flatten(0, -2).sum(0).cpu()

    @property
    def error(self) -> float:
        """E‖Δy‖² ÷ E‖x‖²."""
        return self.lost / max(self.state, 1e-30)

    def exact_reads(self, neuron: FfnBytes, layer: Layer) -> Reads:
        """Reads of an exact rung, which computes every neuron whose value is not 0."""
        return Reads.of(neuron, layer, 1.0, self.nonzero / self._values(neuron))

    def row(self, neuron: FfnBytes, processor: Processor, layer: Layer) -> LayerRow:
        """The layer's row of the table; without a predictor every neuron counts as predicted."""
        values = self._values(neuron)
        reads = Reads.of(neuron, layer, (self.read or 0) / values, self.fires_and_read / values)
        # Neurons of the experts that a token is routed to.
        routed = self.tokens * neuron.d.experts_per_token * neuron.d.d_ff
        read = routed if self.read is None else self.read
        return LayerRow(
            **asdict(layer),
            density=self.fires / routed,
            ffn_bytes=reads.total,
            gate_bytes=self.exact_reads(neuron, Layer(rung=GATE)).total,
            ffn_us=reads.ps(layer, processor, neuron) / 1e6,
            recall=self.fires_and_read / max(self.fires, 1),
            precision=self.fires_and_read / max(read, 1),
            rows_read_over_active=read / max(self.fires, 1),
            error=self.error,
        )

    def _values(self, neuron: FfnBytes) -> int:
        return self.tokens * neuron.d.neurons


@dataclass(frozen=True, eq=False)
class Quality:
    """One choice of rungs on one text."""

    states: list[torch.Tensor]
    """Last hidden states (B, T, D) of each batch."""
    layers: list[LayerSums]
    losses: torch.Tensor
    """(windows,) mean of −log p of the next token."""
    divergence: float
    """Mean Kullback–Leibler divergence from the next-token distributions of the dense model, in nats.

    To first order it is the rise of the mean log-perplexity. It is never negative, and does not depend on the luck of
    which words the text happens to hold: it ranks choices whose differences of perplexity are noise.
    """

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def increase_over(self, dense: "Quality") -> tuple[float, float]:
        """The relative increase of perplexity, and its standard error over the windows (0 for a single one)."""
        change = self.losses - dense.losses
        error = float(change.std() / math.sqrt(len(change))) if len(change) > 1 else 0.0
        return math.expm1(float(change.mean())), error


def measure_quality(
    checkpoint: Checkpoint,
    ids_NT: torch.Tensor,
    ffns: Sequence[SparseFfn],
    *,
    device: str,
    dense: Quality | None = None,
) -> Quality:
    """Push a text of N windows through a choice of rungs; the divergence is from `dense`, 0 without it."""
    d = checkpoint.decoder
    with torch.inference_mode():
        global_w = td.global_weights(checkpoint, device)
        batches = [ids.to(device) for ids in torch.split(ids_NT, BATCH)]
        states = [td.embed(d, global_w, ids) for ids in batches]
        layers = [LayerSums() for _ in ffns]
        for n, ffn in enumerate(ffns):
            w = td.layer_weights(checkpoint, n, device)
            states = [_layer_step(d, w, x, ffn, layers[n]) for x in states]
        losses, divergence = [], 0.0
        for n, (x, ids) in enumerate(zip(states, batches, strict=True)):
            logp = td.logits(d, global_w, x)[:, :-1].log_softmax(-1)
            losses.append(F.nll_loss(logp.transpose(1, 2), ids[:, 1:], reduction="none").double().mean(1).cpu())
            if dense is not None:
                target = td.logits(d, global_w, dense.states[n])[:, :-1].log_softmax(-1)
                divergence += float(F.kl_div(logp, target, log_target=True, reduction="sum"))
    tokens = ids_NT.shape[0] * (ids_NT.shape[1] - 1)
    return Quality(states, layers, torch.cat(losses), divergence / tokens)


def _layer_step(d: Decoder, w: td.NamedTensors, x: torch.Tensor, ffn: SparseFfn, sums: LayerSums) -> torch.Tensor:
    """One layer on its rung; adds to the sums."""
    x, inputs = td.before_ffn(d, w, x)
    h = td.neurons(d, w, inputs)
    read, kept = ffn.apply(d, w, inputs, h)
    sums.add(h, kept, read, w["ffn/rest"][:, -1])
    x = td.after_ffn(d, w, x, td.ffn_output(w, kept))
    sums.state += float(x.square().sum())
    return x
