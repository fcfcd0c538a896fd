"""An open artifact on the CPU, as compiled code takes it, with the memory that this works in.

Shape letters: L layers, X experts, S positions, J rotary frequencies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np

from pi_runtime.artifact.buffers import rotary_table, rotary_tables
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.errors import ClosedError
from pi_runtime.execution.executor import Ints, SequenceResult, SequenceStep
from pi_runtime.execution.guess_head import EagleRun, GuessHeadRun, GuessLayerRun
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import Allowance, PagePool
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME, start_threads
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats
from pi_runtime.kernels.data.weight_table import RowsAt, StoredArrays
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.ffn.memory import Ffn, ffn_of
from pi_runtime.kernels.forward import Positions, Step


def _rotary_tables(d: Decoder, context: int) -> tuple[Floats, Floats]:
    """Cosines and sines of the angles, behind them those of layers with a window that have others."""
    tables = [rotary_table(d, context)]
    if d.windowed_frequencies:
        scale = d.windowed_scale or d.rotary_scale
        own = replace(d, rotary_frequencies=d.windowed_frequencies, rotary_scale=scale)
        tables.append(rotary_table(own, context))
    cos_SJ, sin_SJ = (buffer.in_ram() for buffer in rotary_tables(d, context).values())
    for n, (cos, sin) in enumerate(tables):
        rows, columns = slice(n * context, (n + 1) * context), slice(cos.shape[1])
        cos_SJ[rows, columns], sin_SJ[rows, columns] = cos, sin
    return cos_SJ, sin_SJ


class CpuModel:
    """An open artifact as kernels take it: tables of its weights, and the memory that kernels work in.

    `threads` limits numba's threads for the calls made here; results do not depend on it. `cache` is the format of keys
    and values, of `buffers.CACHE_FORMATS`; `kv` limits what they take. `rows_at` says where rows are that do not lie
    in the artifact's arrays.
    """

    def __init__(
        self,
        artifact: StoredArrays,
        mode: str,
        context: int,
        threads: int,
        cache: str = "auto",
        kv: Allowance | None = None,
        rows_at: RowsAt | None = None,
    ) -> None:
        start_threads()
        # Kept because the table holds addresses into its mapping.
        self.artifact: StoredArrays | None = artifact
        self.manifest = artifact.manifest
        decoder, layers = artifact.manifest.decoder, artifact.manifest.layers
        self.threads, self.context, self.cache, self._kv = threads, context, cache, kv
        self.cfg = weight_table.config_of(decoder, artifact.manifest.formats)
        self.ends = weight_table.ends_of(artifact)
        self.table_LX = weight_table.table_of(artifact, mode, rows_at)
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
        return self.cfg.d_ff * self.cfg.experts * len(self.manifest.decoder.ffn_layers)

    def step_of(self, sequences: Sequence[SequenceStep]) -> Step:
        """The next tokens of some sequences, with memory for the states that are wanted."""
        for s in sequences:
            s.cache.hold(is_held=s.is_tried)
        step, states = tokens_of(sequences, len(self.table_LX)), _all_states(sequences)
        if not states:
            return step
        step.state_L[states] = np.arange(len(states))
        shape = len(step.tokens_T), len(states) * self.cfg.d_model
        return step._replace(states_TC=np.empty(shape, np.float32))

    def finished(self, sequences: Sequence[SequenceStep], states_TC: Floats | None = None) -> list[SequenceResult]:
        """The results of sequences whose tokens have just run; their caches take the tokens."""
        for s in sequences:
            s.cache.append(s.tokens, s.select)
        return list(self._results(sequences, states_TC))

    def _results(self, sequences: Sequence[SequenceStep], states_TC: Floats | None) -> Iterator[SequenceResult]:
        """The sequences' results, out of the memory that the next call overwrites."""
        ws, token, row = self.workspace, 0, 0
        kept = _all_states(sequences)
        for s in sequences:
            tokens = len(s.tokens)
            rows = tokens if s.logits == "all" else 1
            counts_LT3 = ws.counts_LT3[:, token : token + tokens]
            one = tokens == 1 and s.select
            yield SequenceResult(
                logits_TV=ws.logits_TV[row : row + rows].copy(),
                rows_L2=counts_LT3[:, 0, 1:].copy() if one else None,
                states_TC=None
                if states_TC is None or not s.states
                else np.hstack(
                    [np.hsplit(states_TC[token : token + tokens], len(kept))[kept.index(layer)] for layer in s.states]
                ),
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
    def step(
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
            for s in sequences:
                s.cache.reserve(len(s.tokens))
            yield _checked(artifact, batches(sequences))
            artifact.check_unchanged()

    def check_open(self) -> StoredArrays:
        """The artifact. Raises ClosedError once it is closed."""
        if self.artifact is None:
            raise ClosedError("the model is closed", remedy="read all of what it generates before closing it")
        return self.artifact

    def close(self) -> None:
        """Close the artifact."""
        if self.artifact is not None:
            self.artifact.close()
        self.artifact = None


def _all_states(sequences: Sequence[SequenceStep]) -> list[int]:
    """The layers whose inputs any sequence of a step wants."""
    return sorted({layer for s in sequences for layer in s.states})


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
    return Positions(position_T, np.array(run_R4, np.int64), *pool.kernel_format)


def batches(sequences: Sequence[SequenceStep]) -> Iterator[list[SequenceStep]]:
    """Cut a step into calls of at most `BLOCK_TOKENS` tokens; those of a call have one observer, or none."""
    batch: list[SequenceStep] = []
    for s in sequences:
        together = sum(len(other.tokens) for other in batch) + len(s.tokens) <= BLOCK_TOKENS
        if batch and (s.observer is not batch[0].observer or not together):
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


def token_blocks(count: int, size: int = BLOCK_TOKENS) -> Iterator[slice]:
    """The tokens [0, count) in blocks of at most `size`, as many as the CPU works on at once."""
    for low in range(0, count, size):
        yield slice(low, min(count, low + size))
