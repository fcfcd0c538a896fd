"""Quality of a choice of rungs on a text: perplexity, and what each layer reads and loses.

The text goes through the decoder with the choice applied at every position of every layer. It goes in batches of
windows, each of which is a task with a file of its own, and the sums of the batches are added in their order: the
result is the same whoever does what. A file's name is a digest of what it was measured of, so that nothing is measured
twice. Shape letters: N windows of the text, B of them at a time, T tokens each, D model width, F neurons of all
experts, L layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint
from pi_compile.cost_model import Processor, Reads
from pi_compile.files import read_arrays, write_arrays
from pi_compile.results import LayerRow
from pi_compile.torch_model import SparseFfn
from pi_compile.torch_model import decoder as td
from pi_compile.workers import WorkFolder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import GATE
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes

BATCH = 2
"""Windows at once, which are a task: few, so that many workers find one, and that logits of all words are small."""


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

    def __add__(self, other: "LayerSums") -> "LayerSums":
        """The sums over two texts."""
        pairs: dict[str, tuple[Any, Any]] = {
            f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        }
        sums: dict[str, Any] = {name: None if a is None or b is None else a + b for name, (a, b) in pairs.items()}
        return LayerSums(**sums)

    @staticmethod
    def pack(layers: Sequence["LayerSums"]) -> dict[str, npt.NDArray[Any]]:
        """The sums of some layers as arrays."""
        rows = {f.name: [getattr(layer, f.name) for layer in layers] for f in fields(LayerSums)}
        rows["read"] = [-1 if read is None else read for read in rows["read"]]
        return {name: np.stack(values) for name, values in rows.items()}

    @classmethod
    def unpack(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> list["LayerSums"]:
        """The sums that `pack` made arrays of."""
        *numbers, fired = (arrays[f.name] for f in fields(cls))
        rows = zip(*(column.tolist() for column in numbers), torch.from_numpy(fired), strict=True)
        return [replace(cls(*row), read=None if row[3] < 0 else row[3]) for row in rows]

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


@dataclass(frozen=True)
class MeasuredText:
    """A text on which choices of rungs are measured, by all workers together."""

    checkpoint: Checkpoint
    ids_NT: torch.Tensor
    name: str
    work: WorkFolder
    device: str

    def measure(self, ffn_of: Callable[[int], SparseFfn], choice: str = "") -> Quality:
        """Push the text through a choice of rungs, which has a name of its own; `ffn_of` gives that of a layer.

        The one without a name is measured first: the divergence of the others is from it, which is the dense model.
        """
        names = [f"{self.name}-{choice}-{n}.npz" for n in range(-(-len(self.ids_NT) // BATCH))]
        self.work.run_shares(
            names, lambda some: self._measure({names.index(name): name for name in some}, ffn_of, bool(choice))
        )
        stored = [read_arrays(self.work.path / name) for name in names]
        layers = [reduce(add, sums) for sums in zip(*(LayerSums.unpack(s) for s in stored), strict=True)]
        tokens = self.ids_NT.shape[0] * (self.ids_NT.shape[1] - 1)
        return Quality(
            layers=layers,
            losses=torch.from_numpy(np.concatenate([s["losses"] for s in stored])),
            divergence=sum(float(s["divergence"]) for s in stored) / tokens,
        )

    def _measure(self, batches: Mapping[int, str], ffn_of: Callable[[int], SparseFfn], diverges: bool) -> None:
        """Push some batches through all layers, with one layer's weights in memory, and write the file of each."""
        d = self.checkpoint.decoder
        with torch.inference_mode():
            global_w = td.global_weights(self.checkpoint, self.device)
            ids = [self.ids_NT[n * BATCH : (n + 1) * BATCH].to(self.device) for n in batches]
            states = [td.embed(d, global_w, batch) for batch in ids]
            sums = [[LayerSums() for _ in range(d.n_layers)] for _ in batches]
            for layer in range(d.n_layers):
                ffn = ffn_of(layer)
                w = td.layer_weights(self.checkpoint, layer, self.device)
                states = [_layer_step(d, w, x, ffn, s[layer]) for x, s in zip(states, sums, strict=True)]
            for (n, name), x, batch_ids, batch_sums in zip(batches.items(), states, ids, sums, strict=True):
                logp = td.logits(d, global_w, x)[:, :-1].log_softmax(-1)
                losses = F.nll_loss(logp.transpose(1, 2), batch_ids[:, 1:], reduction="none").double().mean(1)
                found = {**LayerSums.pack(batch_sums), "losses": losses.numpy(force=True), "divergence": np.zeros(())}
                if diverges:
                    dense = torch.from_numpy(read_arrays(self._dense_states(n))["states"]).to(self.device)
                    target = td.logits(d, global_w, dense)[:, :-1].log_softmax(-1)
                    divergence = F.kl_div(logp, target, log_target=True, reduction="sum")
                    found["divergence"] = np.array(float(divergence))
                else:
                    write_arrays(self._dense_states(n), {"states": x.numpy(force=True)})
                write_arrays(self.work.path / name, found)

    def _dense_states(self, n: int) -> Path:
        """File of the last hidden states of a batch in the dense model."""
        return self.work.path / f"{self.name}-states-{n}.npz"


def _layer_step(d: Decoder, w: td.NamedTensors, x: torch.Tensor, ffn: SparseFfn, sums: LayerSums) -> torch.Tensor:
    """One layer on its rung; adds to the sums."""
    x, inputs = td.before_ffn(d, w, x)
    h = td.neurons(d, w, inputs)
    read, kept = ffn.apply(d, w, inputs, h)
    sums.add(h, kept, read, w["ffn/rest"][:, -1])
    x = td.after_ffn(d, w, x, td.ffn_output(w, kept))
    sums.state += float(x.square().sum())
    return x
