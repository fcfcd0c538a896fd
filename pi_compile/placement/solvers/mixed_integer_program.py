"""A mixed-integer linear program, built row by row and given to HiGHS whole.

    minimise  c · x     subject to     low ≤ A x ≤ high,   lower ≤ x ≤ upper,   some x integer

It is an independent proof beside the default solvers: HiGHS searches, bounds and proves by itself, in floating point,
with a gap of its own. Which of several equal optima it returns depends on its version, so locks are not made with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SolverResult:
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

    def solve(self, seconds: float, constant: float = 0.0) -> SolverResult | None:
        """The best solution found within so many seconds, on one thread; None where there is no solution.

        `constant` is added to the objective and its bound. Raises TimeoutError where the time was up before a solution
        was found.
        """
        highs = highspy.Highs()
        options: dict[str, Any] = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0}
        options |= {"mip_abs_gap": 0.0, "time_limit": seconds}
        for name, option in options.items():
            highs.setOptionValue(name, option)
        highs.passModel(self._model())
        highs.run()
        info, status = highs.getInfo(), highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise TimeoutError(highs.modelStatusToString(status))
        found, bound = info.objective_function_value, info.mip_dual_bound
        return SolverResult(np.array(highs.getSolution().col_value), found + constant, bound + constant)

    def _model(self) -> Any:
        rows, columns, coefficients = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((coefficients, (rows, columns)), shape=(len(self._lows), self._columns)).tocsc()
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self._columns, len(self._lows)
        model.sense_ = highspy.ObjSense.kMaximize if self.maximise else highspy.ObjSense.kMinimize
        model.col_cost_ = np.concatenate(self._costs)
        model.col_lower_, model.col_upper_ = np.zeros(self._columns), np.ones(self._columns)
        model.row_lower_, model.row_upper_ = np.array(self._lows), np.array(self._highs)
        model.integrality_ = [
            highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous for whole in self._integer
        ]
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = (
            matrix.indptr, matrix.indices, matrix.data,
        )  # fmt: skip
        return model
