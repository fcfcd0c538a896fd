"""Profile: how often each neuron fires on a text, and the order of neurons that follows.

The text is split into windows, and the windows into shards. A group of layers is loaded, shards pass through it, and
their hidden states are kept for the next group. With all layers in one group that is the ordinary forward pass; with
one layer a group, memory holds one layer whatever the model's size. Both are the same arithmetic, so the counts agree.

A shard's way through a group is a task, and any number of workers share the tasks. Counts are integers summed in shard
order, so the result is the same whoever does what.

Beside the counts stands *persistence*: how many of a token's active neurons were active in the last 1, 2, 4, 8 tokens
of its window. The cost of keeping neurons in memory is foretold from it (`cost_model.hit_rate`).

N windows of T tokens, D model width, F neurons of all experts, X experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.files import read_arrays, write_arrays, write_text
from pi_compile.results import WINDOWS, ActivationProfile, order_neurons
from pi_compile.torch_model import (
    PROCESS_BYTES,
    Estimate,
    ResidentLayers,
    activation_values,
    computing_with,
    flops_per_s,
    layer_parameters,
    values_per_s,
)
from pi_compile.torch_model import decoder as td
from pi_compile.workers import WorkFolder, work_folder
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
    shard: int = 8
    """Sequences of one shard, which is the task of one worker. Whole batches: then it changes no result."""
    layers_at_once: int | None = None
    """Layers held in memory together; None for all."""
    cofiring_tokens: int = 4096
    """Tokens, evenly over the text, that are sampled to see which neurons fire together."""
    threads: int = 1
    """Threads that a task computes with. They can change the result, as `batch` can."""
    device: str = "cpu"
    """cpu or cuda:N."""


SAMPLED_FROM_S = 60.0
"""Seconds of profiling from which a sample first tells whether it will gain anything."""
SAMPLE_S, SAMPLE_WINDOWS = 10.0, 4
DENSE_FROM = 0.5
"""The share of neurons that fire above which half of the FFN's rows and more are read whatever is predicted."""
FFN_PASSES, STATE_PASSES = 6, 20
"""Element-wise passes over a layer's neuron values, and over its states."""


def memory_bytes(d: Decoder, spec: ProfileSpec) -> int:
    """Memory of one worker: weights and activations."""
    resident = min(spec.layers_at_once or d.n_layers, d.n_layers)
    window = d.within_context(spec.window)
    layer, rows = layer_parameters(d, d.n_experts), spec.batch * window
    weights = resident * layer + d.vocab_size * d.d_model
    states = spec.shard * window * d.d_model if resident < d.n_layers else 0
    activations = rows * activation_values(d, window)
    return PROCESS_BYTES + 4 * (weights + states + activations)


def estimate(d: Decoder, tokens: int, spec: ProfileSpec) -> Estimate:
    """Time by short measurements on the device, disk for hidden states, memory of one worker."""
    window = d.within_context(spec.window)
    rows = spec.batch * window
    with computing_with(spec.threads):
        # Fewer rows are slower than those of a batch.
        products = flops_per_s(min(rows, 1024), d.d_model, min(d.d_ff, 4096), spec.device)
        values = values_per_s(spec.device)
    attention = 2 * window * d.n_heads * d.head_dim  # half of the positions, on the average, for scores and sums
    layer = 2 * (layer_parameters(d, d.experts_per_token) + attention)
    passes = FFN_PASSES * d.neurons + STATE_PASSES * d.d_model
    # A shard's states are removed when those after the next layers are there.
    spilled = tokens + spec.shard * window if (spec.layers_at_once or d.n_layers) < d.n_layers else 0
    return Estimate(
        seconds=d.n_layers * tokens * (layer / products + passes / values),
        disk_bytes=spilled * d.d_model * 4,
        memory_bytes=memory_bytes(d, spec),
    )


def sampled_density(checkpoint: Checkpoint, tokens: Tokens, spec: ProfileSpec, seconds: float) -> str:
    """How many neurons fire on the first few windows of a text that takes `seconds`: a line for the user.

    About `SAMPLE_S` are taken; at least one window, and at most `SAMPLE_WINDOWS`.
    """
    window = checkpoint.decoder.within_context(spec.window)
    windows = min(max(1, int(len(tokens) * SAMPLE_S / seconds / window)), SAMPLE_WINDOWS)
    sample = tokens[: windows * window]
    with work_folder(None) as work:
        found = profile(
            checkpoint, sample, replace(spec, cofiring_tokens=0), work=work, inputs="", progress=lambda *_: None
        )
    density = float(found.density().mean())
    text = f"on {len(sample):,} tokens {density:.0%} of the neurons fire"
    if density <= DENSE_FROM:
        return text
    return (
        f"{text}: profile and train gain little or nothing. What does: `pi-compile pack --plain`, exact and at once; "
        "`pi-compile init --sparsify`, which trains the model until it is sparse; a guess head, or a mixture of "
        "experts. Ctrl-C stops here, and what is done is kept"
    )


def profile(
    checkpoint: Checkpoint, tokens: Tokens, spec: ProfileSpec, *, work: WorkFolder, inputs: str, progress: Progress
) -> ActivationProfile:
    """Count over a token stream, with all workers that have the same folder to work in.

    What an earlier, killed run with the same `inputs` left there is reused. Raises CorpusError for a text shorter than
    one window, CheckpointError for weights that are not finite.
    """
    d = checkpoint.decoder
    window = d.within_context(spec.window)
    ids_NT = td.windows(tokens, window)
    run = _Profiling(checkpoint, ids_NT, spec, work.path, ResidentLayers(checkpoint, spec.device))
    shards = {run.shard(group, n) for group in run.groups for n in run.shards}
    with torch.inference_mode(), computing_with(spec.threads):
        work.run(run.tasks(), run.needs(), lambda done: progress(len(shards & done), len(shards)))
    counted = [read_arrays(work.path / run.counted(group)) for group in run.groups]
    arrays = {name: np.concatenate([one[name] for one in counted]) for name in (*_SUMMED, "order")}
    return ActivationProfile(
        decoder=d,
        tokens=ids_NT.numel(),
        counts=arrays["counts"],
        order=arrays["order"],
        routed=arrays["routed"] if d.n_experts > 1 else None,
        persistence=arrays["persistence"] if window > WINDOWS[-1] else None,
        formats=checkpoint.formats(),
        inputs=inputs,
        source="counts of the profile stage",
    )


_CHECKED = "checked"
"""The file that says that all weights are finite."""
_SUMMED = "counts", "routed", "persistence"
"""What is counted of each layer, in integers, and summed over shards."""


@dataclass(frozen=True)
class _Profiling:
    """The tasks of one profiling; their files lie in `folder`."""

    checkpoint: Checkpoint
    ids_NT: torch.Tensor
    spec: ProfileSpec
    folder: Path
    resident: ResidentLayers

    @property
    def groups(self) -> list[range]:
        """The layers that are in memory together."""
        layers = self.checkpoint.decoder.n_layers
        step = self.spec.layers_at_once or layers
        return [range(start, min(layers, start + step)) for start in range(0, layers, step)]

    @property
    def shards(self) -> range:
        return range(-(-len(self.ids_NT) // self.spec.shard))

    def tasks(self) -> dict[str, Callable[[], None]]:
        """Every task by the file that it makes, first what is to be done first."""
        check = {_CHECKED: self._check}
        sums = {self.counted(group): partial(self._sum, group) for group in self.groups}
        shards = {self.shard(g, n): partial(self._count, g, n) for g in self.groups for n in self.shards}
        return check | sums | shards

    def needs(self) -> dict[str, list[str]]:
        """What a task begins after: a sum after its shards, a shard after its way through the layers before."""
        sums = {self.counted(group): [self.shard(group, n) for n in self.shards] for group in self.groups}
        after = zip(self.groups, self.groups[1:], strict=False)
        return sums | {self.shard(g, n): [self.shard(before, n)] for before, g in after for n in self.shards}

    def counted(self, group: range) -> str:
        """File of a group's counts, and its neurons in order."""
        return f"layers-{group.start}.npz"

    def shard(self, group: range, n: int) -> str:
        """File of what one shard counted in a group."""
        return f"layers-{group.start}-shard-{n}.npz"

    def _states(self, layer: int, n: int) -> Path:
        """File of a shard's hidden states before a layer."""
        return self.folder / f"states-{layer}-shard-{n}.npz"

    def _check(self) -> None:
        self.checkpoint.check_values()
        write_text(self.folder / _CHECKED, "")

    def _sum(self, group: range) -> None:
        """Sum the shards of a group, and order its neurons."""
        d, bits = self.checkpoint.decoder, []
        sizes = d.neurons, d.n_experts, 1 + len(WINDOWS)
        sums = {name: np.zeros((len(group), size), np.uint64) for name, size in zip(_SUMMED, sizes, strict=True)}
        for n in self.shards:
            stored = read_arrays(self.folder / self.shard(group, n))
            for name in _SUMMED:
                sums[name] += stored[name]
            bits.append(stored["bits"])
        # Layers are ordered one by one: all co-firing bits unpacked would take more memory than a layer's weights.
        fired = (np.unpackbits(layer_bits, axis=1, count=d.neurons) for layer_bits in np.concatenate(bits, axis=1))
        order = [order_neurons(c, b, d.n_experts) for c, b in zip(sums["counts"], fired, strict=True)]
        write_arrays(self.folder / self.counted(group), {**sums, "order": np.stack(order)})

    def _count(self, group: range, n: int) -> None:
        """Push one shard through a group of layers, and count."""
        weights, d, ids_NT = self.resident.weights(group), self.checkpoint.decoder, self.ids_NT
        start, stop = n * self.spec.shard, min((n + 1) * self.spec.shard, len(ids_NT))
        first, last = group.start == 0, group.stop == d.n_layers
        if first:
            states = np.empty((0 if last else stop - start, ids_NT.shape[1], d.d_model), np.float32)
        else:
            states = read_arrays(self._states(group.start, n))["states"]
        found = []
        for b in range(start, stop, self.spec.batch):
            rows = slice(b, min(b + self.spec.batch, stop))
            part = states[rows.start - start : rows.stop - start]
            x = self.resident.embed(ids_NT[rows]) if first else torch.from_numpy(part).to(self.spec.device)
            x, of_batch = self.run_batch(weights, x, rows.start * ids_NT.shape[1], group.start)
            found.append(of_batch)
            if not last:
                part[:] = x.numpy(force=True)  # in place of those before the layers
        if not last:
            write_arrays(self._states(group.stop, n), {"states": states})
        *counted, bits = zip(*found, strict=True)
        sums = {name: np.stack(a).sum(0, dtype=np.uint64) for name, a in zip(_SUMMED, counted, strict=True)}
        write_arrays(self.folder / self.shard(group, n), {**sums, "bits": np.concatenate(bits, 1)})
        self._states(group.start, n).unlink(missing_ok=True)

    def run_batch(
        self, weights: list[dict[str, torch.Tensor]], x: torch.Tensor, start: int, first: int
    ) -> tuple[torch.Tensor, list[npt.NDArray[Any]]]:
        """Push hidden states (B, T, D) through layers from `first` on; the first token is token `start` of the text.

        Returns the states after them, and counts (layers, F), routed tokens (layers, X), persistence (layers, 5) and
        packed co-firing bits.
        """
        d = self.checkpoint.decoder
        found: dict[int, tuple[npt.NDArray[Any], ...]] = {}

        def add(layer: int, active: torch.Tensor, routed: torch.Tensor) -> None:
            fired = active.flatten(0, 1)
            found[layer] = (
                count_fired(fired).numpy(force=True),
                count_fired(routed.flatten(0, 1)).numpy(force=True),
                count_persistent(active).numpy(force=True),
                self._sample(fired, start),
            )

        def count(layer: int, _batch: int, w: td.NamedTensors, inputs: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            add(layer, h != 0, td.routing(d, w, inputs) > 0)
            return h

        *_, (x,) = td.layers(d, weights, [x], count, first=first)
        for layer in {*range(first, first + len(weights))} - found.keys():  # one without an FFN
            none = (torch.zeros(*x.shape[:2], columns, dtype=torch.bool) for columns in (d.neurons, d.n_experts))
            add(layer, *none)
        return x, [np.stack(arrays) for arrays in zip(*(found[n] for n in sorted(found)), strict=True)]

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
