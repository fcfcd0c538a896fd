"""Running steps of one open artifact on the CPU: the compiled forward pass with its memory.

Shape letters: L layers, X experts, S positions, J rotary frequencies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numba
import numpy as np

from pi_runtime.artifact.decoder import Decoder, rotary_table
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.errors import UsageError
from pi_runtime.execution.executor import DiskStats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.guess_head import EagleRun, GuessHeadRun, GuessLayerRun
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import Allowance, PagePool
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME, start_threads
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats
from pi_runtime.kernels.data.weight_table import StoredArrays
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.ffn.memory import Ffn, ffn_of
from pi_runtime.kernels.forward import Positions, Step, forward


def _rotary_tables(d: Decoder, context: int) -> tuple[Floats, Floats]:
    """Cosines and sines of the angles, behind them those of layers with a window that have others."""
    tables = [rotary_table(d, context)]
    if d.windowed_frequencies:
        tables.append(rotary_table(replace(d, rotary_frequencies=d.windowed_frequencies), context))
    cos_SJ, sin_SJ = (np.concatenate(parts) for parts in zip(*tables, strict=True))
    return cos_SJ, sin_SJ


class CpuModel:
    """An open artifact as kernels take it: tables of its weights, and the memory that kernels work in.

    `threads` limits numba's threads for the calls made here; results do not depend on it. `cache` is the format of keys
    and values, of `buffers.CACHE_FORMATS`; `kv` limits what they take.
    """

    def __init__(
        self,
        artifact: StoredArrays,
        mode: str,
        context: int,
        threads: int,
        cache: str = "auto",
        kv: Allowance | None = None,
    ) -> None:
        start_threads()
        # Kept because the table holds addresses into its mapping.
        self.artifact: StoredArrays | None = artifact
        self.manifest = artifact.manifest
        decoder, layers = artifact.manifest.decoder, artifact.manifest.layers
        self.threads, self.context, self.cache, self._kv = threads, context, cache, kv
        self.cfg = weight_table.config_of(decoder, artifact.manifest.formats)
        self.ends = weight_table.ends_of(artifact)
        self.table_LX = weight_table.table_of(artifact, mode)
        self.eps = np.float32(decoder.norm_eps)
        self.largest_rank = max((layer.rank or 0 for layer in layers), default=0)
        layout = artifact.manifest.ffn_layout
        self.workspace = allocate_workspace(decoder, self.largest_rank, cache=cache, layout=layout)
        self.cos_SJ, self.sin_SJ = _rotary_tables(decoder, context)

    @cached_property
    def ffn(self) -> Ffn:
        """What the FFN's kernels take in every call."""
        found: Ffn = ffn_of(self.cfg, self.workspace)
        return found

    @property
    def neurons(self) -> int:
        """Neurons of all layers and experts."""
        return self.cfg.d_ff * self.cfg.experts * len(self.table_LX)

    def run(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences together, at most `BLOCK_TOKENS` in all."""
        numba.set_num_threads(self.threads)
        step = self.step_of(sequences)
        step = step._replace(tokens_T=self.embedded(step.tokens_T))
        forward(
            self.cfg,
            self.ends,
            self.table_LX,
            self.eps,
            self.cos_SJ,
            self.sin_SJ,
            step,
            sequences[0].count,
            self.workspace,
        )
        return self.finished(sequences, step.states_TC)

    def step_of(self, sequences: Sequence[SequenceStep]) -> Step:
        """The next tokens of some sequences, with memory for the states that are wanted."""
        step, states = tokens_of(sequences, len(self.table_LX)), self.manifest.guess_states
        if not states or not any(s.states for s in sequences):
            return step
        step.state_L[list(states)] = np.arange(len(states))
        shape = len(step.tokens_T), len(states) * self.cfg.d_model
        return step._replace(states_TC=np.empty(shape, np.float32))

    def embedded(self, tokens_T: Ints) -> Ints:
        """Where the tokens' rows are in the embedding as it is in memory."""
        return tokens_T

    def finished(self, sequences: Sequence[SequenceStep], states_TC: Floats | None = None) -> list[SequenceResult]:
        """The results of sequences whose tokens have just run; their caches take the tokens."""
        for s in sequences:
            s.cache.append(s.tokens, s.select)
        return list(self._results(sequences, states_TC))

    def _results(self, sequences: Sequence[SequenceStep], states_TC: Floats | None) -> Iterator[SequenceResult]:
        """The sequences' results, out of the memory that the next call overwrites."""
        ws, token, row = self.workspace, 0, 0
        for s in sequences:
            tokens = len(s.tokens)
            rows = tokens if s.logits == "all" else 1
            counts_LT3 = ws.counts_LT3[:, token : token + tokens]
            one = tokens == 1 and s.select and not s.count
            yield SequenceResult(
                logits_TV=ws.logits_TV[row : row + rows].copy(),
                rows_L2=counts_LT3[:, 0, 1:].copy() if one else None,
                counts_L3=counts_LT3.sum(1) if s.count else None,
                states_TC=states_TC[token : token + tokens] if s.states and states_TC is not None else None,
            )
            token, row = token + tokens, row + rows

    def new_pool(self, budget: int | None = None, beside: int = 0) -> PagePool:
        """Pages for caches of some sequences; `beside` is that of the pool."""
        self.check_open()
        return PagePool(self.manifest, budget, self.cache, self._kv, beside)

    def new_cache(self, pool: PagePool | None = None) -> KVCache:
        """An empty cache for one sequence."""
        self.check_open()
        return KVCache(self.new_pool() if pool is None else pool, self.context)

    def new_guess_head(self) -> GuessHeadRun | None:
        """What drafts tokens for the model, if the artifact has it."""
        head, settings = self.manifest.guess, (self.context, self.threads)
        if self.manifest.guess_layers:
            return GuessLayerRun(self.check_open, *settings)
        return None if head is None else EagleRun(self.check_open, head, *settings)

    @contextmanager
    def turn(
        self, sequences: Sequence[SequenceStep], block_tokens: int = BLOCK_TOKENS
    ) -> Iterator[Iterator[list[SequenceStep]]]:
        """Check a step and give its sequences in batches, each to be run within; steps of several threads take turns.

        Raises ArtifactError where the file was changed: before a batch is run on it, or before its results are used.
        """
        with ONE_AT_A_TIME:
            artifact = self.check_open()
            for s in sequences:
                most = BLOCK_TOKENS if s.logits == "all" else block_tokens
                assert 0 < len(s.tokens) <= min(most, s.cache.room), (len(s.tokens), s.cache.room)
                assert not s.count or (s.select and s.logits == "all")
            for s in sequences:
                s.cache.reserve(len(s.tokens))
            yield _checked(artifact, batches(sequences))
            artifact.check_unchanged()

    def check_open(self) -> StoredArrays:
        """The artifact. Raises UsageError once it is closed."""
        if self.artifact is None:
            raise UsageError("the model is closed", remedy="read all of what it generates before closing it")
        return self.artifact

    def close(self) -> None:
        """Close the artifact."""
        if self.artifact is not None:
            self.artifact.close()
        self.artifact = None


def tokens_of(sequences: Sequence[SequenceStep], layers: int) -> Step:
    """The next tokens of some sequences; no states are kept."""
    counts = [len(s.tokens) for s in sequences]
    rows = [len(s.tokens) if s.logits == "all" else 1 for s in sequences]
    wanted = [np.arange(end - n, end) for n, end in zip(rows, np.cumsum(counts), strict=True)]
    return Step(
        np.concatenate([s.tokens for s in sequences]),
        positions_of([(len(s.tokens), s.cache.length, s.cache) for s in sequences]),
        np.repeat([int(s.select) for s in sequences], counts),
        np.concatenate(wanted),
        *no_states(layers),
    )


def no_states(layers: int) -> tuple[Ints, Floats]:
    """What `Step` has where no states are kept."""
    return np.full(layers + 1, -1, np.int64), np.empty((0, 0), np.float32)


def positions_of(runs: Sequence[tuple[int, int, KVCache]]) -> Positions:
    """Where the tokens of a step stand; a run is (tokens, position of the first, cache)."""
    first_R = np.cumsum([0, *(count for count, _, _ in runs)])
    run_R4 = [(first, count, at, cache.table_address) for first, (count, at, cache) in zip(first_R, runs, strict=False)]
    position_T = np.concatenate([np.arange(start, start + count) for count, start, _ in runs])
    pool = runs[0][2].pool
    return Positions(position_T, np.array(run_R4, np.int64), FORMATS[pool.format].code, pool.row_nbytes)


def batches(sequences: Sequence[SequenceStep]) -> Iterator[list[SequenceStep]]:
    """Cut a step into calls of at most `BLOCK_TOKENS` tokens; a sequence that counts has a call of its own."""
    batch: list[SequenceStep] = []
    for s in sequences:
        together = sum(len(other.tokens) for other in batch) + len(s.tokens) <= BLOCK_TOKENS
        if batch and (s.count or batch[0].count or not together):
            yield batch
            batch = []
        batch.append(s)
    if batch:
        yield batch


def _checked(artifact: StoredArrays, batches: Iterator[list[SequenceStep]]) -> Iterator[list[SequenceStep]]:
    """The batches, each once its file is found unchanged."""
    for batch in batches:
        artifact.check_unchanged()
        yield batch


class HostExecutor:
    """What executors share whose keys and values lie in the machine's memory: a `CpuModel` and its caches."""

    allocation: Allocation | None = None
    notice: str | None = None
    disk: DiskStats | None = None
    block_tokens = draft_tokens = BLOCK_TOKENS
    guess_head: GuessHeadRun | None = None
    _model: CpuModel

    @property
    def kv_room(self) -> int | None:
        """Bytes that further keys and values may take; None where nothing limits them."""
        return None

    def new_pool(self, budget: int | None = None) -> PagePool:
        """Pages for caches of some sequences, with those of the guess head together at most `budget` bytes."""
        return self._model.new_pool(budget, 0 if self.guess_head is None else self.guess_head.page_nbytes)

    def new_cache(self, pool: PagePool | None = None) -> KVCache:
        """An empty cache for one sequence, in pages of a pool, or with a pool of its own."""
        return self._model.new_cache(pool)

    def close(self) -> None:
        """Close the artifact; `step` refuses from now on."""
        with ONE_AT_A_TIME:
            self._model.close()
            self._release()

    def _release(self) -> None:
        """Give back what the executor holds beside its model, which is closed."""


class CpuExecutor(HostExecutor):
    """Runs one artifact in one mode, all of it on the CPU."""

    device_name = "cpu"

    def __init__(self, artifact: StoredArrays, mode: str, context: int, threads: int, cache: str = "auto") -> None:
        self._model = CpuModel(artifact, mode, context, threads, cache)
        self.context, self.neurons, self.guess_head = context, self._model.neurons, self._model.new_guess_head()

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences: weights are read once for as many as a call takes."""
        with self._model.turn(sequences) as batches:
            return [result for batch in batches for result in self._model.run(batch)]
