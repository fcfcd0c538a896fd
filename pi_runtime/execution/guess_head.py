"""Running an artifact's guess head on the CPU, beside the model that it drafts for.

Shape letters: T tokens, C·D the states of some layers side by side, D model width, S tokens of the short list.
"""

from collections.abc import Callable
from dataclasses import replace

import numba
import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, CHUNKS, attention_floats, input_nbytes
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.guess_head import PREFIX, GuessHead
from pi_runtime.errors import ArtifactError
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagePool
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.data.weight_table import StoredArrays
from pi_runtime.kernels.forward import Positions
from pi_runtime.kernels.guess_head import GuessWeights, GuessWorkspace, fuse, guess
from pi_runtime.kernels.reference_attention import rotary_table


class GuessHeadRun:
    """What drafts tokens for a model on the CPU; its caches hold keys and values of its own layer."""

    def __init__(self, open_artifact: Callable[[], StoredArrays], head: GuessHead, context: int, threads: int) -> None:
        """`open_artifact` returns it, or raises where it was closed."""
        artifact = open_artifact()
        self._artifact, self._context, self._threads, d = open_artifact, context, threads, artifact.manifest.decoder
        layer, self._eps, self._width = head.layer_of(d), np.float32(head.norm_eps), d.d_model
        self._manifest = replace(artifact.manifest, decoder=layer)
        self.page_nbytes = PagePool(self._manifest).page_nbytes
        """Bytes of a page of its keys and values: it has no more of them than its model has of the same tokens."""
        self._cos_SJ, self._sin_SJ = rotary_table(layer, context)
        self._weights, self._workspace = _weights(artifact, head), _workspace(head, artifact)
        self.ids_S = artifact.array(f"{PREFIX}ids").astype(np.int64)
        """The ids of the tokens that it can draft, rising."""
        if not (np.diff(self.ids_S, prepend=-1) > 0).all() or self.ids_S[-1] >= d.vocab_size:
            raise ArtifactError(f"{PREFIX}ids: not rising ids of the vocabulary")
        self.vocabulary = d.vocab_size

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(PagePool(self._manifest), self._context)

    def draft(self, cache: KVCache, tokens: list[int], states_TC: Floats | None, y_TD: Floats) -> tuple[Floats, Floats]:
        """Go on by some tokens, each of which follows a state; returns the last y (1, D) and its logits (S,).

        `states_TC`: what the model computed of the tokens before them; None: `y_TD` is what the head computed itself.
        """
        with ONE_AT_A_TIME:
            self._artifact().check_unchanged()
            numba.set_num_threads(self._threads)
            for first in range(0, len(tokens), BLOCK_TOKENS):
                part = slice(first, first + BLOCK_TOKENS)
                block_T = np.array(tokens[part], np.int64)
                if states_TC is None:
                    y_TD = y_TD.copy()
                else:
                    y_TD = np.empty((len(block_T), self._width), np.float32)
                    fuse(self._weights, states_TC[part], self._workspace, y_TD)
                logits_S = self._run(cache, block_T, y_TD)
        return y_TD[-1:], logits_S

    def _run(self, cache: KVCache, tokens_T: Ints, y_TD: Floats) -> Floats:
        cache.reserve(len(tokens_T))
        logits_1S = np.empty((1, len(self.ids_S)), np.float32)
        count, start = len(tokens_T), cache.length
        run_R4 = np.array([(0, count, start, cache.table_address)], np.int64)
        code = FORMATS[cache.pool.format].code
        at = Positions(np.arange(start, start + count), run_R4, code, cache.pool.row_nbytes)
        guess(
            self._weights, self._eps, self._cos_SJ, self._sin_SJ, at, tokens_T, self._workspace, y_TD, logits_1S
        )  # fmt: skip
        cache.append(tokens_T, select=False)
        found: Floats = logits_1S[0]
        return found


def _weights(artifact: StoredArrays, head: GuessHead) -> GuessWeights:
    """Where its arrays are, as long as the artifact is open."""
    arrays = artifact.manifest.arrays

    def address(name: str) -> int:
        name = name if name.startswith("embedding") and not name.endswith("norm") else PREFIX + name
        return int(artifact.array(name).ctypes.data) if name in arrays else 0

    numbers = {
        "heads": head.n_heads,
        "kv_heads": head.n_kv_heads,
        "head_dim": head.head_dim,
        "matrix_format": FORMATS[head.format].code,
        "embedding_format": FORMATS[artifact.manifest.formats["embedding"]].code,
    }
    return GuessWeights(**numbers, **{n: address(n) for n in GuessWeights._fields if n not in numbers})


def _workspace(head: GuessHead, artifact: StoredArrays) -> GuessWorkspace:
    d, t, heads = artifact.manifest.decoder, BLOCK_TOKENS, head.n_heads * head.head_dim
    joined, fused = d.d_embedding + d.d_model, len(head.states) * d.d_model
    widest = max(joined, fused, heads, head.d_ff)
    return GuessWorkspace(
        embedding_TW=np.empty((t, d.d_embedding), np.float32),
        normed_TD=np.empty((t, d.d_model), np.float32),
        joined_TU=np.empty((t, joined), np.float32),
        qkv_TQ=np.empty((t, heads + 2 * head.n_kv_heads * head.head_dim), np.float32),
        mixed_TQ=np.empty((t, heads), np.float32),
        gate_TF=np.empty((t, head.d_ff), np.float32),
        up_TF=np.empty((t, head.d_ff), np.float32),
        inputs=np.empty(t * input_nbytes(widest) // 8, np.int64),
        attention_CX=np.empty((CHUNKS, attention_floats(head.layer_of(d))), np.float32),
        unpacked_CBE=np.empty((CHUNKS, 0, head.head_dim), np.float32),
    )
