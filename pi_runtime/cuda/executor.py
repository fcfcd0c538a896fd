"""Opens an artifact on a GPU, by the plan that fits its budget, and runs it there and on the CPU together.

Shape letters: L layers, X experts, D model width, V vocabulary, T tokens, M tokens that are decoded together, J pairs
of columns that are rotated.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numba
import numpy as np

from pi_runtime.artifact.buffers import kv_cache
from pi_runtime.artifact.features import refuse_lacking
from pi_runtime.artifact.gpu_buffers import host_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer, Manifest
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.decode.schedule import FfnInputs, build_schedule
from pi_runtime.cuda.memory import weights
from pi_runtime.cuda.memory.devices import Cuda, Device, Op, allocate
from pi_runtime.cuda.memory.handover import PinnedBuffers
from pi_runtime.cuda.memory.kv_residency import KVResidency
from pi_runtime.cuda.memory.weights import STAGING_NBYTES, WeightStreamer
from pi_runtime.cuda.memory.workspace import DeviceWorkspace
from pi_runtime.cuda.prefill.prefill import Prefill, measured_crossover
from pi_runtime.errors import Setting, size
from pi_runtime.execution.executor import DiskStats, Floats, Ints, Observer, SequenceResult, SequenceStep
from pi_runtime.execution.host import CpuModel, token_blocks
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagePool
from pi_runtime.execution.plan_choice import Allocation, choose_plan
from pi_runtime.execution.plan_layout import GPU, cuts_of, placed_arrays
from pi_runtime.execution.rows import MemoryRows
from pi_runtime.kernels.codegen.threads import SPIN_BESIDE_GPU, advance_progress, start_threads


@dataclass(frozen=True)
class Decoding:
    """The schedule of so many tokens that are decoded together."""

    host_ops: HostOps
    runs: tuple[Op, ...]


class CudaExecutor:
    """Decodes by a schedule of calls (see `schedule`); reads prompts dense, in large blocks (see `prefill`).

    Sequences of a step that bring one token with selection are decoded together, up to `Allocation.batch_tokens` and to
    as many as the GPU's pages of keys and values hold; a token's bits do not depend on the others. Other sequences run
    one after the other.

    Logits at every position with selection, as evaluation needs them, are those of decoding: token by token where
    somebody looks on at the FFNs.
    """

    def __init__(
        self,
        artifact: Artifact,
        mode: str,
        threads: int,
        allocation: Allocation,
        device: Device,
        progress: Callable[[int, int], None] | None = None,
        stream_from: int | None = None,
        rows: MemoryRows | None = None,
    ) -> None:
        """`rows`: the CPU's part within a budget of RAM, whose host is closed with this; None: it is in memory."""
        plan, context = allocation.plan, allocation.context
        self.rows = MemoryRows(CpuModel(artifact, mode, context, threads)) if rows is None else rows
        self._host = self.rows.host
        self.allocation, self.context, self.neurons = allocation, context, self._host.neurons
        self.block_tokens = allocation.block_tokens
        self.device, self.device_name = device, device.name
        self.notice: str | None = None
        self.guess_head, self.keeps_states = None, False
        layers = layers_in_mode(artifact.manifest, mode)
        manifest, d = artifact.manifest, artifact.manifest.decoder
        device.limit(max(allocation.budget, allocation.total))
        loaded = weights.load(artifact, placed_arrays(manifest, plan), device, progress)
        numba.set_num_threads(threads)  # starts the threads, which kernels from the cache rely on
        with device.stream():
            on_gpu = [layer for layer, side in enumerate(plan.attention) if side == GPU]
            table = {"cache": kv_cache(d, manifest.formats["attention"], context, len(on_gpu))}
            cache = dict(zip(on_gpu, allocate(table, device)["cache"], strict=True))
            most = allocation.batch_tokens
            self._pinned = PinnedBuffers.allocate(d, context, most, device)
            workspace = DeviceWorkspace.allocate(d, self._host.largest_rank, context, most, device)
            cuts = cuts_of(plan, d)
            self._all_device_ops = DeviceOps(d, layers, cuts, loaded, device, workspace, cache, self._pinned)
            self.device_ops = self._all_device_ops.for_tokens(1)
            self.host_ops = HostOps(self.rows, layers, cuts, self._pinned, 1)
            self._kv_residency = KVResidency(cache, device)
            self._inputs = FfnInputs(self.device_ops, self.host_ops, device)
            empty = self.new_cache()
            empty.reserve(1)  # building the schedule runs a token
            self.host_ops.move_to([empty], np.zeros(1, np.int64))
            self.calls = build_schedule(plan, self.device_ops, self.host_ops, device)
            device.synchronize()
            for values in cache.values():
                values.zero_()
        self._prefill = self._make_prefill(artifact, stream_from)
        self._schedules = {1: Decoding(self.host_ops, tuple(call.run for call in self.calls))}
        self._observed_runs: tuple[Op, ...] = ()
        always = (c.hot if d.n_experts == 1 else 0 for c in cuts)
        self._implied_L2 = np.array([_implied_rows(how, cut) for how, cut in zip(layers, always, strict=True)])
        self._device_rows_ML2 = self._pinned.rows_ML2.numpy()
        self._logits_MV = self._pinned.logits_MV.numpy() if plan.head == GPU else self._host.workspace.logits_TV

    @property
    def disk(self) -> DiskStats | None:
        return self.rows.disk

    @property
    def kv_room(self) -> int | None:
        return self.rows.kv_room

    @property
    def draft_tokens(self) -> int:
        return self.allocation.batch_tokens

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences: weights are read once for those that are decoded together."""
        # Steps are cut in order, so what decodes comes first.
        order = sorted(range(len(sequences)), key=lambda n: not _decodes(sequences[n]))
        with self._host.step([sequences[n] for n in order], self.block_tokens) as batches:
            results = [result for batch in batches for result in self._run_all(batch)]
        return [result for _, result in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])]

    def new_pool(self, budget: int | None = None) -> PagePool:
        """Pages for caches of some sequences, together at most `budget` bytes."""
        return self._host.new_pool(budget)

    def new_cache(self, pool: PagePool | None = None) -> KVCache:
        """An empty cache for one sequence, in pages of a pool, or with a pool of its own."""
        return self._host.new_cache(pool)

    def _run_all(self, sequences: list[SequenceStep]) -> list[SequenceResult]:
        """Run some sequences, of which those that decode come first, in batches; returns their results in order."""
        numba.set_num_threads(self._host.threads)
        results: list[SequenceResult] = []
        with self.device.stream(), self._synchronised_on_error(), self.rows.step():
            decoding = [s for s in sequences if _decodes(s)]
            while len(results) < len(decoding):
                some = decoding[len(results) :][: self.allocation.batch_tokens]
                results += self._decode_together(some[: self._kv_residency.fitting([s.cache for s in some])])
            results += [self._run(s) for s in sequences[len(decoding) :]]
        return results

    def _run(self, s: SequenceStep) -> SequenceResult:
        """Run one sequence that brings a prompt, or asks for the logits of all its tokens."""
        if s.select and s.observer is None:  # guesses, or tokens that others have run with selection
            parts = token_blocks(len(s.tokens), self.draft_tokens)
            found = [self._decode_together([replace(s, tokens=s.tokens[part])])[0].logits_TV for part in parts]
            return SequenceResult(logits_TV=np.concatenate(found) if s.logits == "all" else found[-1][-1:])
        if s.logits == "all":
            found_TV = self._all_logits(s) if s.observer is None else self._observed(s, s.observer)
            return SequenceResult(logits_TV=found_TV)
        self._place(self.host_ops, [s.cache], s.tokens[:1], len(s.tokens))
        self._prefill.run(s.tokens)
        s.cache.append(s.tokens, s.select)
        return SequenceResult(logits_TV=self._logits_MV[:1].copy())

    def _decode_together(self, sequences: list[SequenceStep]) -> list[SequenceResult]:
        """Decode a token of each of some sequences, which the GPU can hold at once, or some of a single one."""
        caches, token_M = [s.cache for s in sequences], np.concatenate([s.tokens for s in sequences])
        count, each = len(token_M), len(token_M) // len(caches)
        decoding = self._schedules.get(count)
        host_ops = self.host_ops.for_tokens(count) if decoding is None else decoding.host_ops
        self._place(host_ops, caches, token_M, each)
        if decoding is None:  # building it writes into the caches where these tokens will
            plan, device_ops = self.allocation.plan, self._all_device_ops.for_tokens(count)
            calls = build_schedule(plan, device_ops, host_ops, self.device)
            decoding = self._schedules[count] = Decoding(host_ops, tuple(call.run for call in calls))
        with self.rows.decoding(count):
            rows_ML2 = self._decode(decoding)
        for s in sequences:
            s.cache.append(s.tokens, s.select)
        found = zip(np.split(self._logits_MV[:count].copy(), len(caches)), rows_ML2[each - 1 :: each], strict=True)
        return [SequenceResult(logits_TV=logits_TV, rows_L2=rows_L2) for logits_TV, rows_L2 in found]

    def _all_logits(self, s: SequenceStep) -> Floats:
        """Logits of all tokens, which are read in dense blocks."""
        tokens, cache = s.tokens, s.cache
        logits_TV = np.empty((len(tokens), self.device_ops.decoder.vocab_size), np.float32)
        for part in token_blocks(len(tokens), self.block_tokens):
            self._place(self.host_ops, [cache], tokens[part][:1], part.stop - part.start)
            self._prefill.all_logits(tokens[part], logits_TV[part])
            cache.append(tokens[part], s.select)
        return logits_TV

    def _observed(self, s: SequenceStep, observer: Observer) -> Floats:
        """Logits of all tokens, decoded one by one; the inputs of their FFNs are shown when all have run."""
        tokens, cache, inputs_TLD = s.tokens, s.cache, []
        logits_TV = np.empty((len(tokens), self.device_ops.decoder.vocab_size), np.float32)
        for n in range(len(tokens)):
            self._place(self.host_ops, [cache], tokens[n : n + 1], 1)
            if not self._observed_runs:  # building it writes into the cache where this token will
                calls = build_schedule(self.allocation.plan, self.device_ops, self.host_ops, self.device, self._inputs)
                self._observed_runs = tuple(call.run for call in calls)
            self._decode(Decoding(self.host_ops, self._observed_runs))
            inputs_TLD.append(self._inputs.of_last.copy())
            logits_TV[n] = self._logits_MV[0]
            cache.append(tokens[n : n + 1], s.select)
        for layer, input_TD in enumerate(np.stack(inputs_TLD, axis=1)):
            observer.see(layer, input_TD, None)
        return logits_TV

    @contextlib.contextmanager
    def _synchronised_on_error(self) -> Iterator[None]:
        """Wait for the GPU if anything goes wrong within, so that the next call finds it idle."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.device.synchronize()
            raise

    def _place(self, host_ops: HostOps, caches: list[KVCache], token_M: Ints, positions: int) -> None:
        """Let both sides go on behind these sequences, with as many tokens each, or so many positions of one."""
        each = len(token_M) // len(caches)
        words = self._pinned.token_words.first(len(token_M))
        words.id_M.numpy()[:] = token_M
        words.position_M.numpy()[:] = np.concatenate([cache.length + np.arange(each) for cache in caches])
        table_ML = words.table_ML.numpy()
        self._kv_residency.acquire(caches, positions, table_ML[::each])
        table_ML[:] = np.repeat(table_ML[::each], each, 0)
        host_ops.move_to(caches, token_M)

    def _decode(self, decoding: "Decoding") -> Ints:
        """Run tokens through a schedule; returns for each (layers, 2) rows of `first` read and neurons kept."""
        for run in decoding.runs:
            run()
        advance_progress()
        rows_ML2 = decoding.host_ops.rows_ML2
        return rows_ML2 + self._device_rows_ML2[: len(rows_ML2)] + self._implied_L2

    def _make_prefill(self, artifact: Artifact, stream_from: int | None) -> Prefill:
        """A `Prefill`; it streams cold weights to the GPU if there are any, memory for them is left and it may pay."""
        d, plan, device = self.device_ops.decoder, self.allocation.plan, self.device
        streamer, first = None, 0
        if self.allocation.streamed and self.rows.are_in_memory:
            fmt = artifact.manifest.formats["ffn"]
            first = measured_crossover(d, fmt, self._host.threads, device) if stream_from is None else stream_from
            if first <= self.block_tokens:
                with device.stream():
                    streamer = WeightStreamer(artifact, device)
        with device.stream():
            return Prefill(self.device_ops, self.host_ops, plan, self.block_tokens, streamer, first)

    def close(self) -> None:
        """Close the artifact and free the GPU's memory; `step` refuses from now on."""
        if self._host.artifact is not None:
            # After a fault the GPU does not answer; the fault has been raised already.
            with contextlib.suppress(RuntimeError):
                self.device.synchronize()
                self._prefill.close()
            self._kv_residency.release()
            # Tensors, and the graphs that work in them, hold the GPU's memory.
            self.calls, self._schedules, self._observed_runs = (), {}, ()
            del self.device_ops, self._all_device_ops, self.host_ops, self._prefill, self._kv_residency, self._inputs
            with contextlib.suppress(RuntimeError):
                self.device.limit(None)
        self._host.close()
        self.rows.close()


def _decodes(s: SequenceStep) -> bool:
    """Whether a sequence brings one token with selection, and wants its logits alone."""
    return len(s.tokens) == 1 and s.select and s.logits == "last"


def layers_in_mode(manifest: Manifest, mode: str) -> tuple[Layer, ...]:
    """How each layer is run in a mode; modes that are exact rungs override the stored ones."""
    override = mode in RUNGS and RUNGS[mode].exact
    return tuple(Layer(rung=mode) if override else layer for layer in manifest.layers)


def _implied_rows(layer: Layer, cut: int) -> tuple[int, int]:
    """(Rows read, neurons kept) on the GPU that follow from the rung, so that the GPU need not count them."""
    rung = RUNGS[layer.rung]
    return 0 if rung.picks else cut, cut if rung.dense else 0


def open_on_gpu(
    artifact: Artifact,
    mode: str,
    context: int,
    threads: int,
    *,
    index: int,
    vram_budget: int | None,
    ram_budget: int | None = None,
    kv_budget: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CudaExecutor:
    """Make an executor on GPU `index` within the budget, or within what the card has free if that is less.

    With a budget of RAM the CPU's part is kept within it, and rows come from disk (see `ram_budget`).
    Raises DoesNotFitError if no stored plan fits, or if the GPU tier lacks what the model does.
    """
    remedy = "run it on the CPU: ", Setting("device", "cpu"), ", without ", Setting("vram_budget")
    refuse_lacking(artifact.manifest.decoder, GPU, remedy, artifact.manifest.formats)
    start_threads(SPIN_BESIDE_GPU)
    device: Device = Cuda(index)
    free = device.free_bytes()
    allocation = choose_plan(artifact, context, free if vram_budget is None else vram_budget, free)
    rows = None
    if ram_budget is not None:
        allocation = replace(allocation, streamed=0)
        rows = cold_rows(artifact, mode, threads, allocation, ram_budget, kv_budget)
    try:
        executor = CudaExecutor(artifact, mode, threads, allocation, device, progress, rows=rows)
    except BaseException as error:
        if rows is not None:
            rows.host.close()
        _clear_frames(error)
        with contextlib.suppress(RuntimeError):
            device.limit(None)
        raise
    if vram_budget is not None and free < vram_budget:
        executor.notice = f"{device.name} has {size(free)} free, less than the budget of {size(vram_budget)}"
    return executor


def cold_rows(
    artifact: Artifact, mode: str, threads: int, taken: Allocation, ram_budget: int, kv_budget: int | None
) -> MemoryRows:
    """The CPU's part of a run on a GPU within a budget of RAM, of which the GPU's buffers there are a part.

    Raises DoesNotFitError naming the smallest budget that fits.
    """
    from pi_runtime.execution.ram_budget import rows_within  # noqa: PLC0415  few runs need it

    own = host_bytes(artifact.manifest.decoder, taken.context, taken.batch_tokens, taken.block_tokens)
    beside = own + STAGING_NBYTES
    return rows_within(artifact, mode, taken.context, threads, "auto", ram_budget, kv_budget, taken, beside)


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: a model's tensors, whose GPU memory others may want."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
