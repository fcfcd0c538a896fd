"""Training samples: texts pushed through the layers one by one, with a layer's FFN inputs on disk.

A text goes through the dense model in batches of windows, each of which is a task of its own with files of its own: the
hidden states before each layer, which are removed when those after it are there. The FFN inputs of a layer are one Zarr
array, of which each task writes a chunk; it stays until the layer has its candidates. On the same way the sums are
counted by which a choice of rungs is compared with the dense model.

Shape letters: N samples, which are the tokens of all windows, D model width; `ids_NT` has N windows of T tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial, reduce
from operator import add
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr
from zarr.codecs import Crc32cCodec
from zarr.errors import ContainsArrayError

from pi_compile.checkpoint import Checkpoint
from pi_compile.cost_model import Processor, Reads
from pi_compile.files import read_arrays, write_arrays
from pi_compile.results import LayerRow
from pi_compile.torch_model import ResidentLayers
from pi_compile.torch_model import decoder as td
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

    def add(self, h: torch.Tensor, kept: torch.Tensor, read: torch.Tensor | None, w: td.NamedTensors) -> None:
        """Add tokens: neuron values h, what is `kept` of them, the neurons whose `first` is `read`, all (…, F).

        `read` is None where `first` is read for all neurons; `w` are the layer's weights.
        """
        nonzero = h != 0
        fires = nonzero if read is not None else kept != 0
        self.tokens += h.shape[:-1].numel()
        self.nonzero += int(nonzero.sum())
        self.fires += int(fires.sum())
        self.read = None if read is None else (self.read or 0) + int(read.sum())
        self.fires_and_read += int(fires.sum() if read is None else (fires & read).sum())
        if kept is not h:
            self.lost += float(td.widened(w, (h - kept) @ w["ffn/rest"][:, -1]).square().sum())
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
        routed = max(1, self.tokens) * neuron.d.experts_per_token * neuron.d.d_ff
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
        return max(1, self.tokens) * neuron.d.neurons  # a layer without an FFN has counted no token


BATCH = 2
"""Windows at once, which are a task: few, so that many workers find one, and that logits of all words are small."""
CHUNK = 4096
"""Samples read at once."""
NEURON_VALUES = 1 << 24
"""Neuron values that an array in memory may hold."""


@dataclass(frozen=True, eq=False)
class Samples:
    """FFN inputs (N, D) of one layer."""

    array: "zarr.Array[Any]"
    state: float
    """Σ ‖x‖² of the states after the layer."""
    device: str

    def blocks(self, rows: int = CHUNK) -> Iterator[torch.Tensor]:
        """All samples in their order, in blocks of `rows`."""
        for start in range(0, self.array.shape[0], CHUNK):
            yield from torch.split(self._chunk(start), rows)

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
        """Endless batches in random order; one chunk of the samples is in memory at a time."""
        starts = np.arange(0, self.array.shape[0], CHUNK)
        while True:
            for start in rng.permutation(starts):
                chunk = self._chunk(start)
                order = torch.from_numpy(rng.permutation(len(chunk))).to(self.device)
                yield from torch.split(chunk[order], size)

    def _chunk(self, start: int) -> torch.Tensor:
        """The samples of `CHUNK` that begin with sample `start`. Raises FileNotFoundError if some are not there."""
        read = np.asarray(self.array[int(start) : int(start) + CHUNK])
        if np.isnan(read[:, 0]).any():
            # A worker that slept through its search, while another did it and cleared away.
            raise FileNotFoundError(f"{self.array.store_path}: samples are missing, or not numbers")
        return torch.from_numpy(read).to(self.device)


@dataclass(frozen=True)
class PushedText:
    """A text on its way through the layers; its files lie in `folder` and begin with `name`."""

    checkpoint: Checkpoint
    resident: ResidentLayers
    ids_NT: torch.Tensor
    name: str
    folder: Path
    device: str
    keeps_inputs: bool = False
    """Whether FFN inputs are kept."""
    counts: bool = False
    """Whether the sums of each layer are counted, and the states after the last layer are kept."""

    def tasks(self, layer: int) -> dict[str, Callable[[], None]]:
        """The batches of windows by the file that says that they are through a layer."""
        return {self._through(layer, n): partial(self._push, layer, n) for n in self.batches}

    def needs(self, layer: int) -> dict[str, list[str]]:
        """What a batch's way through a layer begins after."""
        return {self._through(layer, n): [self._through(layer - 1, n)] for n in self.batches if layer}

    def samples(self, layer: int) -> Samples:
        """The FFN inputs of a layer, when all batches are through it."""
        inputs = zarr.open_array(self._inputs_folder(layer), mode="r")
        return Samples(inputs, self.sums(layer).state, self.device)

    def sums(self, layer: int) -> LayerSums:
        """The sums of a layer in the dense model; without `counts` those of the states alone."""
        stored = (read_arrays(self.folder / self._through(layer, n)) for n in self.batches)
        return reduce(add, (sums for arrays in stored for sums in LayerSums.unpack(arrays)))

    def ids(self, n: int) -> torch.Tensor:
        """The tokens of a batch, (B, T)."""
        return self.ids_NT[n * BATCH : (n + 1) * BATCH]

    def dense_states(self, n: int) -> torch.Tensor:
        """The states of a batch after the last layer, (B, T, D)."""
        stored = read_arrays(self._states(self.checkpoint.decoder.n_layers, n))["states"]
        return torch.from_numpy(stored).to(self.device)

    def forget(self, layer: int) -> None:
        """Remove the FFN inputs of a layer."""
        rmtree(self._inputs_folder(layer), ignore_errors=True)

    @property
    def batches(self) -> range:
        """The numbers of the batches."""
        return range(-(-len(self.ids_NT) // BATCH))

    def _through(self, layer: int, n: int) -> str:
        return f"pushed-{layer}-{self.name}-{n}.npz"

    def _inputs_folder(self, layer: int) -> Path:
        return self.folder / f"inputs-{layer}-{self.name}.zarr"

    def _inputs(self, layer: int) -> "zarr.Array[Any]":
        """The array of a layer's FFN inputs, made by who is first; a chunk is a batch, and NaN until it is written.

        A chunk appears whole, and has a checksum that is verified when it is read.
        """
        folder, (windows, tokens) = self._inputs_folder(layer), self.ids_NT.shape
        try:
            return zarr.create_array(
                folder,
                shape=(windows * tokens, td.input_width(self.checkpoint.decoder)),
                chunks=(min(windows, BATCH) * tokens, td.input_width(self.checkpoint.decoder)),
                dtype="float32",
                fill_value=np.nan,
                compressors=[Crc32cCodec()],
            )
        except ContainsArrayError:
            return zarr.open_array(folder, mode="r+")

    def _states(self, layer: int, n: int) -> Path:
        """File of the hidden states before a layer."""
        return self.folder / f"states-{layer}-{self.name}-{n}.npz"

    def _keep_inputs(self, layer: int, n: int, inputs_BTD: torch.Tensor) -> None:
        """Write a batch's FFN inputs into the layer's array."""
        start = n * BATCH * self.ids_NT.shape[1]
        samples = inputs_BTD.flatten(0, 1).numpy(force=True)
        self._inputs(layer)[start : start + len(samples)] = samples

    def _push(self, layer: int, n: int) -> None:
        """Push one batch of windows through a layer."""
        weights, d = self.resident.weights(range(layer, layer + 1)), self.checkpoint.decoder
        with torch.inference_mode():
            if layer == 0:
                x = self.resident.embed(self.ids(n))
            else:
                x = torch.from_numpy(read_arrays(self._states(layer, n))["states"]).to(self.device)
            sums = LayerSums.over(d.neurons)

            def on_ffn(
                _layer: int, _batch: int, w: td.NamedTensors, inputs: torch.Tensor, h: torch.Tensor
            ) -> torch.Tensor:
                if self.keeps_inputs:
                    self._keep_inputs(layer, n, inputs)
                if self.counts:
                    sums.add(h, h, None, w)
                return h

            ((x,),) = td.layers(d, weights, [x], on_ffn, first=layer)
            sums.state += float(x.square().sum())
            if self.counts or layer + 1 < d.n_layers:
                write_arrays(self._states(layer + 1, n), {"states": x.numpy(force=True)})
            write_arrays(self.folder / self._through(layer, n), LayerSums.pack([sums]))
        self._states(layer, n).unlink(missing_ok=True)
