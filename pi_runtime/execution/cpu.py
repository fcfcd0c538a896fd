"""Running steps of one open artifact on the CPU: the compiled forward pass with its memory.

Shape letters: L layers, X experts, W columns of the weight table, S positions, J rotary frequencies.
"""

from collections.abc import Callable, Sequence

import numba
import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.errors import UsageError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME, start_threads
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS, allocate_workspace
from pi_runtime.kernels.forward import forward
from pi_runtime.kernels.reference import rotary_table


class CpuModel:
    """An open artifact as kernels take it: tables of its weights, and the memory that kernels work in.

    `threads` limits numba's threads for the calls made here; results do not depend on it.
    """

    def __init__(self, artifact: Artifact, mode: str, context: int, threads: int) -> None:
        start_threads()
        # Kept because the table holds addresses into its mapping.
        self.artifact: Artifact | None = artifact
        self.manifest = artifact.manifest
        decoder, layers = artifact.manifest.decoder, artifact.manifest.layers
        self.threads, self.context = threads, context
        self.cfg = weight_table.config_of(decoder, artifact.manifest.formats)
        self.ends = weight_table.ends_of(artifact)
        self.table_LXW = weight_table.table_of(artifact, mode)
        self.eps = np.float32(decoder.norm_eps)
        self.largest_rank = max((layer.rank or 0 for layer in layers), default=0)
        self.workspace = allocate_workspace(decoder, self.largest_rank)
        self.cos_SJ, self.sin_SJ = rotary_table(decoder, context)

    @property
    def neurons(self) -> int:
        """Neurons of all layers and experts."""
        return self.cfg.d_ff * self.cfg.experts * len(self.table_LXW)

    def run(self, s: SequenceStep) -> SequenceResult:
        """Run the next tokens of one sequence."""
        every = s.logits == "all"
        numba.set_num_threads(self.threads)
        forward(
            self.cfg,
            self.ends,
            self.table_LXW,
            self.eps,
            self.cos_SJ,
            self.sin_SJ,
            s.tokens,
            s.cache.length,
            s.cache.words,
            s.select,
            every,
            self.workspace,
        )
        s.cache.append(s.tokens)
        return self.result(s)

    def result(self, s: SequenceStep) -> SequenceResult:
        """A sequence's result, out of the memory that the next call overwrites."""
        ws, every = self.workspace, s.logits == "all"
        one = len(s.tokens) == 1 and s.select and not every
        return SequenceResult(
            logits_TV=ws.logits_TV[: len(s.tokens) if every else 1].copy(),
            rows_L2=ws.rows_L2.copy() if one else None,
            counts_L3=ws.tally_L3.copy() if s.count else None,
        )

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        self.check_open()
        return KVCache(self.manifest, self.context)

    def step(
        self,
        sequences: Sequence[SequenceStep],
        run: Callable[[SequenceStep], SequenceResult],
        block_tokens: int = BLOCK_TOKENS,
    ) -> list[SequenceResult]:
        """Check a step, and run its sequences one after the other; steps of several threads take turns."""
        with ONE_AT_A_TIME:
            self.check_open()
            for s in sequences:
                most = BLOCK_TOKENS if s.logits == "all" else block_tokens
                assert 0 < len(s.tokens) <= min(most, s.cache.room), (len(s.tokens), s.cache.room)
                assert not s.count or (s.select and s.logits == "all")
            return [run(s) for s in sequences]

    def check_open(self) -> None:
        """Raise UsageError once the artifact is closed."""
        if self.artifact is None:
            raise UsageError("the model is closed", remedy="read all of what it generates before closing it")

    def close(self) -> None:
        """Close the artifact."""
        if self.artifact is not None:
            self.artifact.close()
        self.artifact = None


class CpuExecutor:
    """Runs one artifact in one mode, all of it on the CPU."""

    allocation: Allocation | None = None
    device_name = "cpu"
    notice: str | None = None
    block_tokens = BLOCK_TOKENS

    def __init__(self, artifact: Artifact, mode: str, context: int, threads: int) -> None:
        self._model = CpuModel(artifact, mode, context, threads)
        self.context, self.neurons = context, self._model.neurons

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences, one sequence after the other."""
        return self._model.step(sequences, self._model.run)

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return self._model.new_cache()

    def close(self) -> None:
        """Close the artifact; `step` refuses from now on."""
        with ONE_AT_A_TIME:
            self._model.close()
