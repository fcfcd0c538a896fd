"""Running an artifact's guess head, or its guess layer, on the CPU, beside the model that it drafts for.

A guess layer's block is run by the operators that the model's own layers are run by.

Shape letters: T tokens, C·D the states of some layers side by side, D model width, V vocabulary, S tokens of the short
list.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import numba
import numpy as np

from pi_runtime.artifact.buffers import rotary_table
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS, CHUNKS, attention_floats, input_nbytes
from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.guess_head import PREFIX, GuessHead, block_of
from pi_runtime.artifact.rungs import exact_rung
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.errors import ArtifactError
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagePool
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.data.weight_table import StoredArrays, config_of, ends_of, table_of
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.forward import Positions, after_ffn, attention, head
from pi_runtime.kernels.guess_head import GuessWeights, GuessWorkspace, enter, fuse, guess
from pi_runtime.kernels.moe import ffn_of_experts


class GuessHeadRun(ABC):
    """What drafts tokens for a model on the CPU; its caches hold keys and values of its own layer."""

    ids_S: Ints
    """The ids of the tokens that it can draft, rising."""
    states: tuple[int, ...]
    """The layers whose inputs it reads."""

    def __init__(self, open_artifact: Callable[[], StoredArrays], layer: Decoder, context: int, threads: int) -> None:
        """`open_artifact` returns it, or raises where it was closed. `layer`: its layer as a decoder of one."""
        artifact = open_artifact()
        self._artifact, self._context, self._threads = open_artifact, context, threads
        self.vocabulary, self._width = layer.vocab_size, layer.d_model
        self._manifest, self.states = replace(artifact.manifest, decoder=layer), artifact.manifest.guess_states
        self.page_nbytes = PagePool(self._manifest).page_nbytes
        """Bytes of a page of its keys and values: it has no more of them than its model has of the same tokens."""
        self._cos_SJ, self._sin_SJ = rotary_table(layer, context)

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(PagePool(self._manifest), self._context)

    def draft(self, cache: KVCache, tokens: list[int], states_TC: Floats | None, y_TD: Floats) -> tuple[Floats, Floats]:
        """Go on by some tokens, each of which follows a state; returns the last y (1, D) and its logits (S,).

        `states_TC`: what the model computed of the tokens before them; None: `y_TD` is what the head computed itself.
        """
        logits_1S = np.empty((1, len(self.ids_S)), np.float32)
        with ONE_AT_A_TIME:
            self._artifact().check_unchanged()
            numba.set_num_threads(self._threads)
            for first in range(0, len(tokens), BLOCK_TOKENS):
                part = slice(first, first + BLOCK_TOKENS)
                block_T = np.array(tokens[part], np.int64)
                cache.reserve(len(block_T))
                run_R4 = np.array([(0, len(block_T), cache.length, cache.table_address)], np.int64)
                position_T = np.arange(cache.length, cache.length + len(block_T))
                at = Positions(position_T, run_R4, *cache.pool.kernel_format)
                y_TD = self._run(at, block_T, None if states_TC is None else states_TC[part], y_TD, logits_1S)
                cache.append(block_T, select=False)
        return y_TD[-1:], logits_1S[0]

    @abstractmethod
    def _run(self, at: Positions, tokens_T: Ints, states_TC: Floats | None, y_TD: Floats, logits_1S: Floats) -> Floats:
        """The y of some tokens, from states or else from `y_TD`; logits ← those of the last one."""


class EagleRun(GuessHeadRun):
    """A guess head in EAGLE-3's form."""

    def __init__(self, open_artifact: Callable[[], StoredArrays], head: GuessHead, context: int, threads: int) -> None:
        artifact = open_artifact()
        super().__init__(open_artifact, head.layer_of(artifact.manifest.decoder), context, threads)
        self._eps = np.float32(head.norm_eps)
        self._weights, self._workspace = _weights(artifact, head), _workspace(head, artifact)
        self.ids_S = artifact.array(f"{PREFIX}ids").astype(np.int64)
        if not (np.diff(self.ids_S, prepend=-1) > 0).all() or self.ids_S[-1] >= self.vocabulary:
            raise ArtifactError(
                f"{PREFIX}ids: not rising ids of the vocabulary", remedy="pack the model anew, with another head"
            )

    def _run(self, at: Positions, tokens_T: Ints, states_TC: Floats | None, y_TD: Floats, logits_1S: Floats) -> Floats:
        found_TD: Floats = np.empty((len(tokens_T), self._width), np.float32) if states_TC is not None else y_TD.copy()
        if states_TC is not None:
            fuse(self._weights, states_TC, self._workspace, found_TD)
        angles = self._cos_SJ, self._sin_SJ
        guess(self._weights, self._eps, *angles, at, tokens_T, self._workspace, found_TD, logits_1S)
        return found_TD


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


_NORM = "final_norm/weight"


class GuessLayerRun(GuessHeadRun):
    """The layer behind a model's last one, which drafts tokens (see `artifact.guess_head`)."""

    def __init__(self, open_artifact: Callable[[], StoredArrays], context: int, threads: int) -> None:
        """`open_artifact` returns it, or raises where it was closed."""
        artifact = open_artifact()
        own, d = _OneLayer(artifact), artifact.manifest.decoder
        block, formats = own.manifest.decoder, own.manifest.formats
        super().__init__(open_artifact, block, context, threads)
        self.ids_S = np.arange(d.vocab_size)
        self._eps, self._cfg, self._ends = np.float32(d.norm_eps), config_of(block, formats), ends_of(own)
        self._w_X = table_of(own, own.manifest.layers[0].rung)[0]
        self._workspace = allocate_workspace(block, 0, layout=own.manifest.ffn_layout)
        self._final_norm = int(artifact.array(_NORM).ctypes.data)
        self._weights, self._entered = _layer_weights(own), _entered(block.d_embedding, d.d_model)

    def _run(self, at: Positions, tokens_T: Ints, states_TC: Floats | None, y_TD: Floats, logits_1S: Floats) -> Floats:
        cfg, w_X, eps, ws, tokens = self._cfg, self._w_X, self._eps, self._workspace, len(tokens_T)
        x_TD, computed = ws.x_TD[:tokens], states_TC is not None
        h_TD = (y_TD if states_TC is None else states_TC).copy()
        enter(self._weights, eps, self._final_norm if computed else 0, tokens_T, self._entered, h_TD, x_TD)
        attention(cfg, w_X[0], eps, self._cos_SJ, self._sin_SJ, at, x_TD, ws)
        select_T, tally_T3 = np.ones(tokens, np.int64), ws.counts_LT3[0, :tokens]
        ffn_of_experts(cfg, w_X, ws.normed_TD[:tokens], select_T, ws, tally_T3, x_TD)
        residual_TD = ws.residual_TD if len(ws.residual_TD) else ws.normed_TD
        after_ffn(cfg, self._ends, w_X[0], eps, tokens_T, residual_TD[:tokens], ws, x_TD)
        last_1D = x_TD[-1:].copy()
        head(cfg, self._ends, eps, last_1D, ws, logits_1S)
        return last_1D


class _OneLayer:
    """The layer, with the model's embedding and head, as an artifact of a model that has no other."""

    def __init__(self, artifact: StoredArrays) -> None:
        m, start = artifact.manifest, "layers/0/"
        own = {start + name.removeprefix(PREFIX): name for name in m.arrays if name.startswith(PREFIX)}
        self._artifact = artifact
        self._names = {name: name for name in m.arrays if not name.startswith((PREFIX, "layers/"))} | own
        self._names[_NORM] = f"{PREFIX}norm"
        self.manifest = replace(
            m,
            decoder=block_of(m.decoder),
            formats={part: m.formats[part] for part in PARTS},
            layers=(Layer(rung=exact_rung(m.decoder.sparse)),),
            arrays={name: m.arrays[stored] for name, stored in self._names.items()},
        )

    def array(self, name: str) -> Array:
        return self._artifact.array(self._names[name])

    def check_unchanged(self) -> None:
        self._artifact.check_unchanged()

    def close(self) -> None:
        self._artifact.close()


def _layer_weights(own: _OneLayer) -> GuessWeights:
    """Where the arrays are that its block's input is made of."""
    m = own.manifest
    places = {"embedding": "embedding", **{n: f"layers/0/{n}" for n in ("fc", "embedding_norm", "hidden_norm")}}
    places |= {f"{n}_scales": f"{places[n]}_scales" for n in ("embedding", "fc")}
    found = {n: int(own.array(place).ctypes.data) for n, place in places.items() if place in m.arrays}
    found["matrix_format"], found["embedding_format"] = (FORMATS[m.formats[n]].code for n in ("attention", "embedding"))
    return GuessWeights(**dict.fromkeys(GuessWeights._fields, 0) | found)


def _entered(narrow: int, width: int) -> GuessWorkspace:
    """What it works in before its block."""
    nothing, t = np.empty((0, 0), np.float32), BLOCK_TOKENS
    used = {
        "embedding_TW": np.empty((t, narrow), np.float32),
        "normed_TD": np.empty((t, width), np.float32),
        "joined_TU": np.empty((t, narrow + width), np.float32),
        "inputs": np.empty(t * input_nbytes(narrow + width) // 8, np.int64),
        "unpacked_CBE": np.empty((0, 0, 0), np.float32),
    }
    return GuessWorkspace(**dict.fromkeys(GuessWorkspace._fields, nothing) | used)  # type: ignore[arg-type]
