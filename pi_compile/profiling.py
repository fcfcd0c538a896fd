"""Profile: how often each neuron fires on a text, and the order of neurons that follows.

The text is split into windows, and the windows into shards. A group of layers is loaded, all shards pass through it,
and the hidden states are kept for the next group. With all layers in one group that is the ordinary forward pass; with
one layer a group, memory holds one layer whatever the model's size. Both are the same arithmetic, so the counts agree.
Counts are integers summed in shard order. A finished shard is on disk: a killed run goes on from there.

Beside the counts stands *persistence*: how many of a token's active neurons were active in the last 1, 2, 4, 8 tokens
of its window. The cost of keeping neurons in memory is foretold from it (`cost_model.hit_rate`).

N windows of T tokens, D model width, F neurons of all experts, X experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.files import read_arrays, write_arrays
from pi_compile.results import WINDOWS, ActivationProfile, Counts, order_neurons
from pi_compile.torch_model import Estimate, HiddenStates, flops_per_s, layer_parameters
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.decoder import Decoder

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """How the text goes through the model."""

    window: int = 512
    """Tokens of one sequence; at most the model's context."""
    batch: int = 8
    """Sequences in one forward pass. It can change the result: a product's last bit may depend on its shape."""
    shard: int = 64
    """Sequences of one shard; a finished shard is not computed again after a kill."""
    layers_at_once: int | None = None
    """Layers held in memory together; None for all."""
    cofiring_tokens: int = 4096
    """Tokens, evenly over the text, that are sampled to see which neurons fire together."""
    device: str = "cpu"
    """cpu or cuda:N."""


def estimate(d: Decoder, tokens: int, spec: ProfileSpec) -> Estimate:
    """Time from a short matrix product at this width, disk for hidden states, memory for weights and activations."""
    rows = spec.batch * spec.window
    products = flops_per_s(min(rows, 512), d.d_model, min(d.d_ff, 4096), spec.device)
    layer = layer_parameters(d, d.n_experts)
    resident = min(spec.layers_at_once or d.n_layers, d.n_layers)
    spilled = 2 if resident < d.n_layers else 0
    return Estimate(
        seconds=2 * layer_parameters(d, d.experts_per_token) * d.n_layers * tokens / products,
        disk_bytes=spilled * tokens * d.d_model * 4,
        memory_bytes=4 * (resident * layer + d.vocab_size * d.d_model + rows * (2 * d.neurons + 6 * d.d_model)),
    )


def profile(
    checkpoint: Checkpoint, tokens: Tokens, spec: ProfileSpec, *, scratch: Path, inputs: str, progress: Progress
) -> ActivationProfile:
    """Count over a token stream.

    `scratch` is a folder of this run alone; what an earlier, killed run with the same `inputs` left there is reused.
    Raises CorpusError for a text shorter than one window.
    """
    d = checkpoint.decoder
    window = min(spec.window, d.context_length)
    ids_NT = td.windows(tokens, window)
    run = _Run(checkpoint, ids_NT, spec, scratch, progress)
    with torch.inference_mode():
        # Layers are ordered one by one: all co-firing bits together would take more memory than a layer's weights.
        counted = [
            (counts, order_neurons(counts, bits, d.n_experts), routed, persistence)
            for group in run.groups()
            for counts, bits, routed, persistence in run.count(group)
        ]
    counts, order, routed, persistence = (np.stack(arrays) for arrays in zip(*counted, strict=True))
    return ActivationProfile(
        decoder=d,
        tokens=ids_NT.numel(),
        counts=counts,
        order=order,
        routed=routed if d.n_experts > 1 else None,
        persistence=persistence if window > WINDOWS[-1] else None,
        formats=checkpoint.formats(),
        inputs=inputs,
        source="counts of the profile stage",
    )


@dataclass(frozen=True)
class _Run:
    """One profiling run, with its hidden states and finished shards in `scratch`."""

    checkpoint: Checkpoint
    ids_NT: torch.Tensor
    spec: ProfileSpec
    scratch: Path
    progress: Progress

    def groups(self) -> Iterator[range]:
        """The layers that are in memory together."""
        layers, step = self.checkpoint.decoder.n_layers, self.spec.layers_at_once or self.checkpoint.decoder.n_layers
        return (range(start, min(layers, start + step)) for start in range(0, layers, step))

    def count(self, group: range) -> Iterator[tuple[Counts, Bits, Counts, Counts]]:
        """For each layer of a group: counts (F,), co-firing bits (samples, F), tokens routed to each expert (X,), and
        persistence (5,)."""
        shards = [slice(s, s + self.spec.shard) for s in range(0, len(self.ids_NT), self.spec.shard)]
        files = [self.scratch / f"layers-{group.start}-shard-{n}.npz" for n in range(len(shards))]
        if not all(file.exists() for file in files):
            self._count_missing(group, shards, files)
        d, bits = self.checkpoint.decoder, []
        sizes = d.neurons, d.n_experts, 1 + len(WINDOWS)
        counts, routed, persistence = (np.zeros((len(group), size), np.uint64) for size in sizes)
        for file in files:
            stored = read_arrays(file)
            counts += stored["counts"]
            routed += stored["routed"]
            persistence += stored["persistence"]
            bits.append(stored["bits"])
        fired = (np.unpackbits(layer_bits, axis=1, count=d.neurons) for layer_bits in np.concatenate(bits, axis=1))
        return zip(counts, fired, routed, persistence, strict=True)

    def _count_missing(self, group: range, shards: list[slice], files: list[Path]) -> None:
        weights = [td.layer_weights(self.checkpoint, n, self.spec.device) for n in group]
        global_w = td.global_weights(self.checkpoint, self.spec.device) if group.start == 0 else {}
        for n, (shard, file) in enumerate(zip(shards, files, strict=True)):
            if file.exists():
                continue
            stop = min(shard.stop, len(self.ids_NT))
            batches = (slice(b, min(b + self.spec.batch, stop)) for b in range(shard.start, stop, self.spec.batch))
            found = [self._run_batch(group, weights, global_w, rows) for rows in batches]
            *counted, bits = zip(*found, strict=True)
            names = ("counts", "routed", "persistence")
            sums = {name: np.stack(a).sum(0, dtype=np.uint64) for name, a in zip(names, counted, strict=True)}
            write_arrays(file, {**sums, "bits": np.concatenate(bits, 1)})
            self.progress(group.start * len(shards) + (n + 1) * len(group), self.layers * len(shards))

    @property
    def layers(self) -> int:
        return self.checkpoint.decoder.n_layers

    def _run_batch(
        self, group: range, weights: list[dict[str, torch.Tensor]], global_w: td.NamedTensors, rows: slice
    ) -> list[npt.NDArray[Any]]:
        """Push one batch through a group of layers.

        Returns counts (layers, F), routed tokens (layers, X), persistence (layers, 5), and packed bits.
        """
        d = self.checkpoint.decoder
        if group.start == 0:
            x = td.embed(d, global_w, self.ids_NT[rows].to(self.spec.device))
        else:
            x = torch.from_numpy(self._hidden(group.start)[rows]).to(self.spec.device)
        found = []
        for w in weights:
            x, inputs = td.before_ffn(d, w, x)
            h = td.neurons(d, w, inputs)
            fired, routed = (h != 0).flatten(0, 1), (td.routing(d, w, inputs) > 0).flatten(0, 1)
            found.append(
                (
                    count_fired(fired).numpy(force=True),
                    count_fired(routed).numpy(force=True),
                    count_persistent(h != 0).numpy(force=True),
                    self._sample(fired, rows.start * self.ids_NT.shape[1]),
                )
            )
            x = td.after_ffn(d, w, x, td.ffn_output(w, h))
        if group.stop < d.n_layers:
            self._hidden(group.stop)[rows] = x.cpu().numpy()
        return [np.stack(arrays) for arrays in zip(*found, strict=True)]

    def _hidden(self, layer: int) -> npt.NDArray[np.float32]:
        """Hidden states (N, T, D) before a group of layers."""
        shape = (*self.ids_NT.shape, self.checkpoint.decoder.d_model)
        return HiddenStates(self.scratch, "hidden", shape).before(layer // (self.spec.layers_at_once or self.layers))

    def _sample(self, fired: torch.Tensor, start: int) -> Bits:
        """Packed bits of every n-th token of the text; `fired` begins with token `start`."""
        if self.spec.cofiring_tokens == 0:
            return np.packbits(fired[:0].cpu().numpy(), axis=1)
        step = -(-self.ids_NT.numel() // self.spec.cofiring_tokens)
        return np.packbits(fired[-start % step :: step].cpu().numpy(), axis=1)


def count_fired(fired: torch.Tensor) -> torch.Tensor:
    """(tokens, F) bool → (F,) int64 tokens for which each neuron fired.

    At most 255 tokens are summed as bytes first: that takes a sixth of the time of a direct sum.
    """
    return torch.stack([chunk.sum(0, dtype=torch.uint8) for chunk in torch.split(fired, 255)]).sum(0)


def count_persistent(fired: torch.Tensor) -> torch.Tensor:
    """(sequences, T, F) bool → (5,) int64: activations, and those of neurons that fired in the last 1, 2, 4, 8 tokens.

    Counted are tokens with eight tokens of their sequence before them.
    """
    most = WINDOWS[-1]
    now, last = fired[:, most:], fired[:, :-1]
    found = [now.count_nonzero()]
    for window in WINDOWS:  # last[:, t] says what fired in the `window` tokens up to t
        found.append((now & last[:, most - window :]).count_nonzero() if now.numel() else found[0])
        last = last[:, window:] | last[:, :-window]
    return torch.stack(found)
