"""The ways to divide one layer's FFN rows between RAM and disk, with bytes and times.

Of the neurons that the CPU has, those that are stored first are *pinned* in RAM; a *cache* has slots for others; the
rest is on disk. On rungs that need `first` of every neuron it is *resident* as a whole, or read with every token.

    T_cpu  =  D_first + max(C_first, D_rest) + C_rest      in one phase: both rows of every named neuron
    T_cpu  =  D_first + C_first + D_rest + C_rest          in two: `rest` of those that turned out to fire
    D      =  rows missed · read(row)  +  min(1, rows missed) · latency(row)

C are the times of computing that `token_time` has, D those of reading, for the rows that a token misses
(`hit_rate`). A predicted layer takes two phases where they save `TWO_PHASES_FROM` of its bytes. Reading for the next
layer ahead of its turn is left out: a run is at least as fast as this where it pays.

Where all rows of an expert are needed they are read in long stretches. Those of a token's K experts that are in memory
are computed while the others, m of them, are read; each is missed with the same chance q:

    T_cpu  =  Σ P(m) · (max(m · D ÷ (K q), (K − m) · C ÷ K) + m · C ÷ K)        P(m)  =  binomial(K, q)

Without a GPU such experts are pinned and cached as a whole, those with the highest counts first.

The step of the choices is a 32nd of a layer's neurons, with a GPU an eighth, rounded up to whole groups of all experts,
or to whole experts.
Of the choices with equal cuts those that need more bytes than another and are no faster are left out.

The disk of a machine in integers, and the times of reading rows from it.

    read(s)  =  s ÷ rate at a run's depth of reads         latency(s)  =  s ÷ rate of one read alone

Both are linear in the size s of a read between the sizes that were measured. A smaller read takes as long as the
smallest one, a larger one is read at the rate of the largest one. A row of r bytes lies anywhere; reads begin and end
at multiples of a, so that on average r + a − gcd(r, a) bytes are read for it. Rows that lie close together are read in
one go: a layer's rows never take longer than all of them in large reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.cost_model.hit_rate import (
    ONE,
    ROW,
    ROW_BITS,
    SHARE_BITS,
    Ints,
    MissCurves,
    correlations,
    miss_curves,
    shares,
)
from pi_compile.cost_model.processors import CPU, PICO, processors_of
from pi_compile.cost_model.token_time import ffn_ps
from pi_compile.cost_model.workload import Workload, rows_read
from pi_compile.machine import Disk, Machine, to_units
from pi_compile.results import GROUP, MILLION
from pi_runtime.artifact.rows import PIECE_NBYTES, TWO_PHASES_FROM, WORKERS, row_nbytes, slot_nbytes


@dataclass(frozen=True)
class DiskReads:
    """Times of reads from one disk, in picoseconds."""

    sizes: tuple[int, ...]
    """Sizes of a read, in bytes, rising."""
    each_ps: tuple[int, ...]
    """What a further read of each size adds while a run's other reads are under way."""
    alone_ps: tuple[int, ...]
    """How long a read of each size takes when it is alone."""
    align: int

    @classmethod
    def of(cls, disk: Disk) -> Self:
        """The deepest measurement up to a run's number of readers counts, and the shallowest for the latency."""
        deep = max((n for n, depth in enumerate(disk.depths) if depth <= WORKERS), default=0)
        sizes = tuple(kib << 10 for kib in disk.sizes_kib)
        each, alone = (
            tuple(-(-s * PICO // to_units(r, 10**6)) for s, r in zip(sizes, disk.read_mb_per_s[n], strict=True))
            for n in (deep, 0)
        )
        return cls(sizes, each, alone, disk.align_bytes)

    def spanned(self, row: int) -> int:
        """Mean bytes that are read for a row of so many bytes."""
        return row + self.align - gcd(row, self.align)

    def row_ps(self, row: int) -> int:
        """What a further row adds."""
        return self._between(self.each_ps, self.spanned(row))

    def latency_ps(self, row: int) -> int:
        """How long a row takes that is read alone."""
        return self._between(self.alone_ps, self.spanned(row))

    def range_ps(self, nbytes: int) -> int:
        """How long consecutive bytes take in large reads."""
        return -(-nbytes * self.each_ps[-1] // self.sizes[-1])

    def _between(self, time_ps: tuple[int, ...], size: int) -> int:
        if size <= self.sizes[0]:
            return time_ps[0]
        if size >= self.sizes[-1]:
            return -(-size * time_ps[-1] // self.sizes[-1])
        n = next(n for n, larger in enumerate(self.sizes) if size < larger)
        low, high = self.sizes[n - 1], self.sizes[n]
        return time_ps[n - 1] + (size - low) * (time_ps[n] - time_ps[n - 1]) // (high - low)


STEPS, STEPS_WITH_GPU = 32, 8
"""Parts of a layer that are pinned, cached and, with a GPU, cut."""


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """One way to divide a layer's rows."""

    pinned: int
    cached: int
    first: bool
    nbytes: int
    cpu_ps: int
    disk_ps: int
    read: int
    needed: int
    missed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RowOptions:
    """The non-dominated ways to divide one layer's rows: arrays over options, larger cuts first, then fewer bytes."""

    cuts: Ints
    """Neurons on the GPU."""
    pinned: Ints
    cached: Ints
    first: npt.NDArray[np.bool_]
    """Whether `first` is resident as a whole."""
    nbytes: Ints
    """Bytes of RAM for slots."""
    cpu_ps: Ints
    """Computing."""
    disk_ps: Ints
    """Waiting for the disk."""
    read: Ints
    """Bytes that a token reads."""
    needed: Ints
    """Rows that a token needs of the CPU's neurons, of both arrays, in 2⁻¹⁴."""
    missed: Ints
    """Rows of these that it misses."""

    def choice(self, index: int) -> RowChoice:
        """One option."""
        return RowChoice(**{name: values[index].item() for name, values in vars(self).items() if name != "cuts"})

    def at(self, indices: npt.NDArray[Any]) -> "RowOptions":
        """The options at these indices."""
        return RowOptions(**{name: values[indices] for name, values in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class RowModel:
    """The rows of one model on one machine with a disk."""

    work: Workload
    machine: Machine

    @cached_property
    def row_nbytes(self) -> tuple[int, int]:
        """Stored bytes of a neuron's values in `first` and in `rest`; scales stay in RAM."""
        first, rest = row_nbytes(self.work.decoder, self.work.formats["ffn"]).values()
        return first, rest

    @property
    def slot_nbytes(self) -> tuple[int, int]:
        """Bytes of a slot of either array."""
        first, rest = slot_nbytes(self.work.decoder, self.work.formats["ffn"]).values()
        return first, rest

    @property
    def beside_nbytes(self) -> int:
        """What a neuron on the CPU has in RAM wherever its rows are: scales and biases."""
        return self.work.parts.neuron - sum(self.row_nbytes)

    def together(self, layer: int) -> bool:
        """Whether all rows of an expert are needed, if one is."""
        return self.work.layers[layer].kind.dense and self.work.decoder.n_experts > 1

    def grid(self, layer: int, *, gpu: bool) -> Ints:
        """The numbers of neurons that are chosen among: 0, and so many steps as a layer has."""
        d = self.work.decoder
        group = d.d_ff if self.together(layer) and not gpu else GROUP * d.n_experts
        step = -(-d.neurons // ((STEPS_WITH_GPU if gpu else STEPS) * group)) * group
        return np.minimum(np.arange(-(-d.neurons // step) + 1) * step, d.neurons)

    @cached_property
    def reads(self) -> DiskReads:
        """The machine's disk."""
        assert self.machine.disk is not None
        return DiskReads.of(self.machine.disk)

    def two_phases(self, layer: int) -> bool:
        """Whether a layer's `rest` is read when it is known what fires."""
        how = self.work.layers[layer].kind
        if not how.picks:
            return how.needs_all_first
        first, rest = (rows[-1] for rows in rows_read(self.work, layer))
        row_first, row_rest = self.row_nbytes
        return bool((first - rest) * row_rest >= TWO_PHASES_FROM * first * (row_first + row_rest))

    @cached_property
    def _found(self) -> dict[tuple[Any, ...], RowOptions]:
        return {}

    def options(self, layer: int, *, gpu: bool) -> RowOptions:
        """The options of a layer; `gpu`: whether it may be cut."""
        work = self.work
        persistence = None if work.persistence is None else tuple(work.persistence[layer].tolist())
        routed = None if work.routed is None else work.routed[layer].tobytes()
        how = work.layers[layer]
        without = layer in work.decoder.mixer_only_layers
        key = work.counts[layer].tobytes(), routed, persistence, how.rung, how.read_ppm, gpu, without
        if key not in self._found:  # published curves have equal layers
            self._found[key] = self._options(layer, gpu)
        return self._found[key]

    def _order(self, layer: int, gpu: bool) -> Ints:
        """The order of pinning: as cuts go beside a GPU; else by whole experts, or equally many of each."""
        d = self.work.decoder
        rank_N = np.arange(d.neurons).reshape(d.n_experts, d.d_ff)
        if not gpu and self.together(layer):
            sums_X = self.work.counts[layer].reshape(rank_N.shape).sum(1)
            return rank_N[np.argsort(-sums_X, kind="stable")].ravel()
        if not gpu or d.n_experts == 1:
            return rank_N.T.ravel()
        groups = -(-d.d_ff // GROUP)
        expert_G, group_G = np.divmod(self.work.group_orders[layer], groups)
        return np.concatenate([rank_N[e, g * GROUP : (g + 1) * GROUP] for e, g in zip(expert_G, group_G, strict=True)])

    def on_disk(self, layer: int, neurons: int, choice: RowChoice) -> int:
        """Bytes of the rows of so many neurons of a layer that have no slot."""
        kind, (first, rest) = self.work.layers[layer].kind, self.row_nbytes
        away = neurons - choice.pinned - choice.cached
        return away * rest + ((0 if choice.first else neurons) if kind.needs_all_first else away) * first

    def _curves(self, layer: int, order_N: Ints, prefixes: Ints) -> tuple[MissCurves, MissCurves]:
        """Misses of rows of `first` and of `rest` behind each of these numbers of neurons."""
        work, how = self.work, self.work.layers[layer]
        count_N, routed_N = work.counts[layer][order_N], work.routed_tokens(layer)[order_N]
        fires_N, every_N = shares(count_N, work.tokens), shares(routed_N, work.tokens)
        theta_4 = correlations(fires_N, None if work.persistence is None else work.persistence[layer].tolist())
        picked_N = shares(np.minimum(routed_N, -(-count_N * how.read_ppm // MILLION)), work.tokens)
        named_N = picked_N if how.kind.picks else every_N
        rest_N = every_N if how.kind.dense else fires_N if self.two_phases(layer) else named_N
        return miss_curves(named_N, theta_4, prefixes), miss_curves(rest_N, theta_4, prefixes)

    def _options(self, layer: int, gpu: bool) -> RowOptions:
        grid, kind = self.grid(layer, gpu=gpu), self.work.layers[layer].kind
        steps = len(grid)
        cut, pinned, cached = np.indices((steps if gpu else 1, steps, steps)).reshape(3, -1)
        possible = cut + pinned + cached < steps
        cut, behind, end = cut[possible], (cut + pinned)[possible], (cut + pinned + cached)[possible]
        division = _Division(grid[cut], grid[behind] - grid[cut], grid[end] - grid[behind])
        tables = [
            np.stack([curves.missed(n, grid) for n in range(steps)])
            for curves in self._curves(layer, self._order(layer, gpu), grid)
        ]
        needed, missed = (tuple(table[n, k] for table in tables) for n, k in ((cut, 0), (behind, end - behind)))
        found = [
            self._timed(layer, division, resident, needed, missed)
            for resident in ((True, False) if kind.needs_all_first else (False,))
        ]
        together = RowOptions(**{k: np.concatenate([vars(one)[k] for one in found]) for k in vars(found[0])})
        return together.at(_non_dominated(together))

    def _timed(
        self, layer: int, division: "_Division", resident: bool, needed: Sequence[Ints], missed: Sequence[Ints]
    ) -> RowOptions:
        """Bytes and times of divisions, with `first` resident or not.

        `needed` and `missed` are rows of `first` and of `rest`.
        """
        kind, reads, rows = self.work.layers[layer].kind, self.reads, self.row_nbytes
        slot_first, slot_rest = self.slot_nbytes
        on_cpu, kept = self.work.decoder.neurons - division.cut, division.pinned + division.cached
        nbytes, (missed_first, missed_rest) = kept * slot_rest, missed
        if not kind.needs_all_first:
            nbytes = nbytes + kept * slot_first
        elif resident:
            nbytes, missed_first = nbytes + on_cpu * slot_first, np.zeros_like(missed_first)
        else:
            missed_first = needed[0]
        compute_first, compute_rest = self._computing(layer, division.cut)
        together, compute = self.together(layer), compute_first + compute_rest
        disk_first, disk_rest = (
            self._reading(some, row, on_cpu * row, together)
            for some, row in zip((missed_first, missed_rest), rows, strict=True)
        )
        if together:
            missed_share = shares(missed_rest, np.maximum(needed[1], 1))
            total = _with_experts(compute, disk_first + disk_rest, missed_share, self.work.decoder.experts_per_token)
        elif self.two_phases(layer):
            total = disk_first + compute_first + disk_rest + compute_rest
        else:
            total = disk_first + np.maximum(compute_first, disk_rest) + compute_rest
        first_nbytes, rest_nbytes = rows if together else map(reads.spanned, rows)
        read = missed_first * first_nbytes + missed_rest * rest_nbytes
        return RowOptions(
            cuts=division.cut,
            pinned=division.pinned,
            cached=division.cached,
            first=np.full(len(division.cut), resident),
            nbytes=nbytes,
            cpu_ps=compute,
            disk_ps=total - compute,
            read=-(-read >> ROW_BITS),
            needed=needed[0] + needed[1],
            missed=missed_first + missed_rest,
        )

    def _computing(self, layer: int, cut: Ints) -> tuple[Ints, Ints]:
        """Picoseconds of computing with `first` and with `rest` of the neurons behind each cut."""
        at = np.searchsorted(self.work.cuts, cut)
        first, rest = (rows[-1] - rows[at] for rows in rows_read(self.work, layer))
        return ffn_ps(self.work, layer, processors_of(self.machine)[CPU], self.work.parts, first, rest)

    def _reading(self, missed: Ints, row: int, whole: Ints, together: bool) -> Ints:
        """Picoseconds of reading rows, at most those of all of them in large reads.

        `together`: all missed rows of an expert lie side by side.
        """
        reads, missed = self.reads, missed.astype(object)  # the products do not fit into 64 bits
        rows = min(self.work.decoder.d_ff, max(1, PIECE_NBYTES // row)) if together else 1
        times = missed * reads.row_ps(rows * row) // rows + np.minimum(missed, ROW) * reads.latency_ps(rows * row)
        times >>= ROW_BITS
        most = [reads.range_ps(int(n)) for n in np.broadcast_to(whole, missed.shape)]
        found: Ints = np.minimum(times, most).astype(np.int64)
        return found


@dataclass(frozen=True, eq=False)
class _Division:
    """Neurons of a layer on the GPU, pinned, and cached, of each of some divisions."""

    cut: Ints
    pinned: Ints
    cached: Ints


def _with_experts(compute: Ints, disk: Ints, missed_share: Ints, experts: int) -> Ints:
    """Picoseconds of computing and reading a token's experts, by the mean over how many are missed."""
    missed, there = (some.astype(object) for some in (missed_share, ONE - missed_share))
    total = np.zeros_like(missed)
    for m in range(experts + 1):
        chance = math.comb(experts, m) * missed**m * there ** (experts - m)
        reading = disk.astype(object) * (m * ONE) // (experts * np.maximum(missed, 1))
        total += chance * (np.maximum(reading, compute * (experts - m) // experts) + compute * m // experts)
    found: Ints = (total >> (SHARE_BITS * experts)).astype(np.int64)
    return found


def _non_dominated(options: RowOptions) -> Ints:
    """Indices of the options that none with the same cut beats in bytes and time."""
    total = options.cpu_ps + options.disk_ps
    order = np.lexsort((options.cached, total, options.nbytes, -options.cuts))
    kept, best, cut = [], 0, -1
    for i in order.tolist():
        if options.cuts[i] != cut:
            cut, best = int(options.cuts[i]), 1 << 62
        if total[i] < best:
            best = int(total[i])
            kept.append(i)
    return np.array(kept, np.int64)
