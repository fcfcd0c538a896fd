"""Running an artifact's guess layer on the CPU: its block by the operators that the model's own layers are run by.

Shape letters: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, input_nbytes
from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.guess_layer import block_of
from pi_runtime.artifact.rungs import exact_rung
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.execution.guess_head import GuessHeadRun
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.data.weight_table import StoredArrays, config_of, ends_of, table_of
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.forward import Positions, after_ffn, attention, head
from pi_runtime.kernels.guess_head import GuessWeights, GuessWorkspace, enter
from pi_runtime.kernels.moe import ffn_of_experts

_NORM = "final_norm/weight"


class GuessLayerRun(GuessHeadRun):
    """The layer behind a model's last one, which drafts tokens (see `artifact.guess_layer`)."""

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
        self._weights, self._entered = _weights(own), _entered(block.d_embedding, d.d_model)

    def _run(self, at: Positions, tokens_T: Ints, states_TC: Floats | None, y_TD: Floats, logits_1S: Floats) -> Floats:
        cfg, w_X, eps, ws, tokens = self._cfg, self._w_X, self._eps, self._workspace, len(tokens_T)
        x_TD, computed = ws.x_TD[:tokens], states_TC is not None
        h_TD = (y_TD if states_TC is None else states_TC).copy()
        enter(self._weights, eps, self._final_norm if computed else 0, tokens_T, self._entered, h_TD, x_TD)
        attention(cfg, w_X[0], eps, self._cos_SJ, self._sin_SJ, at, x_TD, ws)
        select_T, tally_T3 = np.ones(tokens, np.int64), ws.counts_LT3[0, :tokens]
        ffn_of_experts(cfg, w_X, ws.normed_TD[:tokens], select_T, False, ws, tally_T3, x_TD)
        after_ffn(cfg, w_X[0], eps, ws.residual_TD[:tokens] if len(ws.residual_TD) else ws.normed_TD[:tokens], x_TD)
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


def _weights(own: _OneLayer) -> GuessWeights:
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
