"""Running an artifact that is larger than memory: FFN rows come from the file when they are needed.

    for each layer:  attention → names of neurons → rows that are missing → the FFN in parts, while the next rows come

The kernels are those of a run in memory, and sums have the same order. So the text is the same to the last bit, at any
budget. A layer whose rows are all in memory is computed in one call, as in a run in memory.

Shape letters: T tokens, D model width, L layers, X experts, W columns of the weight table, N tokens that take one
expert, I neurons, C chunks, F neurons of one expert.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numba
import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, FEW_TOKENS, padded_width
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import ROW_ARRAYS, TWO_PHASES_FROM, read_nbytes
from pi_runtime.artifact.schema import Manifest
from pi_runtime.disk.arena import ResidentArrays, RowArena
from pi_runtime.disk.ram_plan import RamPlan, batch_rows, fixed_bytes, plan_for, sequence_kv_bytes
from pi_runtime.disk.reader import Reader
from pi_runtime.disk.row_store import Request, RowStore
from pi_runtime.execution.cpu import CpuModel, HostExecutor, tokens_of
from pi_runtime.execution.devices import resident_bytes
from pi_runtime.execution.disk_ahead import ReadAhead, tokens_by_expert
from pi_runtime.execution.disk_prompt import PromptReader
from pi_runtime.execution.executor import DiskStats, Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.pages import Allowance
from pi_runtime.kernels import ffn_parts
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.neuron_chunks import chunks_of
from pi_runtime.kernels.forward import after_ffn, attention, embed, head
from pi_runtime.kernels.moe import ffn_of_experts
from pi_runtime.kernels.ops.neuron_selection import inputs_of

KERNEL_NBYTES, PARTS_NBYTES = 96 << 20, 16 << 20
"""Room for kernels and libraries that every run loads when it begins, and for kernels of the FFN in parts."""
_COLUMNS = {
    "first": (weight_table.FIRST, weight_table.FIRST_SLOTS),
    "rest": (weight_table.REST, weight_table.REST_SLOTS),
}


class DiskExecutor(HostExecutor):
    """Runs one artifact on the CPU within a budget of memory; see `ram_plan`. Close it, or its threads stay."""

    device_name = "cpu"
    disk: DiskStats

    def __init__(
        self, artifact: Artifact, mode: str, context: int, threads: int, cache: str, plan: RamPlan, reader: Reader,
        kv_nbytes: int,
    ) -> None:  # fmt: skip
        """`reader` reads the artifact's file, with room for `ram_plan.batch_rows` rows; it is closed with this.

        `kv_nbytes`: bytes that keys and values of all sequences may take.
        """
        self.plan, self.reader, self.kv = plan, reader, Allowance(kv_nbytes)
        self._model = model = CpuModel(ResidentArrays(artifact, reader), mode, context, threads, cache, self.kv)
        self.context, self.neurons = context, model.neurons
        self.rows = RowStore(artifact, plan, reader)
        for name, arena in self.rows.arenas.items():
            self._point_to(name, arena)
        d = artifact.manifest.decoder
        self._whole_L = np.array([self.rows.is_whole(layer) for layer in range(d.n_layers)])
        self.block_tokens = BLOCK_TOKENS if self._whole_L.all() else plan.block_tokens
        self._all_F = np.arange(d.d_ff)
        self._named_F, self._fire_F = np.empty(d.d_ff + 1, np.int64), np.empty(d.d_ff + 1, np.int64)
        self._carried_TD = np.zeros((BLOCK_TOKENS, padded_width(d.d_model)), np.float32)
        self._parts = chunks_of(model.cfg, model.workspace), inputs_of(model.workspace)
        self._prompts = PromptReader(model, self.rows, self.block_tokens)
        self._ahead = ReadAhead(model, self.rows)
        self._spared_L = np.zeros(d.n_layers)
        self._rest_share = self.rows.arenas["rest"].nbytes / sum(a.nbytes for a in self.rows.arenas.values())
        self._running = False
        self.disk = DiskStats()
        self.fixed_now = partial(fixed_bytes_of, artifact.manifest, context, cache, kv_nbytes)
        """What `plan.fixed` would be for this model in the process as it is now."""

    def _point_to(self, name: str, arena: RowArena) -> None:
        """Tell the kernels where the rows of an array are: in slots, or in order where all of them are in memory."""
        values, slots = _COLUMNS[name]
        for layer, w_XW in enumerate(self._model.table_LXW):
            for expert, w in enumerate(w_XW):
                first = expert * self._model.cfg.d_ff
                if arena.whole_L[layer]:
                    w[values], w[slots] = arena.address_of(layer, first), 0
                else:
                    w[values], w[slots] = arena.address, arena.rows_L[layer].slot_N[first:].ctypes.data

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
        self._running = True
        before, began = self._counted(), time.perf_counter()
        results = self._computed(sequences)
        self._running = False
        tokens = sum(len(s.tokens) for s in sequences)
        if all(s.select for s in sequences) and tokens <= FEW_TOKENS:
            self._count(self._counted() - before, tokens, time.perf_counter() - began)
        return results

    def _computed(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        m, ws = self._model, self._model.workspace
        if self._whole_L.all():
            return m.run(sequences)
        numba.set_num_threads(m.threads)
        if len(sequences[0].tokens) > BLOCK_TOKENS:
            x_ND = self._prompts.run(sequences[0])
        else:
            x_ND = self._run_block(sequences)
        head(m.cfg, m.ends, m.eps, x_ND, ws, ws.logits_TV[: len(x_ND)])
        return m.finished(sequences)

    def _counted(self) -> DiskStats:
        return DiskStats(0, 0.0, self.reader.seconds_waited, *self.rows.hits_and_misses(), self.reader.bytes_read)

    def _count(self, found: DiskStats, tokens: int, seconds: float) -> None:
        """Count what a step with a few tokens took, and learn from it how to run the next ones."""
        read_L, kept_L = self._model.workspace.counts_LT3[:, :tokens, 1:].sum(1).T
        self._spared_L += 0.1 * (1 - kept_L / np.maximum(read_L, 1) - self._spared_L)
        self._ahead.way.count(seconds / tokens)
        there = int((read_L + kept_L)[self._whole_L].sum())
        self.disk += replace(found, tokens=tokens, seconds=seconds, hits=found.hits + there)

    def _run_block(self, sequences: Sequence[SequenceStep]) -> Floats:
        """Run the tokens of some sequences, at most `BLOCK_TOKENS` in all; returns the residuals of those whose logits
        are wanted."""
        m, ws = self._model, self._model.workspace
        tokens_T, at, select_T, wanted_N = tokens_of(sequences)
        tokens, count_all = len(tokens_T), sequences[0].count
        x_TD = ws.x_TD[:tokens]
        embed(m.cfg, m.ends, tokens_T, at.position_T, ws, x_TD)
        for layer, w_XW in enumerate(m.table_LXW):
            attention(m.cfg, w_XW[0], m.eps, m.cos_SJ, m.sin_SJ, at, layer, x_TD, ws)
            if self._whole_L[layer]:
                call = ws.normed_TD[:tokens], select_T, count_all, ws, ws.counts_LT3[layer, :tokens], x_TD
                ffn_of_experts(m.cfg, w_XW, *call)
            else:
                self._ffn(layer, w_XW, select_T, count_all, x_TD)
            after_ffn(m.cfg, w_XW[0], m.eps, x_TD)
        return x_TD[wanted_N]

    def _ffn(self, layer: int, w_XW: Ints, select_T: Ints, count_all: bool, y_TD: Floats) -> None:
        """y ← y + the FFN of a layer: `moe.ffn_of_experts` in parts."""
        m, ws, tokens = self._model, self._model.workspace, len(y_TD)
        x_TD, tally_T3 = ws.normed_TD[:tokens], ws.counts_LT3[layer, :tokens]
        ffn_parts.prepare(m.cfg, w_XW[0], x_TD, ws)
        tally_T3[:] = 0
        taken = tokens_by_expert(ws, tokens, m.cfg.experts)
        for expert, token_N, weight_N in taken:
            if tokens > FEW_TOKENS or count_all:
                self._expert_of_many(layer, expert, token_N, select_T[token_N], weight_N, count_all, y_TD)
            else:
                is_last = expert == taken[-1][0]
                self._expert_of_few(layer, expert, token_N, select_T, weight_N, is_last, y_TD)
            ffn_parts.add_counts(self._parts[0], token_N, tally_T3)
        self.rows.end_layer(layer)

    def _named(self, layer: int, expert: int, token_N: Ints, select_N: Ints, count_all: bool) -> Ints:
        """The neurons that some tokens may need of an expert."""
        m, cfg = self._model, self._model.cfg
        x_TD = m.workspace.normed_TD[: token_N[-1] + 1]
        call = token_N, select_N, *self._parts, self._named_F
        count = ffn_parts.name_neurons(cfg, m.table_LXW[layer, expert], x_TD, *call)
        return self._all_F if count_all or count == cfg.d_ff else self._named_F[:count]

    def _expert_of_many(
        self, layer: int, expert: int, token_N: Ints, select_N: Ints, weight_N: Floats, count_all: bool, y_TD: Floats
    ) -> None:
        """y ← y + one expert's FFN for its tokens: all rows that they name, chunks in order."""
        cfg, parts, w = self._model.cfg, self._parts, self._model.table_LXW[layer, expert]
        named_I = self._named(layer, expert, token_N, select_N, count_all)
        request = Request(layer, expert, [(name, named_I) for name in ROW_ARRAYS])
        for part in self.rows.ranges([request], keep=bool(select_N.any())):
            call = token_N, select_N, weight_N, count_all, part.begin, part.end, self._carried_TD, y_TD
            ffn_parts.add_chunks(cfg, w, *parts, *call)

    def _expert_of_few(
        self, layer: int, expert: int, token_N: Ints, select_T: Ints, weight_N: Floats, is_last: bool, y_TD: Floats
    ) -> None:
        """y ← y + one expert's FFN for its tokens: what fires is listed while rows of `rest` still come."""
        cfg, parts, w = self._model.cfg, self._parts, self._model.table_LXW[layer, expert]
        select_N = select_T[token_N]
        named_I, keep = self._named(layer, expert, token_N, select_N, False), bool(select_N.any())
        requests = [Request(layer, expert, [("first", named_I)])]
        if self._two_phases(layer):
            for part in self.rows.ranges(requests, keep):
                ffn_parts.list_chunks(cfg, w, *parts, token_N, select_N, part.begin, part.end)
            fire_I = self._fire_F[: ffn_parts.firing(cfg, parts[0], len(token_N), self._fire_F)]
            requests = [Request(layer, expert, [("rest", fire_I)])]
        else:
            requests.append(Request(layer, expert, [("rest", named_I)]))
        ranges = self.rows.ranges(requests, keep)
        if is_last and bool(select_T.any()) and self._ahead.pays(layer + 1):
            # Behind this layer's rows, so that the disk has work while these are waited for.
            self._ahead.read(layer + 1, ROW_ARRAYS[:1] if self._two_phases(layer + 1) else ROW_ARRAYS, y_TD, select_T)
        for part in ranges:
            if part.request.has("first"):
                ffn_parts.list_chunks(cfg, w, *parts, token_N, select_N, part.begin, part.end)
            else:
                ffn_parts.sum_chunks(cfg, w, *parts, token_N, weight_N, part.begin, part.end)
        ffn_parts.merge(cfg, parts[0], token_N, y_TD)

    def _two_phases(self, layer: int) -> bool:
        """Whether a layer's `rest` is read only when it is known what fires: on the gate rung, or where that saves."""
        return self.plan.two_phases_L[layer] or self._spared_L[layer] * self._rest_share >= TWO_PHASES_FROM

    @property
    def kv_room(self) -> int:
        """Bytes that further keys and values may take."""
        return self.kv.left

    def _release(self) -> None:
        self.rows.arenas.clear()


def fixed_bytes_of(manifest: Manifest, context: int, cache: str, kv_nbytes: int) -> int:
    """Bytes of a run in this process that no division of its budget changes."""
    # They are loaded once for all models.
    kernels = KERNEL_NBYTES * (not embed.signatures) + PARTS_NBYTES * (not ffn_parts.merge.signatures)
    return fixed_bytes(manifest, context, cache, BLOCK_TOKENS, resident_bytes() + kernels + kv_nbytes)


def open_from_disk(
    artifact: Artifact, mode: str, context: int, threads: int, cache: str, budget: int, kv_budget: int | None = None
) -> DiskExecutor:
    """Run an artifact within a budget of memory, divided by `ram_plan.plan_for`.

    `kv_budget`: bytes of it for keys and values of all sequences; None: as many as one sequence takes. Raises
    DoesNotFitError naming the smallest budget that fits.
    """
    kv_nbytes = sequence_kv_bytes(artifact.manifest, context, cache) if kv_budget is None else kv_budget
    plan = plan_for(artifact, mode, budget, fixed_bytes_of(artifact.manifest, context, cache, kv_nbytes))
    reader = Reader(artifact.path, batch_rows(plan.staged), piece=read_nbytes(artifact.manifest.decoder))
    try:
        return DiskExecutor(artifact, mode, context, threads, cache, plan, reader, kv_nbytes)
    except BaseException:
        reader.close()
        raise
