"""Reading rows of the next FFN ahead: its predictor or router is asked before its turn, where tokens are faster so.

A router that reads what enters its layer names the experts exactly, before attention.

Shape letters: T tokens, D model width, N tokens that take one expert, F neurons of one expert.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from pi_runtime.artifact.footprint import FEW_TOKENS
from pi_runtime.artifact.rows import ROW_ARRAYS, TWO_PHASES_FROM
from pi_runtime.disk.row_slots import Request
from pi_runtime.disk.row_store import RowStore
from pi_runtime.execution.executor import Floats, Ints
from pi_runtime.execution.host import CpuModel
from pi_runtime.execution.rows import FfnTokens
from pi_runtime.kernels import moe
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.memory import Taken, ffn_of, tokens_by_expert, whole_batch
from pi_runtime.kernels.ops.linear import norm


class FasterWay:
    """Which of two ways is faster, by the seconds they took; the other one is tried again now and then."""

    TRIED, PERIOD = 4, 64
    """Of each `PERIOD` tokens so many of the first ones go the way that was slower, each before one that goes the other
    way: what a text needs changes, so that only neighbours are alike."""

    def __init__(self) -> None:
        self._seconds = [deque[float](maxlen=self.TRIED) for _ in range(2)]
        self._tokens = 0

    @property
    def second(self) -> bool:
        """Whether the next token goes the second way."""
        is_other, pairs = self._tokens % 2 == 0, 2 * self.TRIED
        if self._tokens < self.TRIED + pairs:
            return is_other and self._tokens >= self.TRIED
        faster = sum(self._seconds[1]) < sum(self._seconds[0])
        return faster != (is_other and self._tokens % self.PERIOD < pairs)

    def count(self, seconds: float) -> None:
        """Count a token that went as `second` says; the first ones of all, which fill the caches, are pushed out."""
        self._seconds[self.second].append(seconds)
        self._tokens += 1


class TwoPhases:
    """The layers whose `rest` is read only when it is known what fires: on the gate rung, or where that saves."""

    def __init__(self, rows: RowStore) -> None:
        self._always_L, self.by_layer = rows.plan.two_phases_L, list(rows.plan.two_phases_L)
        self._spared_L = np.zeros(len(self.by_layer))
        """Share of the named neurons that did not fire lately."""
        self._rest_share = rows.arenas["rest"].nbytes / sum(arena.nbytes for arena in rows.arenas.values())

    def learn(self, counts_LT2: Ints) -> None:
        """Learn from the rows of `first` that a few tokens read, and from the neurons that they kept."""
        read_L, kept_L = counts_LT2.sum(1).T
        self._spared_L += 0.1 * (1 - kept_L / np.maximum(read_L, 1) - self._spared_L)
        saves_L = self._spared_L * self._rest_share >= TWO_PHASES_FROM
        self.by_layer = (saves_L | self._always_L).tolist()


class ReadAhead:
    """Names neurons of a coming layer by the residual as it is, which the steps before that layer change little."""

    def __init__(self, model: CpuModel, rows: RowStore) -> None:
        d = model.manifest.decoder
        self._model, self._rows = model, rows
        self._ws = allocate_workspace(d, model.largest_rank, FEW_TOKENS)
        self._ffn = ffn_of(model.cfg, self._ws)
        self._named_F = np.empty(d.d_ff + 1, np.int64)
        self.way, self.two_phases = FasterWay(), TwoPhases(rows)
        cfg = model.cfg
        self.is_exact = cfg.experts > 1 and bool(cfg.router_early)
        """Whether experts are known before attention."""
        before = self.is_exact or cfg.block in (weight_table.SEQUENTIAL, weight_table.PARALLEL)
        self.can_L = [
            before and not rows.is_whole(n) and (rows.plan.by_expert_L[n] or (w["picks"] and not self.is_exact))
            for n, w in enumerate(model.table_LX[:, 0])
        ]
        """Layers with rows to be read, and an FFN that reads a norm of the residual, or a router before it."""
        self.can_L.append(False)  # behind the last one
        self._next_L = [min((n for n in d.ffn_layers if n > layer), default=d.n_layers) for layer in range(d.n_layers)]
        self.take(None)

    def learn(self, counts_LT2: Ints, seconds: float) -> None:
        """Learn from what a few tokens read and kept, and from the seconds that each took."""
        self.two_phases.learn(counts_LT2)
        self.way.count(seconds)

    def take(self, tokens: FfnTokens | None) -> None:
        """Go on with these tokens, few or many; None: nothing is read for them."""
        few = tokens is not None and len(tokens.x_TD) <= FEW_TOKENS and tokens.select_T.any()
        self._tokens = tokens if few else None
        self._by_residual = bool(few) and not self.is_exact and self.way.second

    def before_attention(self, layer: int) -> None:
        """Begin to read the rows of experts that are known exactly, before attention."""
        if self._tokens is not None and self.is_exact and self.can_L[layer]:
            self._read(layer, self._tokens)

    def next(self, layer: int) -> None:
        """Begin to read what the next FFN behind this one will probably need, where tokens are faster so."""
        behind = self._next_L[layer]
        if self._tokens is not None and self._by_residual and self.can_L[behind]:
            self._read(behind, self._tokens)

    def _read(self, layer: int, tokens: FfnTokens) -> None:
        x_TD, _, _, select_T = tokens
        taken = self._taken(layer, x_TD)
        if self._rows.plan.by_expert_L[layer]:
            self._rows.experts.read_ahead(layer, self._ws.expert_TK[: len(x_TD)])
            return
        arrays = ROW_ARRAYS[:1] if self.two_phases.by_layer[layer] else ROW_ARRAYS
        row_I = self._named(layer, taken, select_T)
        self._rows.read_ahead(Request(layer, 0, [(name, row_I) for name in arrays]))

    def _taken(self, layer: int, x_TD: Floats) -> list[Taken]:
        """The experts that will probably be taken, by tokens whose FFN reads `_ws.normed_TD`."""
        m, ws, w_X = self._model, self._ws, self._model.table_LX[layer]
        normed_TD = ws.normed_TD[: len(x_TD)]
        name = "ffn_norm" if w_X[0]["ffn_norm"] else "attention_norm"
        norm(m.cfg.centred, m.eps, int(w_X[0][name]), int(w_X[0][f"{name}_bias"]), x_TD, normed_TD)
        if m.cfg.experts > 1:
            moe.route(m.cfg, w_X[0], x_TD if m.cfg.router_early else normed_TD, ws)
        return tokens_by_expert(ws.expert_TK[: len(x_TD)], ws.route_weight_TK, m.cfg.experts)

    def _named(self, layer: int, taken: Sequence[Taken], select_T: Ints) -> Ints:
        """The rows of a layer that will probably be needed."""
        m, w_X = self._model, self._model.table_LX[layer]
        steps.prepare(self._ffn, w_X[0], moe.ends_of_ffn(self._ws)[0][: len(select_T)])
        named: list[Ints] = []
        for expert, token_N, weight_N in taken:
            batch = whole_batch(self._ffn, w_X, expert, token_N, select_T[token_N], weight_N)
            count = steps.name_neurons(self._ffn, batch, self._named_F)
            named_I = self._named_F[:count]
            named.append(expert * m.cfg.d_ff + named_I[named_I >= self._rows.plan.cut(layer, expert)])
        return np.concatenate(named)
