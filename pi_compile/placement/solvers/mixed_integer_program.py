"""A mixed-integer linear program, built row by row and given to HiGHS whole, by scipy.

    minimise  c · x     subject to     low ≤ A x ≤ high,   lower ≤ x ≤ upper,   some x integer

It is an independent proof beside the default solvers: HiGHS searches, bounds and proves by itself, in floating point,
with a gap of its own. Which of several equal optima it returns depends on its version, so locks are not made with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_INFEASIBLE = 2
"""Status of a program without a solution."""


@dataclass(frozen=True)
class Answer:
    """What HiGHS found within its time limit."""

    values: Floats
    objective: float
    bound: float
    """No solution is better than this, as HiGHS has proven."""

    @property
    def gap(self) -> float:
        """Distance of the objective from the bound, relative to the objective."""
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-12)


@dataclass
class MixedIntegerProgram:
    """A program under construction."""

    maximise: bool = False
    _costs: list[Floats] = field(default_factory=list)
    _integer: list[bool] = field(default_factory=list)
    _entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    _lows: list[float] = field(default_factory=list)
    _highs: list[float] = field(default_factory=list)
    _columns: int = 0

    def variables(self, costs: npt.ArrayLike, *, integer: bool = True) -> Ints:
        """New variables between 0 and 1 with these costs; returns their numbers."""
        values = np.atleast_1d(np.asarray(costs, np.float64))
        first, self._columns = self._columns, self._columns + len(values)
        self._costs.append(values)
        self._integer += [integer] * len(values)
        return np.arange(first, self._columns)

    def row(self, terms: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]], low: float, high: float) -> None:
        """low ≤ Σ coefficient · variable ≤ high; each term is (variables, a coefficient for each or one for all)."""
        columns = np.concatenate([np.atleast_1d(np.asarray(v, np.int64)) for v, _ in terms])
        coefficients = np.concatenate(
            [np.broadcast_to(np.asarray(c, np.float64), np.atleast_1d(np.asarray(v)).shape) for v, c in terms]
        )
        self._entries.append((np.full(len(columns), len(self._lows)), columns, coefficients))
        self._lows.append(low)
        self._highs.append(high)

    def solve(self, seconds: float, constant: float = 0.0) -> Answer | None:
        """The best solution found within so many seconds; None where there is no solution.

        `constant` is added to its objective and bound. Raises TimeoutError where the time was up before one was found.
        """
        rows, columns, coefficients = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((coefficients, (rows, columns)), shape=(len(self._lows), self._columns)).tocsc()
        sign = -1.0 if self.maximise else 1.0
        found = milp(
            sign * np.concatenate(self._costs),
            integrality=np.array(self._integer, np.int64),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, self._lows, self._highs),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if found.status == _INFEASIBLE:
            return None
        if found.x is None:
            raise TimeoutError(found.message)
        return Answer(found.x, sign * found.fun + constant, sign * found.mip_dual_bound + constant)
