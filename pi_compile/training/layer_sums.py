"""What a layer reads and loses on a text, as sums over its tokens, which add up over batches in their order.

Shape letters: D model width, F neurons of all experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.cost_model import Processor, Reads
from pi_compile.results import LayerRow
from pi_runtime.artifact.rungs import GATE
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import FfnBytes


@dataclass
class LayerSums:
    """Sums over the tokens of a text for one layer."""

    fired: torch.Tensor
    """(F,): tokens for which each neuron fired."""
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

    @classmethod
    def over(cls, neurons: int) -> "LayerSums":
        """The sums over no token yet, of a layer with so many neurons (F)."""
        # `add` makes nothing that stays: small tensors that stay between large ones that go break memory up.
        return cls(fired=torch.zeros(neurons, dtype=torch.int64))

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
        self.fired += fires.flatten(0, -2).sum(0).cpu()

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
        columns = {f.name: arrays[f.name].tolist() for f in fields(cls) if f.name != "fired"}
        columns["read"] = [None if read < 0 else read for read in columns["read"]]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [cls(fired, **row) for fired, row in zip(torch.from_numpy(arrays["fired"]), rows, strict=True)]

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
