"""Blocks of a prompt's tokens in a mixture of experts: each expert's tokens are gathered, on both sides.

    y_t ← Σ_k share_tk (Σ hot + Σ cold of expert taken_tk)

The router is where attention is; which tokens go to which expert is brought to the host once a layer. Cold weights of
an expert come to the GPU if enough tokens go to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.cuda.kernels import gemm
from pi_runtime.cuda.kernels.ffn_neurons import Neurons
from pi_runtime.cuda.plan_layout import GPU
from pi_runtime.cuda.prefill.prefill import Prefill
from pi_runtime.execution.cpu import Floats, Ints
from pi_runtime.kernels import ffn, moe
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS


@dataclass(frozen=True)
class Group:
    """The tokens of a block that go to one expert, in order."""

    expert: int
    token_N: Ints
    share_N: Floats
    there: bool
    """Whether the GPU has something to do for them, and of the cold neurons `streamed`: all."""
    streamed: bool
    here: bool


class RoutedPrefill(Prefill):
    """As `Prefill`, with experts."""

    def _ffn(self, layer: int, where: str, count: int) -> None:
        taken_TK, share_TK = (self._route_there if where == GPU else self._route_here)(layer, count)
        groups = tuple(self._groups(layer, taken_TK, share_TK))
        there, here = any(g.there for g in groups), any(g.here for g in groups)
        normed_TD = self._normed_TD[:count]
        if there and where != GPU:
            normed_TD.copy_(self._here_normed_TD[:count], non_blocking=True)
        if here and where == GPU:
            self._here_normed_TD[:count].copy_(normed_TD)
        if there:
            self._hot(layer, [g for g in groups if g.there], count)
        if here:
            self._here_y_TD.numpy()[:count] = 0
            for group in groups:
                if group.here:
                    self._add_cold(layer, group)
        if where == GPU:
            self._merge_there(layer, count, there=there, here=here)
        else:
            self._merge_here(layer, count, there=there, here=here)

    def fires(self, layer: int, given_TD: Floats) -> int:
        """As `Prefill.fires`, of the experts taken."""
        side, h, count = self._side, self._host, len(given_TD)
        self._here_normed_TD.numpy()[:count] = given_TD
        self._normed_TD[:count].copy_(self._here_normed_TD[:count])
        on_gpu = self._plan.attention[layer] == GPU
        routed = (self._route_there if on_gpu else self._route_here)(layer, count)
        tally_3, there, cuts = np.zeros(3, np.int64), torch.zeros((), device=self._normed_TD.device), side.cuts[layer]
        for g in self._groups(layer, *routed):
            cut, low, x_ND = cuts.cut_X[g.expert], cuts.base_X[g.expert], given_TD[g.token_N]
            if cut:
                hot = _of(side.layer_neurons(layer), low, low + cut)
                there += gemm.fires(hot, side.decoder, _sent(x_ND, there.device))
            if cut < side.decoder.d_ff:
                w, y_ND = h.table_LXW[layer, g.expert], np.zeros_like(x_ND)
                ffn.block(h.cfg, w, x_ND, cut, side.decoder.d_ff, True, h.b, tally_3, y_ND)
        return int(tally_3[0]) + int(there)

    def _route_there(self, layer: int, count: int) -> tuple[Ints, Floats]:
        """(T, K) experts taken, and their shares."""
        router = self._side.weights.matrix(f"layers/{layer}/ffn/router")
        value_TX = gemm.product(router, None, self._normed_TD[:count])
        best = value_TX.sort(dim=1, descending=True, stable=True)  # of equal ones the lower expert's first
        taken = self._side.decoder.experts_per_token
        share_TK = best.values[:, :taken].softmax(1)
        return best.indices[:, :taken].cpu().numpy(), share_TK.cpu().numpy()

    def _route_here(self, layer: int, count: int) -> tuple[Ints, Floats]:
        h, taken = self._host, self._side.decoder.experts_per_token
        taken_TK, share_TK = np.empty((count, taken), np.int64), np.empty((count, taken), np.float32)
        for low in range(0, count, BLOCK_TOKENS):
            part = slice(low, min(count, low + BLOCK_TOKENS))
            moe.route(h.cfg, h.table_LXW[layer, 0], self._here_normed_TD.numpy()[part], h.b)
            taken_TK[part], share_TK[part] = h.b.expert_TK[: part.stop - low], h.b.route_weight_TK[: part.stop - low]
        return taken_TK, share_TK

    def _groups(self, layer: int, taken_TK: Ints, share_TK: Floats) -> Iterator[Group]:
        """Those of experts that have tokens."""
        for expert, cut in enumerate(self._side.cuts[layer].cut_X):
            token_N, place_N = np.nonzero(taken_TK == expert)
            if len(token_N):
                cold = cut < self._side.decoder.d_ff
                streamed = cold and self._streamer is not None and len(token_N) >= self._stream_from
                share_N = share_TK[token_N, place_N]
                yield Group(expert, token_N, share_N, cut > 0 or streamed, streamed, cold and not streamed)

    def _hot(self, layer: int, groups: list[Group], count: int) -> None:
        """y ← the sums of what the GPU does."""
        side, d, normed_TD, y_TD = self._side, self._side.decoder, self._normed_TD[:count], self._y_TD[:count]
        cuts = side.cuts[layer]
        # All at once: such a copy waits for what the GPU is at.
        token_A = _sent(np.concatenate([g.token_N for g in groups]), normed_TD.device)
        share_A = _sent(np.concatenate([g.share_N for g in groups]), normed_TD.device)
        y_TD.zero_()
        begin = 0
        for g in groups:
            part = slice(begin, begin + len(g.token_N))
            begin, cut, low = part.stop, cuts.cut_X[g.expert], cuts.base_X[g.expert]
            x_ND = normed_TD[token_A[part]]
            y_ND = torch.zeros_like(x_ND)
            if cut:
                gemm.add_neurons(_of(side.layer_neurons(layer), low, low + cut), d, x_ND, y_ND)
            if g.streamed:
                assert self._streamer is not None
                end = (g.expert + 1) * d.d_ff
                for piece in self._streamer.pieces(layer, end - d.d_ff + cut, end):
                    gemm.add_neurons(piece, d, x_ND, y_ND)
            # A token is in a group once: no two additions meet.
            y_TD.index_add_(0, token_A[part], y_ND.mul_(share_A[part, None]))

    def _add_cold(self, layer: int, group: Group) -> None:
        """y ← y + what the CPU does for a group."""
        h, w = self._host, self._host.table_LXW[layer, group.expert]
        normed_TD, y_TD = self._here_normed_TD.numpy(), self._here_y_TD.numpy()
        cut, every = h.cuts[layer].cut_X[group.expert], h.decoder.d_ff
        for low in range(0, len(group.token_N), BLOCK_TOKENS):
            part = slice(low, low + BLOCK_TOKENS)
            token_N = group.token_N[part]
            y_ND = np.zeros((len(token_N), h.decoder.d_model), np.float32)
            ffn.block(h.cfg, w, normed_TD[token_N], cut, every, False, h.b, h.b.tally_L3[layer], y_ND)
            y_TD[token_N] += group.share_N[part, None] * y_ND


def _of(n: Neurons, low: int, high: int) -> Neurons:
    """The neurons [low, high)."""
    first_bias, up_bias = (None if bias is None else bias[low:high] for bias in (n.first_bias, n.up_bias))
    rest = n.rest.slice(n.k * low, n.k * high)
    return replace(n, first=n.first.slice(low, high), first_bias=first_bias, rest=rest, up_bias=up_bias)


def _sent(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers).to(device)
