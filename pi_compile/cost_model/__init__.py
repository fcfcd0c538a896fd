"""How long a token takes: the work of a model, the processors of a machine, and the time of one on the other.

All of it in integers: bytes, neurons and picoseconds.
"""

from pi_compile.cost_model.processors import (
    CPU,
    GPU,
    PICO,
    PROMPT_TOKENS,
    Processor,
    Reads,
    interconnect_of,
    processors_of,
)
from pi_compile.cost_model.row_options import RowChoice, RowModel, RowOptions
from pi_compile.cost_model.token_time import Costs, TokenTime, costs_of, token_time
from pi_compile.cost_model.workload import Ints, Workload
