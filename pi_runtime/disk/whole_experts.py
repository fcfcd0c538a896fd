"""Experts of which all rows are needed together: they come and go as a whole, and the least used one makes room.

Shape letters: X experts, U experts of all layers whose experts come and go as a whole, T tokens, K places of a router's
list, the largest value first.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import ROW_ARRAYS
from pi_runtime.disk.kernels import neuron_cache
from pi_runtime.disk.kernels.neuron_cache import LayerRows
from pi_runtime.disk.ram_plan import RamPlan, expert_counts
from pi_runtime.disk.row_slots import REGIONS, Request, RowRange, RowSlots
from pi_runtime.kernels.data.matrix_view import Ints

HALF_LIVES = (32, 512)
"""Tokens in which a use of an expert comes to count half, of late and in the long run. Chosen on traces of one text, of
changing subjects and of several users (`nox -s bench -- disk --parts residency`)."""
PROFILED_TOKENS = (32, 256)
"""So many tokens of each count what the profile knows of experts when a model is opened."""

WORTH_READING = 0.5
"""An expert is read ahead where those at its place of the list were taken in at least this share of their turns: a
wrong one takes as long to read as a right one saves, and drives another out."""


class EarlyNames:
    """How often the experts that a router names before its layer's turn are taken in it, place by place.

    Those count that are absent when they are named, whether or not they are read.
    """

    def __init__(self, places: int) -> None:
        self._named_K, self._taken_K = np.ones((2, places))
        self._absent_TK: Ints | None = None

    def worth_reading(self, expert_TK: Ints, is_there_TK: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """(T, K) which experts' places are those of experts that are mostly taken; remembers the absent ones."""
        self._absent_TK = np.where(is_there_TK, -1, expert_TK)
        found: npt.NDArray[np.bool_] = np.broadcast_to(self._taken_K >= WORTH_READING * self._named_K, expert_TK.shape)
        return found

    def learn(self, taken_X: Ints) -> None:
        """Learn from the experts that the layer named last took in its turn, if one was named."""
        if self._absent_TK is not None:
            self._named_K += (self._absent_TK >= 0).sum(0)
            self._taken_K += np.isin(self._absent_TK, taken_X).sum(0)
            self._absent_TK = None


class Heat:
    """How often experts are used: Σ uses ÷ tokens over the two half-lives; both decay with each token."""

    def __init__(self, profiled_U: npt.NDArray[np.float64]) -> None:
        """`profiled_U`: uses a token by the profile."""
        self._decay_2 = 2.0 ** (-1 / np.array(HALF_LIVES))
        self._tokens_2 = np.array(PROFILED_TOKENS, np.float64)
        self._uses_2U = self._tokens_2[:, None] * profiled_U
        self.value_U = 2 * profiled_U

    def use(self, unit_I: Ints | int) -> None:
        """Count a use of some experts."""
        self._uses_2U[:, unit_I] += 1
        self.value_U[unit_I] += (1 / self._tokens_2).sum()

    def age(self) -> None:
        """Let uses so far count less: a step is over, which counts as one token, however many go together."""
        self._uses_2U *= self._decay_2[:, None]
        self._tokens_2 = self._tokens_2 * self._decay_2 + 1
        np.sum(self._uses_2U / self._tokens_2[:, None], axis=0, out=self.value_U)


class ExpertStore:
    """The experts of all layers that share a cache, in slots of rows; the one with least heat makes room.

    An expert's *heat* is the sum of two rates, its uses a token of late and in the long run. The former follows a
    subject; the latter keeps what all subjects need.
    """

    def __init__(self, slots: RowSlots, heat: Heat, places: int) -> None:
        """`places`: of a router's list of experts."""
        self._slots, self._reader, self._d_ff, self.heat = slots, slots.reader, slots.d_ff, heat
        experts = len(slots.arenas["first"].rows_L[0].slot_N) // slots.d_ff
        layers = [layer for layer, by_expert in enumerate(slots.plan.by_expert_L) if by_expert]
        self._unit_of = {layer: n * experts for n, layer in enumerate(layers)}
        self.room = _experts_in_a_batch(slots)
        """Experts that one batch of reads has room for."""
        self._early = EarlyNames(places)

    def request(self, layer: int, expert_X: Ints) -> Request:
        """A request for all rows of some experts."""
        row_I = (expert_X[:, None] * self._d_ff + np.arange(self._d_ff)).ravel()
        return Request(layer, 0, [(name, row_I) for name in ROW_ARRAYS])

    def _rows(self, layer: int) -> list[LayerRows]:
        return [arena.rows_L[layer] for arena in self._slots.arenas.values()]

    def are_there(self, layer: int, expert_X: Ints) -> npt.NDArray[np.bool_]:
        """(X,) which of some experts have slots, whether or not their rows are still on their way."""
        found: npt.NDArray[np.bool_] = np.all(
            [rows.slot_N[expert_X * self._d_ff] for rows in self._rows(layer)], axis=0
        )
        return found

    def holds(self, layer: int, expert_X: Ints) -> bool:
        """Whether experts are in memory, all of them, and none is still on its way: each then counts as used, and stays
        until the layer after the next one begins."""
        is_ahead = self._slots.turns[layer].ahead is not None
        self._early.learn(expert_X)
        if not self.are_there(layer, expert_X).all():
            return False
        if is_ahead and self._reader.is_pending(REGIONS + layer % 2):
            return False
        self._slots.wait_ahead(layer)
        for rows in self._rows(layer):
            rows.clock_7[neuron_cache.TURN] += not is_ahead
            rows.turn_S[rows.slot_N[expert_X * self._d_ff]] = rows.clock_7[neuron_cache.TURN]
        self._use(layer, expert_X)
        return True

    def _use(self, layer: int, expert_X: Ints) -> None:
        """Count a use of experts that are there."""
        for rows in self._rows(layer):
            rows.counts_2[neuron_cache.HITS] += len(expert_X) * self._d_ff
        self.heat.use(self._unit_of[layer] + expert_X)

    def arriving(self, layer: int, expert_X: Ints) -> Iterator[list[int]] | None:
        """Begin to read the absent ones of a layer's experts, all of them at once.

        Returns groups of experts, each in memory when it is taken, those that are there now first; None where there is
        no room for all.
        """
        is_there = self.are_there(layer, expert_X)
        there_X, halves = expert_X[is_there], np.array_split(expert_X[~is_there], REGIONS)
        if len(halves[0]) > self.room:
            return None
        self._slots.begin_turn(self.request(layer, there_X))
        self._slots.turns[layer].is_open = True
        for region, some_X in enumerate(halves):
            if len(some_X) and not self.ask(self.request(layer, some_X), region):
                self._reader.wait(0)
                return None
        self._use(layer, there_X)
        return self._groups(layer, there_X.tolist(), [some_X.tolist() for some_X in halves])

    def _groups(self, layer: int, there: list[int], halves: list[list[int]]) -> Iterator[list[int]]:
        coming = self._slots.turns[layer].coming
        yield [expert for expert in there if expert not in coming]
        self._slots.wait_ahead(layer)
        yield [expert for expert in there if expert in coming]
        for region, some in enumerate(halves):
            self._reader.wait(region)
            yield some

    def ask(self, request: Request, region: int) -> bool:
        """Begin the turn of a request for whole experts, and to read those that are missing into the cache; False where
        it has no room for all of them."""
        slots, layer, base = self._slots, request.layer, request.expert * self._d_ff
        slots.begin_turn(request)
        slots.turns[layer].is_open = True
        if region < REGIONS:
            self.heat.use(self._unit_of[layer] + (base + request.needs[0][1][:: self._d_ff]) // self._d_ff)
        before = {name: slots.arenas[name].counts_L2[layer].copy() for name, _ in request.needs}
        slots.ask(RowRange(request, 0, CHUNKS), region, keep=True, stage=False)
        has_all = all(slots.arenas[name].rows_L[layer].slot_N[base + row_I].all() for name, row_I in request.needs)
        if region >= REGIONS:
            slots.set_counts(layer, before)  # they are counted when they are needed
        elif not has_all:  # what remains is staged, by other reads of the same batch, and counted then
            self._reader.wait(region)
            slots.set_counts(layer, before)
        return has_all

    def read_ahead(self, layer: int, expert_TK: Ints) -> None:
        """Begin to read those of the experts that a coming layer's router names early that are missing, and mostly
        taken; a place of the list that is empty has −1."""
        is_there_TK = (expert_TK < 0) | self.are_there(layer, expert_TK)
        may_come_TK = is_there_TK | self._early.worth_reading(expert_TK, is_there_TK)
        expert_X = np.unique(expert_TK[may_come_TK & (expert_TK >= 0)])[: self.room]
        absent_X = expert_X[~self.are_there(layer, expert_X)]
        if len(absent_X):
            turn, request = self._slots.turns[layer], self.request(layer, expert_X)
            turn.coming = absent_X.tolist()
            self.ask(request, REGIONS + layer % 2)
            turn.ahead = request

    def let_go(self, layer: int, expert: int) -> None:
        """Say that an expert has been used, and may go before the turn is over."""
        for rows in self._rows(layer):
            neuron_cache.end_unit(rows, expert * self._d_ff)


def profiled_heat(artifact: Artifact, plan: RamPlan) -> Heat:
    """The heat of experts before any token has run, by the profile's counts, if any."""
    layers = [layer for layer, by_expert in enumerate(plan.by_expert_L) if by_expert]
    return Heat(np.concatenate([np.zeros(0), *(_profiled(artifact, layer) for layer in layers)]))


def _profiled(artifact: Artifact, layer: int) -> npt.NDArray[np.float64]:
    """(X,) how often a token uses each expert of a layer by the profile's counts, if any."""
    count_X = expert_counts(artifact, layer)
    return count_X * (artifact.manifest.decoder.experts_per_token / max(1.0, count_X.sum()))


def _experts_in_a_batch(slots: RowSlots) -> int:
    """Whole experts of which a batch of reads has room for all."""
    some, reader, d_ff = list(slots.arenas.values()), slots.reader, slots.d_ff
    if any(places.nbytes != places.slot_nbytes for arena in some for places in arena.places_L):
        return reader.rows // (len(some) * d_ff)  # rows do not lie side by side: a read for each
    return reader.rows // sum(2 + d_ff // (reader.piece // arena.nbytes) for arena in some)
