"""The place stage: which parts of a model belong on the GPU, in RAM and on disk, solved exactly for a pair of budgets.

`stage` is the way in; `formulation` states the problem, and the solvers know integers and no model.
"""

from pi_compile.placement.formulation import Assignment, Problem, all_cpu
from pi_compile.placement.greedy import hottest_cuts
from pi_compile.placement.stage import LADDER, SECONDS, SOLVERS, Placement, ladder, place, ram_ladder
