"""Runs one artifact by a plan on a GPU and the CPU together."""

from collections.abc import Callable

import numba
import numpy as np
import torch

from pi_runtime.artifact.footprint import kv_shape
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Manifest, Plan
from pi_runtime.cache import KVCache
from pi_runtime.cuda import buffers, weights
from pi_runtime.cuda.crossover import measured_crossover
from pi_runtime.cuda.devices import Device
from pi_runtime.cuda.host import Host, Step, Words
from pi_runtime.cuda.placed import GPU, needed_bytes, pieces
from pi_runtime.cuda.prefill import Prefill
from pi_runtime.cuda.program import program_of
from pi_runtime.cuda.residence import Residence
from pi_runtime.cuda.side import Mail, Side
from pi_runtime.cuda.streamed import Streamer, streaming_bytes
from pi_runtime.errors import UsageError
from pi_runtime.executor import CpuExecutor, Floats, Ints
from pi_runtime.kernels.listed import addresses

PROMPT_TOKENS = (512, 256, 128, 64, 16, 1)
"""Sizes of a prompt's blocks, the best that fits being taken."""


class CudaExecutor(CpuExecutor):
    """Decodes by a list of calls (see `program`); reads prompts dense, in large blocks (see `prefill`).

    Logits at every position, which is how a model is evaluated, come from the CPU, whose memory maps everything.
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
        self._block_tokens = block_tokens(artifact, plan, context, budget)
        self.needed_bytes = needed_bytes(manifest, plan, context, self.block_tokens)
        device.limit(max(budget, self.needed_bytes))
        loaded = weights.load(artifact, pieces(manifest, plan), device, progress)
        with device.at_work():
            shape = kv_shape(d, context)[1:]
            here = [layer for layer, where in enumerate(plan.attention) if where == GPU]
            cache = dict(zip(here, torch.zeros((len(here), *shape), device=device.device), strict=True))
            self._mail = Mail.of(d, device)
            b = buffers.buffers(d, self._largest_rank, context, device)
            self.side = Side(d, layers, plan.cuts, loaded, device, b, cache, self._mail)
            self.host = self._host(plan)
            self._residence = Residence(cache, device)
            self.host.step.cache_L2GSE = KVCache(d, context).values
            self.calls = program_of(plan, self.side, self.host, device)
            device.synchronize()
            for values in cache.values():
                values.zero_()
        self._prefill = self._reader(artifact, budget, stream_from)
        self._runs = tuple(call.run for call in self.calls)
        self._counted_L2 = np.array([_counted(how.rung, cut) for how, cut in zip(layers, plan.cuts, strict=True)])
        self._rows_L2 = np.zeros((d.n_layers, 2), np.int64)
        self._ids, self._rows_there_L2 = self._mail.token.numpy(), self._mail.rows_L2.numpy()
        self._logits_V = self._mail.logits.numpy() if plan.head == GPU else self._buffers.logits_TV[0]

    def _host(self, plan: Plan) -> Host:
        mail = self._mail
        return Host(
            decoder=self.side.decoder,
            shape=self._shape,
            ends=self._ends,
            table_LXW=self._table_LXW,
            eps=self._eps,
            cos_SJ=self._cos_SJ,
            sin_SJ=self._sin_SJ,
            b=self._buffers,
            cuts=plan.cuts,
            step=Step(),
            given=Words.of(mail.to_gpu),
            taken=Words.of(mail.to_host),
            sum_to_gpu=mail.sum_to_gpu.numpy(),
            sum_to_host=mail.sum_to_host.numpy(),
            addresses=addresses(self._shape, self._buffers),
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
        if every:
            with self.device.at_work():
                self._residence.bring_home(cache)
            return super().run(tokens, cache, select=select, every=True)
        assert 0 < len(tokens) <= min(self.block_tokens, cache.room), (len(tokens), cache.room)
        numba.set_num_threads(self._threads)
        with self.device.at_work():
            self._residence.take(cache)
            self.host.step.cache_L2GSE, self.host.step.start = cache.values, len(cache.tokens)
            if len(tokens) == 1 and select:
                self._decode(tokens)
            else:
                self._prefill.run(tokens)
        cache.tokens += tokens.tolist()
        return self._logits_V[None]

    def _decode(self, tokens: Ints) -> None:
        step = self.host.step
        step.tokens[:] = tokens
        self._ids[0], self._ids[1] = tokens[0], step.start
        for run in self._runs:
            run()
        self._rows_L2 = self._buffers.rows_L2 + self.rows_there

    def _reader(self, artifact: Artifact, budget: int, stream_from: int | None) -> Prefill:
        """Prompts: with cold weights brought to the GPU where there are any, memory for it is left and it may pay."""
        d, plan, device = self.side.decoder, self._placed, self.device
        cold = any(cut < d.d_ff for cut in plan.cuts)
        streamer, first = None, 0
        if cold and self.needed_bytes + streaming_bytes(artifact.manifest) <= budget:
            fmt = artifact.manifest.formats["ffn"]
            first = measured_crossover(d, fmt, self._threads, device) if stream_from is None else stream_from
            if first <= self.block_tokens:
                with device.at_work():
                    streamer = Streamer(artifact, device)
        with device.at_work():
            return Prefill(self.side, self.host, plan, device, self.block_tokens, streamer, first)

    def close(self) -> None:
        """Close the artifact and give the GPU's memory back; `run` refuses from now on."""
        if self._artifact is not None:
            self.device.synchronize()
            self._prefill.close()
            # What holds the GPU's memory: its tensors, and the graphs that work in them.
            self.calls, self._runs = (), ()
            del self.side, self.host, self._prefill, self._residence
            self.device.limit(None)
        super().close()


def layers_in(manifest: Manifest, mode: str) -> tuple[Layer, ...]:
    """How each layer is run in a mode. Raises UsageError for what only the CPU can do so far."""
    d = manifest.decoder
    if d.n_experts > 1:
        raise UsageError("a mixture of experts does not run on a GPU yet", remedy="--device cpu")
    return tuple(Layer(rung=mode) if mode in ("dense", "gate") else layer for layer in manifest.layers)


def block_tokens(artifact: Artifact, plan: Plan, context: int, budget: int) -> int:
    """Tokens of a prompt that are read at once: as many as there is memory for."""
    for tokens in PROMPT_TOKENS:
        if needed_bytes(artifact.manifest, plan, context, tokens) <= budget:
            return tokens
    return PROMPT_TOKENS[-1]


def _counted(rung: str, cut: int) -> tuple[int, int]:
    """(rows read, neurons kept) that the GPU need not count."""
    return 0 if rung in ("predicted", "sign") else cut, cut if rung == "dense" else 0
