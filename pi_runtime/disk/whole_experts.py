"""Experts of which all rows are needed together: which are in memory, and how often each was used lately.

Shape letters: X experts, U experts of all layers whose experts come and go as a whole.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import Artifact
from pi_runtime.disk.arena import RowArena
from pi_runtime.disk.kernels.neuron_cache import LayerRows
from pi_runtime.disk.ram_plan import RamPlan, expert_counts
from pi_runtime.disk.reader import Reader
from pi_runtime.kernels.data.matrix_view import Ints

HALF_LIVES = (32, 512)
"""Tokens in which a use of an expert comes to count half, of late and in the long run. Chosen on traces of one text, of
changing subjects and of several users (`nox -s bench -- disk --parts residency`)."""
PROFILED_TOKENS = (32, 256)
"""So many tokens of each count what the profile knows of experts when a model is opened."""


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


class WholeExperts:
    """The experts of all layers that share a cache, in which the one with least heat makes room.

    An expert's *heat* is the sum of two rates, its uses a token of late and in the long run. The former follows a
    subject; the latter keeps what all subjects need.
    """

    def __init__(self, artifact: Artifact, plan: RamPlan) -> None:
        d = artifact.manifest.decoder
        layers = [layer for layer, by_expert in enumerate(plan.by_expert_L) if by_expert]
        self._unit_of, self._d_ff = {layer: n * d.n_experts for n, layer in enumerate(layers)}, d.d_ff
        self.heat = Heat(np.concatenate([np.zeros(0), *(_profiled(artifact, layer) for layer in layers)]))
        self.rows_of: list[list[LayerRows]] = []
        """The rows of each layer, of both arrays; who has them tells."""

    def rows(self, expert_X: Ints) -> Ints:
        """All rows of some experts."""
        return (expert_X[:, None] * self._d_ff + np.arange(self._d_ff)).ravel()

    def slots(self, layer: int, expert_X: Ints) -> list[Ints]:
        """The slots of the first rows of some experts, by array; 0 where one is absent."""
        return [rows.slot_N[expert_X * self._d_ff] for rows in self.rows_of[layer]]

    def are_there(self, layer: int, expert_X: Ints) -> npt.NDArray[np.bool_]:
        """(X,) which of some experts have slots, whether or not their rows are still on their way."""
        found: npt.NDArray[np.bool_] = np.all(self.slots(layer, expert_X), axis=0)
        return found

    def use(self, layer: int, expert_X: Ints | int) -> None:
        """Count a use of some experts."""
        self.heat.use(self._unit_of[layer] + expert_X)


def _profiled(artifact: Artifact, layer: int) -> npt.NDArray[np.float64]:
    """(X,) how often a token uses each expert of a layer by the profile's counts, if any."""
    count_X = expert_counts(artifact, layer)
    return count_X * (artifact.manifest.decoder.experts_per_token / max(1.0, count_X.sum()))


def experts_in_a_batch(arenas: Iterable[RowArena], reader: Reader, d_ff: int) -> int:
    """Whole experts of which a batch of reads has room for all."""
    some = list(arenas)
    if any(places.nbytes != places.slot_nbytes for arena in some for places in arena.places_L):
        return reader.rows // (len(some) * d_ff)  # rows do not lie side by side: a read for each
    return reader.rows // sum(2 + d_ff // (reader.piece // arena.nbytes) for arena in some)
