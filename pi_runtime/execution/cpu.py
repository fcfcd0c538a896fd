"""Running blocks of tokens of one open artifact on the CPU: the compiled forward pass with its memory.

Shape letters: T tokens, V vocabulary, L layers, X experts, W columns of the weight table, S positions, J rotary
frequencies.
"""

import numba
import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.errors import UsageError
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels.codegen.threads import start_threads
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS, allocate_workspace
from pi_runtime.kernels.forward import forward
from pi_runtime.kernels.reference import rotary_table

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class CpuExecutor:
    """Runs one artifact in one mode, all of it on the CPU.

    `threads` limits numba's threads for the calls made here; results do not depend on it.
    """

    plan: Plan | None = None
    """The placement it follows; None where the CPU has everything."""
    device_name = "cpu"
    notice: str | None = None
    """What the user should know of where it runs."""

    def __init__(self, artifact: Artifact, mode: str, context: int, threads: int) -> None:
        start_threads()
        # Kept because the table holds addresses into its mapping.
        self._artifact: Artifact | None = artifact
        decoder, layers = artifact.manifest.decoder, artifact.manifest.layers
        self._threads, self.context = threads, context
        self._cfg = weight_table.config_of(decoder, artifact.manifest.formats)
        self._ends = weight_table.ends_of(artifact)
        self._table_LXW = weight_table.table_of(artifact, mode)
        self._eps = np.float32(decoder.norm_eps)
        self._largest_rank = max((layer.rank or 0 for layer in layers), default=0)
        self._workspace = allocate_workspace(self._cfg, len(layers), self._largest_rank)
        self._cos_SJ, self._sin_SJ = rotary_table(decoder, context)

    @property
    def block_tokens(self) -> int:
        """Most tokens of a prompt that one call of `run` takes."""
        return BLOCK_TOKENS

    @property
    def neurons(self) -> int:
        """Neurons of all layers and experts."""
        return self._cfg.d_ff * self._cfg.experts * len(self._table_LXW)

    @property
    def rows_read(self) -> Ints:
        """(layers, 2): rows of `first` read and neurons kept, in the last call with a single token and selection."""
        return self._workspace.rows_L2

    @property
    def tally(self) -> Ints:
        """(layers, 3): neurons that fire, rows of `first` read, and neurons that fire and are kept, in the last
        call with `select` and `every`."""
        return self._workspace.tally_L3

    def run(self, tokens: Ints, cache: KVCache, *, select: bool, every: bool) -> Floats:
        """Append up to `BLOCK_TOKENS` tokens to the cache; returns logits (T, V) if `every`, else (1, V) of the last.

        The result is a view of memory that the next call overwrites. The caller has checked token ids and room.
        """
        self._check(tokens, cache)
        numba.set_num_threads(self._threads)
        forward(
            self._cfg,
            self._ends,
            self._table_LXW,
            self._eps,
            self._cos_SJ,
            self._sin_SJ,
            tokens,
            len(cache.tokens),
            cache.words,
            select,
            every,
            self._workspace,
        )
        cache.tokens += tokens.tolist()
        return self._workspace.logits_TV[: len(tokens) if every else 1]

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        self._check_open()
        assert self._artifact is not None
        return KVCache(self._artifact.manifest, self.context)

    def close(self) -> None:
        """Close the artifact; `run` refuses from now on."""
        if self._artifact is not None:
            self._artifact.close()
        self._artifact = None

    def _check(self, tokens: Ints, cache: KVCache) -> None:
        assert 0 < len(tokens) <= min(BLOCK_TOKENS, cache.room), (len(tokens), cache.room)
        self._check_open()

    def _check_open(self) -> None:
        if self._artifact is None:
            raise UsageError("the model is closed", remedy="read all of what it generates before closing it")
