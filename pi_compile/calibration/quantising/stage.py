"""Quantise: round the matrices of attention and FFN, layer by layer, so that the model's outputs change least.

A layer's second moments are those of a text as the layers before, already rounded, have left it. So layers follow one
another. The text is split into at most `SHARDS` shards; a shard's way through a layer is a task, and any number of
workers share them. Sums of shards are added in the order of the shards, and one task rounds a layer, so that the result
is the same whoever does what.

Queries, keys and values are rounded by the mean squares of their inputs alone: a softmax follows them, in which a small
error of the key that all look at counts more than its part of the mean square. Errors of all other matrices are made
good (`compensation`). In formats with minima or zeros of blocks those of `down` by neuron alone are, because the file's
own grid, if it has one, is kept by the others, whose blocks lie as the file's do.

Only `coarse` formats are rounded so, and no matrix that the checkpoint has in its format already; the embedding and the
head are not, because the rows of one are inputs too, and the other is read whole for each token and is best kept in q8.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from operator import add
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.calibration.quantising.compensation import (
    FIRST,
    GATE,
    QKV,
    down,
    importance,
    inverse_factor,
    neuron_ranges,
    round_along_inputs,
    round_inputs,
    second_moments,
    sizes,
)
from pi_compile.checkpoint import Checkpoint
from pi_compile.files import read_arrays, write_arrays, write_text
from pi_compile.results import QuantisedWeights, Stored, read_stored, stored_entries
from pi_compile.torch_model import (
    PROCESS_BYTES,
    Estimate,
    ResidentLayers,
    activation_values,
    computing_with,
    flops_per_s,
    layer_parameters,
)
from pi_compile.torch_model import decoder as td
from pi_compile.workers import WorkFolder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, Format
from pi_runtime.artifact.quantisation import dequantise, quantise
from pi_runtime.artifact.sizes import ALL_MATRICES, BESIDE, NARROWING

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]

SHARDS = 8
"""Most shards of the text: a shard's second moments lie on disk until its layer is rounded."""
REST, DOWN = "ffn/rest", "ffn/down"
_READS = {GATE: QKV, "ffn/up": FIRST}
"""Matrices that are multiplied by the inputs of another."""


def coarse(fmt: Format) -> bool:
    """Whether errors of this format count: a block format below 8 bits."""
    return fmt.quantised and fmt.bits < 8


@dataclass(frozen=True, kw_only=True)
class QuantiseSpec:
    """How matrices are rounded."""

    formats: Mapping[str, str]
    """Number format of each part of the artifact, and of matrices that have another one."""
    window: int = 512
    """Tokens of one sequence; at most the model's context."""
    batch: int = 8
    """Sequences in one forward pass. It can change the result, as `threads` can."""
    threads: int = 1
    """Threads that a task computes with."""
    device: str = "cpu"
    """cpu or cuda:N."""

    def arrays(self, layer: int) -> dict[str, Format]:
        """The matrices of a layer that are rounded if it has them, with their formats; nothing beside experts is.

        Nor are queries where values have a format of their own, as in files.
        """
        parts, named = ALL_MATRICES.items(), self.formats
        left = {*BESIDE, *NARROWING, *([QKV] if f"layers/{layer}/attention/v" in named else ())}
        found = {name: named.get(f"layers/{layer}/{name}", named[part]) for name, part in parts if name not in left}
        return {name: FORMATS[fmt] for name, fmt in found.items() if coarse(FORMATS[fmt])}

    @property
    def rounds(self) -> bool:
        """Whether any matrix may be rounded."""
        named = {name for name in self.formats if name.startswith("layers/")}
        return any(coarse(FORMATS[self.formats[name]]) for name in named.union(ALL_MATRICES.values()))


def memory_bytes(d: Decoder, spec: QuantiseSpec) -> int:
    """Memory of one worker: the weights of two layers, states and neuron values of a batch, second moments."""
    window = d.within_context(spec.window)
    rows = spec.batch * window
    moments = 8 * sum(k * k for k in sizes(d).values()) + 5 * 8 * max(sizes(d).values()) ** 2
    weights = 8 * layer_parameters(d, d.n_experts) + 4 * d.vocab_size * d.d_model
    return PROCESS_BYTES + weights + moments + 4 * rows * activation_values(d, window)


def estimate(d: Decoder, tokens: int, spec: QuantiseSpec) -> Estimate:
    """Time by short measurements on the device, disk for states and second moments, memory of one worker."""
    rows = spec.batch * d.within_context(spec.window)
    with computing_with(spec.threads):
        products = flops_per_s(min(rows, 1024), d.d_model, min(d.d_ff, 4096), spec.device)
    moments = sum(k * k for k in sizes(d).values())
    text = tokens * (4 * layer_parameters(d, d.experts_per_token) + 2 * moments)
    rounding = 2 * sum(k**3 for k in sizes(d).values()) + 2 * layer_parameters(d, d.n_experts) * d.d_model
    # A weight's rounding takes about as long as 500 operations of a product.
    seconds = d.n_layers * (text + rounding + 500 * layer_parameters(d, d.n_experts)) / products
    return Estimate(seconds, tokens * d.d_model * 8 + SHARDS * 8 * moments, memory_bytes(d, spec))


def quantise_weights(
    checkpoint: Checkpoint, tokens: Tokens, spec: QuantiseSpec, *, work: WorkFolder, inputs: str, progress: Progress
) -> QuantisedWeights:
    """Round a checkpoint's matrices on a token stream, with all workers that have the same folder to work in.

    What an earlier, killed run with the same `inputs` left there is reused. Matrices are read from the folder when they
    are needed. Raises CorpusError for a text shorter than one window, CheckpointError for weights that are not finite.
    """
    if not spec.rounds:
        return QuantisedWeights((), read=dict[str, Stored]().__getitem__, inputs=inputs)
    ids_NT = td.windows(tokens, checkpoint.decoder.within_context(spec.window))
    run = _Run(checkpoint, ids_NT, spec, work.path, ResidentLayers(checkpoint, spec.device))
    tasks = run.tasks()
    with torch.inference_mode(), computing_with(spec.threads):
        work.run(tasks, run.needs(), lambda done: progress(len(done.intersection(tasks)), len(tasks)))
    names = tuple(f"layers/{n}/{name}" for n in run.layers for name in run.arrays(n))

    def read(name: str) -> Stored:
        _, layer, local = name.split("/", 2)
        return read_stored(run.folder / run.rounded(int(layer)), local)

    return QuantisedWeights(names, read, inputs)


@dataclass(frozen=True)
class _Run:
    """The tasks of one quantising; their files lie in `folder`."""

    checkpoint: Checkpoint
    ids_NT: torch.Tensor
    spec: QuantiseSpec
    folder: Path
    resident: ResidentLayers

    @property
    def layers(self) -> range:
        return range(self.checkpoint.decoder.n_layers)

    @property
    def shards(self) -> list[torch.Tensor]:
        """The windows of each shard: whole batches, as evenly as they go."""
        batches = torch.split(self.ids_NT, self.spec.batch)
        count = min(SHARDS, len(batches))
        bounds = [len(batches) * n // count for n in range(count + 1)]
        return [torch.cat(batches[start:stop]) for start, stop in pairwise(bounds)]

    def tasks(self) -> dict[str, Callable[[], None]]:
        """Every task by the file that it makes, layer by layer."""
        found: dict[str, Callable[[], None]] = {}
        for layer in self.layers:
            found |= {self._pushed(layer, n): partial(self._push, layer, n) for n in range(len(self.shards))}
            found[self.rounded(layer)] = partial(self._round, layer)
        return found

    def needs(self) -> dict[str, list[str]]:
        """A layer is rounded when all shards are there; a shard goes on when the layer before is rounded."""
        shards = range(len(self.shards))
        rounded = {self.rounded(layer): [self._pushed(layer, n) for n in shards] for layer in self.layers}
        return rounded | {
            self._pushed(layer, n): [self.rounded(layer - 1)] for layer in self.layers[1:] for n in shards
        }

    def rounded(self, layer: int) -> str:
        """File of a layer's rounded matrices."""
        return f"layer-{layer}.npz"

    def _pushed(self, layer: int, n: int) -> str:
        """File that says that a shard's second moments in a layer are there."""
        return f"pushed-{layer}-{n}"

    def _moments(self, layer: int, n: int) -> Path:
        return self.folder / f"moments-{layer}-{n}.npz"

    def _states(self, layer: int, n: int) -> Path:
        """File of a shard's states before a layer."""
        return self.folder / f"states-{layer}-{n}.npz"

    def _push(self, layer: int, n: int) -> None:
        """Push a shard through the rounded layer before, and sum the second moments of this one."""
        d = self.checkpoint.decoder
        batches = list(self._before(layer, n))
        (w,) = self.resident.weights(range(layer, layer + 1))
        sums = second_moments(d, layer, w, batches, lambda x: x.to(self.spec.device))
        write_arrays(self._moments(layer, n), {name: moment.numpy() for name, moment in sums.items()})
        if layer > 0 and layer + 1 < d.n_layers:
            write_arrays(self._states(layer, n), {"states": torch.cat(batches).numpy()})
        write_text(self.folder / self._pushed(layer, n), "")
        self._states(layer - 1, n).unlink(missing_ok=True)

    def _before(self, layer: int, n: int) -> Iterator[torch.Tensor]:
        """The states of a shard before a layer, batch by batch, on the CPU."""
        if layer < 2:
            batches = [self.resident.embed(ids).cpu() for ids in torch.split(self.shards[n], self.spec.batch)]
        else:
            states = read_arrays(self._states(layer - 1, n))["states"]
            batches = list(torch.split(torch.from_numpy(states), self.spec.batch))
        if layer == 0:
            yield from batches
            return
        w = self._rounded_weights(layer - 1)
        for x in batches:
            ((after,),) = td.layers(self.checkpoint.decoder, [w], [x.to(self.spec.device)], first=layer - 1)
            yield after.cpu()

    def _rounded_weights(self, layer: int) -> dict[str, torch.Tensor]:
        """The weights of a layer as they will be stored."""
        (w,) = self.resident.weights(range(layer, layer + 1))
        found = dict(w)
        for name, fmt in self.arrays(layer).items():
            values = dequantise(fmt, *read_stored(self.folder / self.rounded(layer), name), w[name].shape[-1])
            found[name] = torch.from_numpy(values).to(self.spec.device)
        return found

    def arrays(self, layer: int) -> dict[str, Format]:
        """The matrices of a layer that are rounded, with their formats: not those that the checkpoint has in them."""
        there, keeps, layer_of = self.checkpoint.array_shapes, self.checkpoint.keeps, f"layers/{layer}/"
        wanted = {name: fmt for name, fmt in self.spec.arrays(layer).items() if layer_of + name in there}
        return {name: fmt for name, fmt in wanted.items() if not keeps(layer_of + name, fmt.name)}

    def _round(self, layer: int) -> None:
        """Round the matrices of a layer by the second moments of all shards."""
        shards = [self._moments(layer, n) for n in range(len(self.shards))]

        def moment(name: str) -> torch.Tensor:
            return reduce(add, (torch.from_numpy(read_arrays(path, names=[name])[name]) for path in shards))

        values = self.checkpoint.layer_values(layer)
        found: dict[str, npt.NDArray[np.generic]] = {}
        for name, fmt in self.arrays(layer).items():
            if name == QKV:
                stored = quantise(fmt, values[name], importance(moment(name)))
            elif name == REST:
                stored = self._round_rest(fmt, values[name], moment)
            elif name == DOWN:
                stored = self._round_down(fmt, values[name], moment)
            else:
                stored = _along_inputs(fmt, values[name], moment(_READS.get(name, name)))
            found |= stored_entries(name, stored)
        write_arrays(self.folder / self.rounded(layer), found)
        for path in shards:
            path.unlink(missing_ok=True)

    def _round_rest(self, fmt: Format, rest: npt.NDArray[np.float32], moment: Callable[[str], torch.Tensor]) -> Stored:
        """Round `rest` (F, k, D): up along its inputs, down neuron by neuron."""
        ranges = neuron_ranges(self.checkpoint.decoder)
        each = [round_inputs(fmt, rest[part.start : part.stop, -1], moment(down(n))) for n, part in enumerate(ranges)]
        rounded = [tuple(np.concatenate(arrays) for arrays in zip(*each, strict=True))]
        if rest.shape[1] == 2:
            rounded.insert(0, _along_inputs(fmt, rest[:, 0], moment(FIRST)))
        integers, scales = zip(*rounded, strict=True)
        return np.stack(integers, axis=1), np.stack(scales, axis=1)

    def _round_down(
        self, fmt: Format, down_DF: npt.NDArray[np.float32], moment: Callable[[str], torch.Tensor]
    ) -> Stored:
        """Round `down` (X·D, F / X) as a whole matrix, expert by expert along its neurons."""
        d = self.checkpoint.decoder
        moments = [moment(down(n)) for n in range(len(neuron_ranges(d)))]
        experts, parts = d.neurons // d.d_ff, len(moments) * d.d_ff // d.neurons
        each = [
            _along_inputs(fmt, rows, torch.block_diag(*own))  # type: ignore[no-untyped-call]
            for rows, *own in zip(np.split(down_DF, experts), *(moments[n::parts] for n in range(parts)), strict=True)
        ]
        integers, scales = zip(*each, strict=True)
        return np.concatenate(integers), np.concatenate(scales)


def _along_inputs(fmt: Format, rows: npt.NDArray[np.float32], moment: torch.Tensor) -> Stored:
    """Round rows whose blocks lie along their inputs. Where blocks have minima or zeros of their own, or rows a factor,
    errors are weighed and not made good: so a file's own grid stays."""
    if fmt.row_scaled or (fmt.offset and not fmt.grouped):
        return quantise(fmt, rows, importance(moment))
    return round_along_inputs(fmt, rows, inverse_factor(moment))
