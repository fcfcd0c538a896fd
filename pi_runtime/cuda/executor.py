"""Runs one artifact by a plan on a GPU and the CPU together."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numba
import numpy as np
import torch

from pi_runtime.artifact.footprint import kv_itemsize, kv_shape, prompt_block
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Manifest, Plan
from pi_runtime.cuda.decode.device_ops import Mail, Side
from pi_runtime.cuda.decode.host_ops import Host, Step, Words
from pi_runtime.cuda.decode.moe_ops import RoutedHost, RoutedSide
from pi_runtime.cuda.decode.schedule import program_of
from pi_runtime.cuda.decode.selection_stats import Examined
from pi_runtime.cuda.memory import weights, workspace
from pi_runtime.cuda.memory.devices import Device, Op
from pi_runtime.cuda.memory.kv_residency import Residence
from pi_runtime.cuda.memory.weight_streaming import Streamer, streaming_bytes
from pi_runtime.cuda.plan_layout import GPU, cuts_of, needed_bytes, pieces
from pi_runtime.cuda.prefill.crossover import measured_crossover
from pi_runtime.cuda.prefill.moe_prefill import RoutedPrefill
from pi_runtime.cuda.prefill.prefill import Prefill
from pi_runtime.execution.cpu import CpuExecutor, Floats, Ints
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS
from pi_runtime.kernels.split_ffn import workspace_addresses


class CudaExecutor(CpuExecutor):
    """Decodes by a list of calls (see `program`); reads prompts dense, in large blocks (see `prefill`).

    Logits at every position with selection, which is how a model is evaluated, are those of decoding, token by token.
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
        layers = layers_in(artifact.manifest, mode)
        manifest, d = artifact.manifest, artifact.manifest.decoder
        self._block_tokens, self._streamed_bytes = prompt_room(manifest, plan, context, budget)
        self.needed_bytes = needed_bytes(manifest, plan, context, self.block_tokens) + self._streamed_bytes
        device.limit(max(budget, self.needed_bytes))
        loaded = weights.load(artifact, pieces(manifest, plan), device, progress)
        numba.set_num_threads(threads)  # starts them; kernels that come from the cache take them to be there
        with device.at_work():
            shape = kv_shape(d, context)[1:]
            here = [layer for layer, where in enumerate(plan.attention) if where == GPU]
            dtype = torch.float16 if kv_itemsize(manifest.formats["attention"]) == 2 else torch.float32
            cache = dict(zip(here, torch.zeros((len(here), *shape), dtype=dtype, device=device.device), strict=True))
            self._mail = Mail.of(d, device)
            b = workspace.buffers(d, self._largest_rank, context, device)
            side = RoutedSide if d.n_experts > 1 else Side
            self.side = side(d, layers, cuts_of(plan, d), loaded, device, b, cache, self._mail)
            self.host = self._host()
            self._residence = Residence(cache, device)
            self.host.step.cache_L2GSW = self.new_cache().words
            self._examined = Examined(self.side, self.host, device)
            self.calls = program_of(plan, self.side, self.host, device)
            device.synchronize()
            for values in cache.values():
                values.zero_()
        self._prefill = self._reader(artifact, stream_from)
        self._runs = tuple(call.run for call in self.calls)
        self._examining: tuple[Op, ...] = ()
        always = (cuts.hot if d.n_experts == 1 else 0 for cuts in self.side.cuts)
        self._counted_L2 = np.array([_counted(how.rung, cut) for how, cut in zip(layers, always, strict=True)])
        self._rows_L2 = np.zeros((d.n_layers, 2), np.int64)
        self._ids, self._rows_there_L2 = self._mail.token.numpy(), self._mail.rows_L2.numpy()
        self._logits_V = self._mail.logits.numpy() if plan.head == GPU else self._workspace.logits_TV[0]

    def _host(self) -> Host:
        mail = self._mail
        host = RoutedHost if self._cfg.experts > 1 else Host
        return host(
            decoder=self.side.decoder,
            cfg=self._cfg,
            ends=self._ends,
            table_LXW=self._table_LXW,
            eps=self._eps,
            cos_SJ=self._cos_SJ,
            sin_SJ=self._sin_SJ,
            b=self._workspace,
            cuts=self.side.cuts,
            step=Step(),
            given=Words.of(mail.to_gpu),
            taken=Words.of(mail.to_host),
            sum_to_gpu=mail.sum_to_gpu.numpy(),
            sum_to_host=mail.sum_to_host.numpy(),
            addresses=workspace_addresses(self._cfg, self._workspace),
            own_sum=np.zeros(self.side.decoder.d_model, np.float32),
            x_to_gpu=mail.x_to_gpu.numpy(),
            x_to_host=mail.x_to_host.numpy(),
        )

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def rows_read(self) -> Ints:
        """(layers, 2): rows of `first` read and neurons kept for the last single token that ran with selection."""
        return self._rows_L2

    @property
    def rows_there(self) -> Ints:
        """Of these, the GPU's."""
        return self._rows_there_L2 + self._counted_L2

    def run(self, tokens: Ints, cache: KVCache, *, select: bool, every: bool) -> Floats:
        """As `CpuExecutor.run`, with up to `block_tokens` tokens unless `every`."""
        self._check_open()
        most = BLOCK_TOKENS if every else self.block_tokens
        assert 0 < len(tokens) <= min(most, cache.room), (len(tokens), cache.room)
        numba.set_num_threads(self._threads)
        with self.device.at_work(), self._settled():
            self._residence.take(cache)
            self.host.step.cache_L2GSW, self.host.step.start = cache.words, len(cache.tokens)
            if every:
                return self._every(tokens, cache, select=select)
            if len(tokens) == 1 and select:
                self._begin(tokens)
                self._decode(self._runs)
            else:
                self._prefill.run(tokens)
        cache.tokens += tokens.tolist()
        return self._logits_V[None]

    def _every(self, tokens: Ints, cache: KVCache, *, select: bool) -> Floats:
        """Logits of all tokens: decoded one by one, or of dense blocks."""
        logits_TV = self._workspace.logits_TV[: len(tokens)]
        if not select:
            for low in range(0, len(tokens), self.block_tokens):
                part = slice(low, min(len(tokens), low + self.block_tokens))
                self.host.step.start = len(cache.tokens)
                self._prefill.every(tokens[part], logits_TV[part])
                cache.tokens += tokens[part].tolist()
            return logits_TV
        self._examined.clear()
        first_V = logits_TV[0]
        for n in range(len(tokens)):
            self.host.step.start = len(cache.tokens)
            self._begin(tokens[n : n + 1])
            if not self._examining:  # it writes into the cache where this token will
                calls = program_of(self._placed, self.side, self.host, self.device, self._examined)
                self._examining = tuple(call.run for call in calls)
            self._decode(self._examining)
            self._examined.add(self._rows_L2)
            if n == 0:
                first_V = self._logits_V.copy()  # the CPU's head writes into the first row
            else:
                logits_TV[n] = self._logits_V
            cache.tokens += tokens[n : n + 1].tolist()
        logits_TV[0] = first_V
        return logits_TV

    @property
    def tally(self) -> Ints:
        """As `CpuExecutor.tally`; computed when asked for."""
        self._check_open()
        with self.device.at_work():
            return self._examined.tally(self._prefill.fires, min(self.block_tokens, BLOCK_TOKENS))

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Whatever goes wrong within, the GPU is at nothing afterwards that the next call could meet."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.device.synchronize()
            raise

    def _begin(self, token_1: Ints) -> None:
        step = self.host.step
        step.tokens[:] = token_1
        self._ids[0], self._ids[1] = token_1[0], step.start

    def _decode(self, runs: Sequence[Op]) -> None:
        for run in runs:
            run()
        self._rows_L2 = self._workspace.rows_L2 + self.rows_there

    def _reader(self, artifact: Artifact, stream_from: int | None) -> Prefill:
        """Prompts: with cold weights brought to the GPU where there are any, memory for it is left and it may pay."""
        d, plan, device = self.side.decoder, self._placed, self.device
        streamer, first = None, 0
        if self._streamed_bytes:
            fmt = artifact.manifest.formats["ffn"]
            first = measured_crossover(d, fmt, self._threads, device) if stream_from is None else stream_from
            if first <= self.block_tokens:
                with device.at_work():
                    streamer = Streamer(artifact, device)
        with device.at_work():
            reader = RoutedPrefill if d.n_experts > 1 else Prefill
            return reader(self.side, self.host, plan, device, self.block_tokens, streamer, first)

    def close(self) -> None:
        """Close the artifact and give the GPU's memory back; `run` refuses from now on."""
        if self._artifact is not None:
            # After a fault nothing on the GPU answers; the fault was raised where it was met.
            with contextlib.suppress(RuntimeError):
                self.device.synchronize()
                self._prefill.close()
            # What holds the GPU's memory: its tensors, and the graphs that work in them.
            self.calls, self._runs, self._examining = (), (), ()
            del self.side, self.host, self._prefill, self._residence, self._examined
            with contextlib.suppress(RuntimeError):
                self.device.limit(None)
        super().close()


def layers_in(manifest: Manifest, mode: str) -> tuple[Layer, ...]:
    """How each layer is run in a mode."""
    return tuple(Layer(rung=mode) if mode in ("dense", "gate") else layer for layer in manifest.layers)


def prompt_room(manifest: Manifest, plan: Plan, context: int, budget: int) -> tuple[int, int]:
    """As `prompt_block`, for a budget of GPU bytes."""
    cold = any(cut < manifest.decoder.d_ff for cut in plan.cuts)
    streamed = streaming_bytes(manifest) if cold else 0
    return prompt_block(lambda tokens: needed_bytes(manifest, plan, context, tokens), streamed, budget)


def _counted(rung: str, cut: int) -> tuple[int, int]:
    """(rows read, neurons kept) that the GPU need not count."""
    return 0 if rung in ("predicted", "sign") else cut, cut if rung == "dense" else 0
