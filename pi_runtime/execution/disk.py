"""Running an artifact that is larger than memory: FFN rows come from the file when they are needed.

    for each layer:  attention → names of neurons → rows that are missing → the FFN in parts, while the next rows come

The kernels are those of a run in memory, and sums have the same order. So the text is the same to the last bit, at any
budget.

Shape letters: T tokens, D model width, L layers, X experts, W columns of the weight table, N tokens that take one
expert, I neurons, C chunks, F neurons of one expert.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numba
import numpy as np

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, padded_width
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.row_memory import TWO_PHASES_FROM
from pi_runtime.disk.arena import ResidentArrays, RowArena
from pi_runtime.disk.ram_plan import ROW_ARRAYS, RamPlan, batch_rows, fixed_bytes, plan_for
from pi_runtime.disk.reader import Reader
from pi_runtime.disk.row_store import REGIONS, Request, RowStore
from pi_runtime.execution.cpu import CpuModel, positions_of, tokens_of
from pi_runtime.execution.devices import free_memory, resident_bytes
from pi_runtime.execution.executor import DiskStats, Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagePool
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.kernels import ffn_parts
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.neuron_chunks import chunks_of
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS, allocate_workspace
from pi_runtime.kernels.forward import Positions, after_ffn, attention, embed, head
from pi_runtime.kernels.ops.linear import norm
from pi_runtime.kernels.ops.neuron_selection import inputs_of

KERNEL_NBYTES = 96 << 20
"""Room for compiled kernels and libraries, which are loaded when they are first called."""
MARGIN = 0.1
"""Share of the free memory that a budget of nobody's choice leaves to others."""
_COLUMNS = {
    "first": (weight_table.FIRST, weight_table.FIRST_SLOTS),
    "rest": (weight_table.REST, weight_table.REST_SLOTS),
}


class FasterWay:
    """Which of two ways is faster, by the seconds they took; the other one is tried again now and then."""

    TRIED, PERIOD = 4, 64
    """So many tokens in a row of each so many try the way that was slower."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]
        self._tokens = 0

    @property
    def second(self) -> bool:
        """Whether the next token goes the second way."""
        if self._tokens < 2 * self.TRIED:
            return self._tokens >= self.TRIED
        faster = self._seconds[1] < self._seconds[0]
        return faster != (self._tokens % self.PERIOD < self.TRIED)

    def count(self, seconds: float) -> None:
        """Count a token that went as `second` says."""
        way = int(self.second)
        before = self._seconds[way] or seconds
        self._seconds[way] = before + 0.25 * (seconds - before)
        self._tokens += 1


@dataclass(frozen=True)
class _Work:
    """A range of the chunks of one expert's FFN: the rows it needs, and what is then computed."""

    request: Request
    begin: int
    end: int
    compute: Callable[[int, int], None]


@dataclass(frozen=True)
class _Piece:
    """Up to `BLOCK_TOKENS` tokens of a long prompt, all of which go through a layer before the next one is read."""

    tokens_T: Ints
    at: Positions
    x_TD: Floats
    normed_TD: Floats
    carried_TD: Floats
    """Sums of the chunks of one expert that have been computed."""
    expert_TK: Ints
    route_weight_TK: Floats


class DiskExecutor:
    """Runs one artifact on the CPU within a budget of memory; see `ram_plan`. Close it, or its threads stay."""

    allocation: Allocation | None = None
    device_name = "cpu"
    notice: str | None = None

    def __init__(
        self, artifact: Artifact, mode: str, context: int, threads: int, cache: str, plan: RamPlan, reader: Reader
    ) -> None:
        """`reader` reads the artifact's file, with room for `ram_plan.batch_rows` rows; it is closed with this."""
        self.plan, self.reader = plan, reader
        self._model = model = CpuModel(ResidentArrays(artifact, reader), mode, context, threads, cache)
        self.context, self.neurons = context, model.neurons
        self.rows = RowStore(artifact, plan, reader)
        for name, arena in self.rows.arenas.items():
            self._point_to(name, arena)
        d = artifact.manifest.decoder
        self._all_I = np.arange(d.d_ff)
        self._named_F, self._fire_F = np.empty(d.d_ff + 1, np.int64), np.empty(d.d_ff + 1, np.int64)
        self._carried_TD = np.zeros((BLOCK_TOKENS, padded_width(d.d_model)), np.float32)
        self._parts = chunks_of(model.cfg, model.workspace), inputs_of(model.workspace)
        self.block_tokens, k = plan.block_tokens, d.experts_per_token
        self._block = {
            name: np.ones((self.block_tokens if self.block_tokens > BLOCK_TOKENS else 0, width), dtype)
            for name, width, dtype in (
                ("x_TD", d.d_model, np.float32),
                ("normed_TD", d.d_model, np.float32),
                ("carried_TD", padded_width(d.d_model), np.float32),
                ("expert_TK", k, np.int64),
                ("route_weight_TK", k, np.float32),
            )
        }
        self._ahead_ws = allocate_workspace(d, model.largest_rank, FEW_TOKENS)
        self._ahead_parts = chunks_of(model.cfg, self._ahead_ws), inputs_of(self._ahead_ws)
        self._ahead_F, self._reads_ahead = np.empty(d.d_ff + 1, np.int64), FasterWay()
        self._spared_L = np.zeros(d.n_layers)
        self._rest_share = self.rows.arenas["rest"].nbytes / sum(a.nbytes for a in self.rows.arenas.values())
        self._running = False
        self.disk = DiskStats()

    def _point_to(self, name: str, arena: RowArena) -> None:
        """Tell the kernels where the rows of an array are."""
        values, slots = _COLUMNS[name]
        for w_XW, rows in zip(self._model.table_LXW, arena.rows_L, strict=True):
            w_XW[:, values] = arena.address
            for expert, w in enumerate(w_XW):
                w[slots] = rows.slot_N[expert * self._model.cfg.d_ff :].ctypes.data

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences: rows are read once for as many as a call takes."""
        return self._model.step(sequences, self._run, self.block_tokens)

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        s = sequences[0]
        if len(s.tokens) > BLOCK_TOKENS and s.select:  # each token gets the bits that it gets alone
            parts = np.split(s.tokens, range(BLOCK_TOKENS, len(s.tokens), BLOCK_TOKENS))
            return [self._run([replace(s, tokens=part_T)]) for part_T in parts][-1]
        if self._running:  # an earlier call ended in an exception
            self.rows.recover()
        self.reader.check_unchanged()
        self._running = True
        numba.set_num_threads(self._model.threads)
        before, began = self._counted(), time.perf_counter()
        if len(s.tokens) > BLOCK_TOKENS:
            self._run_prompt(s)
        else:
            self._run_block(sequences)
        self._running = False
        results = self._model.finished(sequences)
        tokens = sum(len(s.tokens) for s in sequences)
        if all(s.select for s in sequences) and tokens <= FEW_TOKENS:
            found = replace(self._counted() - before, tokens=tokens, seconds=time.perf_counter() - began)
            read_L, kept_L = self._model.workspace.counts_LT3[:, :tokens, 1:].sum(1).T
            self._spared_L += 0.1 * (1 - kept_L / np.maximum(read_L, 1) - self._spared_L)
            self._reads_ahead.count(found.seconds / tokens)
            self.disk += found
        return results

    def _counted(self) -> DiskStats:
        return DiskStats(0, 0.0, self.reader.seconds_waited, *self.rows.hits_and_misses(), self.reader.bytes_read)

    def _run_block(self, sequences: Sequence[SequenceStep]) -> None:
        """Run the tokens of some sequences, at most `BLOCK_TOKENS` in all; the results are left in the workspace."""
        m, ws = self._model, self._model.workspace
        tokens_T, at, select_T, wanted_N = tokens_of(sequences)
        x_TD = ws.x_TD[: len(tokens_T)]
        embed(m.cfg, m.ends, tokens_T, at.position_T, ws, x_TD)
        for layer, w_XW in enumerate(m.table_LXW):
            attention(m.cfg, w_XW[0], m.eps, m.cos_SJ, m.sin_SJ, at, layer, x_TD, ws)
            self._ffn(layer, w_XW, select_T, sequences[0].count, x_TD)
            after_ffn(m.cfg, w_XW[0], m.eps, x_TD)
        self._head(x_TD[wanted_N])

    def _head(self, x_ND: Floats) -> None:
        """Logits of some tokens."""
        m, ws = self._model, self._model.workspace
        head(m.cfg, m.ends, m.eps, x_ND, ws, ws.logits_TV[: len(x_ND)])

    def _run_prompt(self, s: SequenceStep) -> None:
        """Run a long piece of a prompt, with every neuron: each row is read once, while others are computed."""
        m, ws = self._model, self._model.workspace
        pieces = list(self._pieces(s))
        for p in pieces:
            embed(m.cfg, m.ends, p.tokens_T, p.at.position_T, ws, p.x_TD)
        needs = [(name, self._all_I) for name in ROW_ARRAYS]
        works: list[_Work] = []
        for layer, expert in product(range(len(m.table_LXW)), range(m.cfg.experts)):
            add = partial(self._add_to_pieces, pieces, layer, expert)
            works += self._works(Request(layer, expert, needs), add)
        self._work_off(works, keep=False)
        for p in pieces:
            after_ffn(m.cfg, m.table_LXW[-1, 0], m.eps, p.x_TD)
        self._head(pieces[-1].x_TD[-1:].copy())

    def _pieces(self, s: SequenceStep) -> Iterator[_Piece]:
        for first in range(0, len(s.tokens), BLOCK_TOKENS):
            tokens_T = s.tokens[first : first + BLOCK_TOKENS]
            at = positions_of([(len(tokens_T), s.cache.length + first, s.cache)])
            rows = slice(first, first + len(tokens_T))
            yield _Piece(tokens_T, at, **{name: memory[rows] for name, memory in self._block.items()})

    def _add_to_pieces(self, pieces: Sequence[_Piece], layer: int, expert: int, begin: int, end: int) -> None:
        """Add the sums of an expert's chunks [begin, end) for a long prompt. A layer begins with its attention."""
        m, ws, parts = self._model, self._model.workspace, self._parts
        w = m.table_LXW[layer, expert]
        if begin == 0 and expert == 0:
            for p in pieces:
                if layer > 0:
                    after_ffn(m.cfg, m.table_LXW[layer - 1, 0], m.eps, p.x_TD)
                attention(m.cfg, w, m.eps, m.cos_SJ, m.sin_SJ, p.at, layer, p.x_TD, ws)
                p.normed_TD[:] = ws.normed_TD[: len(p.x_TD)]
                if m.cfg.experts > 1:
                    p.expert_TK[:] = ws.expert_TK[: len(p.x_TD)]
                    p.route_weight_TK[:] = ws.route_weight_TK[: len(p.x_TD)]
        for p in pieces:
            token_N, slot_N = map(np.ascontiguousarray, np.nonzero((p.expert_TK == expert) | (m.cfg.experts == 1)))
            if len(token_N) == 0:
                continue
            none_N, weight_N = np.zeros(len(token_N), np.int64), p.route_weight_TK[token_N, slot_N]
            ffn_parts.prepare(m.cfg, w, p.normed_TD, ws)
            ffn_parts.name_neurons(m.cfg, w, p.normed_TD, token_N, none_N, *parts, self._named_F)
            call = token_N, none_N, weight_N, False, begin, end, p.carried_TD, p.x_TD
            ffn_parts.add_chunks(m.cfg, w, *parts, *call)

    def _ffn(self, layer: int, w_XW: Ints, select_T: Ints, count_all: bool, y_TD: Floats) -> None:
        """y ← y + the FFN of a layer: `moe.ffn_of_experts` in parts."""
        m, ws, tokens = self._model, self._model.workspace, len(y_TD)
        x_TD, tally_T3 = ws.normed_TD[:tokens], ws.counts_LT3[layer, :tokens]
        ffn_parts.prepare(m.cfg, w_XW[0], x_TD, ws)
        tally_T3[:] = 0
        for expert, w in enumerate(w_XW):
            if m.cfg.experts == 1:
                token_N, select_N, weight_N = ws.token_T[:tokens], select_T, ws.one_T[:tokens]
            else:
                token_N, slot_N = map(np.ascontiguousarray, np.nonzero(ws.expert_TK[:tokens] == expert))
                select_N, weight_N = select_T[token_N], ws.route_weight_TK[token_N, slot_N]
            if len(token_N):
                self._expert(layer, expert, w, x_TD, token_N, select_N, weight_N, count_all, y_TD)
                ffn_parts.add_counts(self._parts[0], token_N, tally_T3)

    def _expert(
        self,
        layer: int,
        expert: int,
        w: Ints,
        x_TD: Floats,
        token_N: Ints,
        select_N: Ints,
        weight_N: Floats,
        count_all: bool,
        y_TD: Floats,
    ) -> None:
        """y ← y + one expert's FFN for the tokens that take it: `ffn.add_expert` in parts."""
        cfg, parts, few = self._model.cfg, self._parts, len(token_N) <= FEW_TOKENS
        named = ffn_parts.name_neurons(cfg, w, x_TD, token_N, select_N, *parts, self._named_F)
        named_I = self._all_I if count_all or named == cfg.d_ff else self._named_F[:named]
        keep, both = bool(select_N.any()), [(name, named_I) for name in ROW_ARRAYS]
        first, rest = (Request(layer, expert, [needs]) for needs in both)
        ahead = self._ahead_of(layer) if few and keep and not count_all else None

        def add(begin: int, end: int) -> None:
            call = token_N, select_N, weight_N, count_all, begin, end, self._carried_TD, y_TD
            ffn_parts.add_chunks(cfg, w, *parts, *call)

        def list_firing(begin: int, end: int) -> None:
            ffn_parts.list_chunks(cfg, w, *parts, token_N, select_N, begin, end)
            if end == CHUNKS and ahead is not None:
                ahead(y_TD, token_N, select_N)

        def sum_up(begin: int, end: int) -> None:
            ffn_parts.sum_chunks(cfg, w, *parts, token_N, weight_N, begin, end)

        if count_all or not few:
            self._work_off(self._works(Request(layer, expert, both), add), keep)
        elif self._two_phases(layer):
            listing = self._works(first, list_firing)
            self.rows.wait_ahead(layer)
            self._work_off(listing, keep)
            fire_I = self._fire_F[: ffn_parts.firing(cfg, parts[0], len(token_N), self._fire_F)]
            self._work_off(self._works(Request(layer, expert, [("rest", fire_I)]), sum_up), keep)
        else:
            works = [*self._works(first, list_firing), *self._works(rest, sum_up)]
            self.rows.wait_ahead(layer)
            self._work_off(works, keep)
        self.rows.end_layer(layer)
        if few and not count_all:
            ffn_parts.merge(cfg, parts[0], token_N, y_TD)

    def _ahead_of(self, layer: int) -> Callable[[Floats, Ints, Ints], None] | None:
        """What reads rows of the next layer ahead, where its predictor can be asked before its turn."""
        cfg, table = self._model.cfg, self._model.table_LXW
        possible = self._reads_ahead.second and layer + 1 < len(table) and cfg.experts == 1
        if not possible or cfg.block == weight_table.POST_NORM or table[layer + 1, 0, weight_table.SELECTOR] == 0:
            return None
        return partial(self._read_ahead, layer + 1)

    def _read_ahead(self, layer: int, x_TD: Floats, token_N: Ints, select_N: Ints) -> None:
        """Name a layer's neurons by the residual as it is now, which the steps before that layer change little."""
        m, ws, w = self._model, self._ahead_ws, self._model.table_LXW[layer, 0]
        normed_TD = ws.normed_TD[: len(x_TD)]
        own = w[weight_table.FFN_NORM] != 0
        weight = (
            (weight_table.FFN_NORM, weight_table.FFN_NORM_BIAS)
            if own
            else (weight_table.ATTENTION_NORM, weight_table.ATTENTION_NORM_BIAS)
        )
        norm(m.cfg.centred, m.eps, *w[list(weight)].tolist(), x_TD, normed_TD)
        ffn_parts.prepare(m.cfg, w, normed_TD, ws)
        named = ffn_parts.name_neurons(m.cfg, w, normed_TD, token_N, select_N, *self._ahead_parts, self._ahead_F)
        named_I = self._ahead_F[:named]
        arrays = ROW_ARRAYS[:1] if self._two_phases(layer) else ROW_ARRAYS
        self.rows.read_ahead(Request(layer, 0, [(name, named_I) for name in arrays]))

    def _two_phases(self, layer: int) -> bool:
        """Whether a layer's `rest` is read only when it is known what fires: on the gate rung, or where that saves."""
        return self.plan.two_phases_L[layer] or self._spared_L[layer] * self._rest_share >= TWO_PHASES_FROM

    def _works(self, request: Request, compute: Callable[[int, int], None]) -> list[_Work]:
        """Cut a computation into ranges of chunks whose missing rows have room."""
        return [_Work(request, begin, end, compute) for begin, end in self.rows.ranges(request)]

    def _work_off(self, works: Sequence[_Work], keep: bool) -> None:
        """Compute ranges in order, each while the rows of the next one are read."""
        for n in range(-1, len(works)):
            if n + 1 < len(works):
                following = works[n + 1]
                self.rows.fetch(following.request, following.begin, following.end, (n + 1) % REGIONS, keep)
            if n >= 0:
                self.rows.wait(n % REGIONS)
                works[n].compute(works[n].begin, works[n].end)
                self.rows.release(works[n].request, n % REGIONS)

    def new_pool(self, budget: int | None = None) -> PagePool:
        """Pages for caches of some sequences, together at most `budget` bytes."""
        return self._model.new_pool(budget)

    def new_cache(self, pool: PagePool | None = None) -> KVCache:
        """An empty cache for one sequence, in pages of a pool, or with a pool of its own."""
        return self._model.new_cache(pool)

    def close(self) -> None:
        """Close the artifact and the reader, and free the rows; `step` refuses from now on."""
        with ONE_AT_A_TIME:
            self._model.close()
            self.rows.arenas.clear()


def budget_of_machine(artifact: Artifact) -> int | None:
    """The budget that keeps a run within free memory, where its file is larger than that; else None."""
    free = free_memory()
    if free is None or artifact.nbytes <= free:
        return None
    return int(free * (1 - MARGIN)) + resident_bytes()


def open_from_disk(artifact: Artifact, mode: str, context: int, threads: int, cache: str, budget: int) -> DiskExecutor:
    """Run an artifact within a budget of memory, divided by `ram_plan.plan_for`.

    Raises DoesNotFitError naming the smallest budget that fits.
    """
    process = resident_bytes() + (0 if ffn_parts.merge.signatures else KERNEL_NBYTES)  # once for all models
    fixed = fixed_bytes(artifact.manifest, context, cache, BLOCK_TOKENS, process)
    plan = plan_for(artifact, mode, budget, fixed)
    reader = Reader(artifact.path, batch_rows(plan.transit))
    try:
        return DiskExecutor(artifact, mode, context, threads, cache, plan, reader)
    except BaseException:
        reader.close()
        raise
