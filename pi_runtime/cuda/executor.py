"""Runs one artifact on a GPU and the CPU together, by a plan.

Legend: L layers, X experts, D model width, V vocabulary, T tokens, J pairs of columns that are rotated.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numba
import numpy as np
import torch

from pi_runtime.artifact.footprint import kv_itemsize, kv_shape, prompt_block
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer, Manifest, Plan
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps, Step
from pi_runtime.cuda.decode.moe_ops import MoeDeviceOps, MoeHostOps
from pi_runtime.cuda.decode.schedule import build_schedule
from pi_runtime.cuda.decode.selection_stats import SelectionStats
from pi_runtime.cuda.memory import weights
from pi_runtime.cuda.memory.devices import Device, Op
from pi_runtime.cuda.memory.handover import PinnedBuffers
from pi_runtime.cuda.memory.kv_residency import KVResidency
from pi_runtime.cuda.memory.weight_streaming import WeightStreamer, streaming_bytes
from pi_runtime.cuda.memory.workspace import Workspace
from pi_runtime.cuda.plan_layout import GPU, cuts_of, needed_bytes, placed_arrays
from pi_runtime.cuda.prefill.crossover import measured_crossover
from pi_runtime.cuda.prefill.prefill import Prefill
from pi_runtime.execution.cpu import CpuExecutor, Floats, Ints
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS
from pi_runtime.kernels.split_ffn import workspace_addresses


class CudaExecutor(CpuExecutor):
    """Decodes by a schedule of calls (see `schedule`); reads prompts dense, in large blocks (see `prefill`).

    Logits at every position with selection, as evaluation needs them, are those of decoding, token by token.
    """

    def __init__(
        self,
        artifact: Artifact,
        mode: str,
        context: int,
        threads: int,
        plan: Plan,
        device: Device,
        budget: int,
        progress: Callable[[int, int], None] | None = None,
        stream_from: int | None = None,
    ) -> None:
        super().__init__(artifact, mode, context, threads)
        self.plan = self._placed = plan
        self.device, self.device_name = device, device.name
        layers = layers_in_mode(artifact.manifest, mode)
        manifest, d = artifact.manifest, artifact.manifest.decoder
        self._block_tokens, self._streamed_bytes = prompt_room(manifest, plan, context, budget)
        self.needed_bytes = needed_bytes(manifest, plan, context, self.block_tokens) + self._streamed_bytes
        device.limit(max(budget, self.needed_bytes))
        loaded = weights.load(artifact, placed_arrays(manifest, plan), device, progress)
        numba.set_num_threads(threads)  # starts the threads, which kernels from the cache rely on
        with device.stream():
            shape = kv_shape(d, context)[1:]
            on_gpu = [layer for layer, side in enumerate(plan.attention) if side == GPU]
            dtype = torch.float16 if kv_itemsize(manifest.formats["attention"]) == 2 else torch.float32
            cache = dict(
                zip(on_gpu, torch.zeros((len(on_gpu), *shape), dtype=dtype, device=device.device), strict=True)
            )
            self._pinned = PinnedBuffers.allocate(d, device)
            workspace = Workspace.allocate(d, self._largest_rank, context, device)
            ops = MoeDeviceOps if d.n_experts > 1 else DeviceOps
            self.device_ops = ops(d, layers, cuts_of(plan, d), loaded, device, workspace, cache, self._pinned)
            self.host_ops = self._make_host_ops()
            self._kv_residency = KVResidency(cache, device)
            self.host_ops.step.cache_L2GSW = self.new_cache().words
            self._stats = SelectionStats(self.device_ops, self.host_ops, device)
            self.calls = build_schedule(plan, self.device_ops, self.host_ops, device)
            device.synchronize()
            for values in cache.values():
                values.zero_()
        self._prefill = self._make_prefill(artifact, stream_from)
        self._runs = tuple(call.run for call in self.calls)
        self._runs_with_stats: tuple[Op, ...] = ()
        always = (cuts.hot if d.n_experts == 1 else 0 for cuts in self.device_ops.cuts)
        self._implied_L2 = np.array([_implied_rows(how, cut) for how, cut in zip(layers, always, strict=True)])
        self._rows_L2 = np.zeros((d.n_layers, 2), np.int64)
        self._token, self._device_rows_L2 = self._pinned.token.numpy(), self._pinned.rows_L2.numpy()
        self._logits_V = self._pinned.logits.numpy() if plan.head == GPU else self._workspace.logits_TV[0]

    def _make_host_ops(self) -> HostOps:
        pinned = self._pinned
        ops = MoeHostOps if self._cfg.experts > 1 else HostOps
        return ops(
            decoder=self.device_ops.decoder,
            layers=self.device_ops.layers,
            cfg=self._cfg,
            ends=self._ends,
            table_LXW=self._table_LXW,
            eps=self._eps,
            cos_SJ=self._cos_SJ,
            sin_SJ=self._sin_SJ,
            workspace=self._workspace,
            cuts=self.device_ops.cuts,
            step=Step(),
            send=pinned.handover_to_device.arrays(),
            recv=pinned.handover_to_host.arrays(),
            sum_to_device=pinned.sum_to_device.numpy(),
            sum_to_host=pinned.sum_to_host.numpy(),
            addresses=workspace_addresses(self._cfg, self._workspace),
            own_sum=np.zeros(self.device_ops.decoder.d_model, np.float32),
            x_to_device=pinned.x_to_device.numpy(),
            x_to_host=pinned.x_to_host.numpy(),
        )

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def rows_read(self) -> Ints:
        """(layers, 2): rows of `first` read and neurons kept for the last single token that ran with selection."""
        return self._rows_L2

    @property
    def rows_on_device(self) -> Ints:
        """(layers, 2): the GPU's part of `rows_read`."""
        return self._device_rows_L2 + self._implied_L2

    def run(self, tokens: Ints, cache: KVCache, *, select: bool, every: bool) -> Floats:
        """Run up to `block_tokens` tokens, or up to `BLOCK_TOKENS` if `every`; see `CpuExecutor.run`."""
        self._check_open()
        most = BLOCK_TOKENS if every else self.block_tokens
        assert 0 < len(tokens) <= min(most, cache.room), (len(tokens), cache.room)
        numba.set_num_threads(self._threads)
        with self.device.stream(), self._synchronised_on_error():
            self._kv_residency.acquire(cache)
            self.host_ops.step.cache_L2GSW, self.host_ops.step.start = cache.words, len(cache.tokens)
            if every:
                return self._all_logits(tokens, cache, select=select)
            if len(tokens) == 1 and select:
                self._set_token(tokens)
                self._decode(self._runs)
            else:
                self._prefill.run(tokens)
        cache.tokens += tokens.tolist()
        return self._logits_V[None]

    def _all_logits(self, tokens: Ints, cache: KVCache, *, select: bool) -> Floats:
        """Logits of all tokens: decoded one by one with selection, else read in dense blocks."""
        logits_TV = self._workspace.logits_TV[: len(tokens)]
        if not select:
            for low in range(0, len(tokens), self.block_tokens):
                part = slice(low, min(len(tokens), low + self.block_tokens))
                self.host_ops.step.start = len(cache.tokens)
                self._prefill.all_logits(tokens[part], logits_TV[part])
                cache.tokens += tokens[part].tolist()
            return logits_TV
        self._stats.clear()
        first_V = logits_TV[0]
        for n in range(len(tokens)):
            self.host_ops.step.start = len(cache.tokens)
            self._set_token(tokens[n : n + 1])
            if not self._runs_with_stats:  # building it writes into the cache where this token will
                calls = build_schedule(self._placed, self.device_ops, self.host_ops, self.device, self._stats)
                self._runs_with_stats = tuple(call.run for call in calls)
            self._decode(self._runs_with_stats)
            self._stats.add(self._rows_L2)
            if n == 0:
                first_V = self._logits_V.copy()  # the CPU's head writes into the first row
            else:
                logits_TV[n] = self._logits_V
            cache.tokens += tokens[n : n + 1].tolist()
        logits_TV[0] = first_V
        return logits_TV

    @property
    def tally(self) -> Ints:
        """(layers, 3): see `CpuExecutor.tally`. It is computed when asked for."""
        self._check_open()
        with self.device.stream():
            return self._stats.tally(self._prefill.count_firing, min(self.block_tokens, BLOCK_TOKENS))

    @contextlib.contextmanager
    def _synchronised_on_error(self) -> Iterator[None]:
        """Wait for the GPU if anything goes wrong within, so that the next call finds it idle."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.device.synchronize()
            raise

    def _set_token(self, token_1: Ints) -> None:
        step = self.host_ops.step
        step.tokens[:] = token_1
        self._token[0], self._token[1] = token_1[0], step.start

    def _decode(self, runs: Sequence[Op]) -> None:
        for run in runs:
            run()
        self._rows_L2 = self._workspace.rows_L2 + self.rows_on_device

    def _make_prefill(self, artifact: Artifact, stream_from: int | None) -> Prefill:
        """A `Prefill`; it streams cold weights to the GPU if there are any, memory for them is left and it may pay."""
        d, plan, device = self.device_ops.decoder, self._placed, self.device
        streamer, first = None, 0
        if self._streamed_bytes:
            fmt = artifact.manifest.formats["ffn"]
            first = measured_crossover(d, fmt, self._threads, device) if stream_from is None else stream_from
            if first <= self.block_tokens:
                with device.stream():
                    streamer = WeightStreamer(artifact, device)
        with device.stream():
            return Prefill(self.device_ops, self.host_ops, plan, device, self.block_tokens, streamer, first)

    def close(self) -> None:
        """Close the artifact and free the GPU's memory; `run` refuses from now on."""
        if self._artifact is not None:
            # After a fault the GPU does not answer; the fault has been raised already.
            with contextlib.suppress(RuntimeError):
                self.device.synchronize()
                self._prefill.close()
            # Tensors, and the graphs that work in them, hold the GPU's memory.
            self.calls, self._runs, self._runs_with_stats = (), (), ()
            del self.device_ops, self.host_ops, self._prefill, self._kv_residency, self._stats
            with contextlib.suppress(RuntimeError):
                self.device.limit(None)
        super().close()


def layers_in_mode(manifest: Manifest, mode: str) -> tuple[Layer, ...]:
    """How each layer is run in a mode; modes that are exact rungs override the stored ones."""
    override = mode in RUNGS and RUNGS[mode].exact
    return tuple(Layer(rung=mode) if override else layer for layer in manifest.layers)


def prompt_room(manifest: Manifest, plan: Plan, context: int, budget: int) -> tuple[int, int]:
    """(Tokens of a prompt's block, bytes for streaming cold weights) within a budget; see `prompt_block`."""
    cold = any(cut < manifest.decoder.d_ff for cut in plan.cuts)
    streamed = streaming_bytes(manifest) if cold else 0
    return prompt_block(lambda tokens: needed_bytes(manifest, plan, context, tokens), streamed, budget)


def _implied_rows(layer: Layer, cut: int) -> tuple[int, int]:
    """(Rows read, neurons kept) on the GPU that follow from the rung, so that the GPU need not count them."""
    rung = RUNGS[layer.rung]
    return 0 if rung.picks else cut, cut if rung.dense else 0
