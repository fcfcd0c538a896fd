"""Profile: how often each neuron fires on a text, and the order of neurons that follows.

Text is cut into windows, windows into shards. A group of layers is loaded, all shards pass through it, and the hidden
states are kept for the next group: with all layers in one group that is the ordinary forward pass, with one layer a
group the memory is that of one layer whatever the model's size. Both are the same arithmetic, so the counts agree.
Counts are integers summed in shard order. A shard that is done is on disk: a killed run goes on from there.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pi_compile import torch_decoder as td
from pi_compile.activations import ActivationProfile, Counts
from pi_compile.array_file import read_arrays, write_arrays
from pi_compile.checkpoint import Checkpoint
from pi_compile.hidden_states import HiddenStates
from pi_compile.neuron_order import neuron_order
from pi_runtime.artifact.decoder import Decoder

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """How text is pushed through."""

    window: int = 512
    """Tokens of one sequence; at most the model's context."""
    batch: int = 8
    """Sequences at once. Part of the result: a product's last bit may depend on its shape."""
    shard: int = 64
    """Sequences of one shard, the unit that is not computed again after a kill."""
    layers_at_once: int | None = None
    """Layers held in memory together; None for all."""
    cofiring_tokens: int = 4096
    """Tokens sampled, evenly over the text, for which neurons fire together."""
    device: str = "cpu"
    """cpu or cuda:N."""


@dataclass(frozen=True)
class Estimate:
    """What a stage will take."""

    seconds: float
    disk_bytes: int
    memory_bytes: int


def estimate(d: Decoder, tokens: int, spec: ProfileSpec) -> Estimate:
    """Time by a short matrix product at this width, disk by hidden states, memory by weights and activations."""
    rows = spec.batch * spec.window
    a = torch.ones(min(rows, 512), d.d_model, device=spec.device)
    b = torch.ones(d.d_model, min(d.d_ff, 4096), device=spec.device)
    (a @ b).sum().item()  # a first product starts libraries, and `item` waits for the device
    began = time.perf_counter()
    for _ in range(3):
        product = a @ b
    product.sum().item()
    flops_per_s = 3 * 2 * a.numel() * b.shape[1] / (time.perf_counter() - began)
    layer = layer_parameters(d)
    resident = min(spec.layers_at_once or d.n_layers, d.n_layers)
    spilled = 2 if resident < d.n_layers else 0
    return Estimate(
        seconds=2 * layer * d.n_layers * tokens / flops_per_s,
        disk_bytes=spilled * tokens * d.d_model * 4,
        memory_bytes=4 * (resident * layer + d.vocab_size * d.d_model + rows * (2 * d.neurons + 6 * d.d_model)),
    )


def layer_parameters(d: Decoder) -> int:
    """Weights of one layer."""
    attention = (2 * d.n_heads + 2 * d.n_kv_heads) * d.head_dim * d.d_model
    return attention + (3 if d.ffn == "gated" else 2) * d.neurons * d.d_model


def profile(
    checkpoint: Checkpoint, tokens: Tokens, spec: ProfileSpec, *, scratch: Path, inputs: str, progress: Progress
) -> ActivationProfile:
    """Count over a token stream.

    `scratch`: a folder that is this run's alone; what it holds of an earlier, killed run with the same `inputs` is
    taken over. Raises CorpusError for a text shorter than one window.
    """
    d = checkpoint.decoder
    window = min(spec.window, d.context_length)
    ids_NT = td.windows(tokens, window)
    run = _Run(checkpoint, ids_NT, spec, scratch, progress)
    with torch.inference_mode():
        # Ordered as they come: the co-firing bits of all layers together would take more than a layer's weights.
        counted = [(counts, neuron_order(counts, bits)) for group in run.groups() for counts, bits in run.count(group)]
    counts, order = (np.stack(arrays) for arrays in zip(*counted, strict=True))
    return ActivationProfile(decoder=d, tokens=ids_NT.numel(), counts=counts, order=order, inputs=inputs)


@dataclass(frozen=True)
class _Run:
    """One profiling run: where its hidden states and finished shards are."""

    checkpoint: Checkpoint
    ids_NT: torch.Tensor
    spec: ProfileSpec
    scratch: Path
    progress: Progress

    def groups(self) -> Iterator[range]:
        layers, step = self.checkpoint.decoder.n_layers, self.spec.layers_at_once or self.checkpoint.decoder.n_layers
        return (range(start, min(layers, start + step)) for start in range(0, layers, step))

    def count(self, group: range) -> Iterator[tuple[Counts, Bits]]:
        """(counts (F,), co-firing bits (samples, F)) of each layer of a group."""
        shards = [slice(s, s + self.spec.shard) for s in range(0, len(self.ids_NT), self.spec.shard)]
        files = [self.scratch / f"layers-{group.start}-shard-{n}.npz" for n in range(len(shards))]
        if not all(file.exists() for file in files):
            self._count_missing(group, shards, files)
        counts = np.zeros((len(group), self.checkpoint.decoder.neurons), np.uint64)
        bits = []
        for file in files:
            stored = read_arrays(file)
            counts += stored["counts"]
            bits.append(stored["bits"])
        packed = np.concatenate(bits, axis=1)
        return ((of_layer, np.unpackbits(packed[n], axis=1, count=len(of_layer))) for n, of_layer in enumerate(counts))

    def _count_missing(self, group: range, shards: list[slice], files: list[Path]) -> None:
        weights = [td.layer_weights(self.checkpoint, n, self.spec.device) for n in group]
        ends = td.end_weights(self.checkpoint, self.spec.device) if group.start == 0 else {}
        for n, (shard, file) in enumerate(zip(shards, files, strict=True)):
            if file.exists():
                continue
            shape = (len(group), self.checkpoint.decoder.neurons)
            counts, bits = np.zeros(shape, np.int64), []
            for batch in range(shard.start, min(shard.stop, len(self.ids_NT)), self.spec.batch):
                rows = slice(batch, min(batch + self.spec.batch, shard.stop, len(self.ids_NT)))
                layers = self._push(group, weights, ends, rows)
                counts += np.stack([layer for layer, _ in layers])
                bits.append(np.stack([sample for _, sample in layers]))
            write_arrays(file, {"counts": counts.astype(np.uint64), "bits": np.concatenate(bits, axis=1)})
            self.progress(group.start * len(shards) + (n + 1) * len(group), self.layers * len(shards))

    @property
    def layers(self) -> int:
        return self.checkpoint.decoder.n_layers

    def _push(
        self, group: range, weights: list[dict[str, torch.Tensor]], ends: td.Weights, rows: slice
    ) -> list[tuple[npt.NDArray[np.int64], Bits]]:
        """One batch through a group of layers; per layer the counts (F,), and the sample's bits, packed."""
        d = self.checkpoint.decoder
        if group.start == 0:
            x = td.embed(d, ends, self.ids_NT[rows].to(self.spec.device))
        else:
            x = torch.from_numpy(self._hidden(group.start)[rows]).to(self.spec.device)
        found = []
        for w in weights:
            x, inputs = td.before_ffn(d, w, x)
            h = td.neurons(d, w, inputs)
            fired = (h != 0).flatten(0, 1)
            found.append((count_fired(fired).cpu().numpy(), self._sample(fired, rows.start * self.ids_NT.shape[1])))
            x = td.after_ffn(d, w, x, td.ffn_output(w, h))
        if group.stop < d.n_layers:
            self._hidden(group.stop)[rows] = x.cpu().numpy()
        return found

    def _hidden(self, layer: int) -> npt.NDArray[np.float32]:
        """Hidden states (N, T, D) before a group of layers."""
        shape = (*self.ids_NT.shape, self.checkpoint.decoder.d_model)
        return HiddenStates(self.scratch, "hidden", shape).before(layer // (self.spec.layers_at_once or self.layers))

    def _sample(self, fired: torch.Tensor, start: int) -> Bits:
        """Packed bits of every so manieth token of the text; `fired` begins with token `start`."""
        if self.spec.cofiring_tokens == 0:
            return np.packbits(fired[:0].cpu().numpy(), axis=1)
        step = -(-self.ids_NT.numel() // self.spec.cofiring_tokens)
        return np.packbits(fired[-start % step :: step].cpu().numpy(), axis=1)


def count_fired(fired: torch.Tensor) -> torch.Tensor:
    """(tokens, F) bool → (F,) int64.

    Summed as bytes over at most 255 tokens first: a sixth of the time of a direct sum.
    """
    return torch.stack([part.sum(0, dtype=torch.uint8) for part in torch.split(fired, 255)]).sum(0)
