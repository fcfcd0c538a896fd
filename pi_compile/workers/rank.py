"""The number of a worker among those that were started together, as launchers tell it in the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """One worker of `world`. Tasks are claimed by whoever is free: the number only says who reports and which GPU."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Number among the workers of the same machine."""
    launcher: str = ""
    """torchrun, slurm, ray or local; empty for a process that was started by hand."""
    watches: bool = False
    """Whether it claims no tasks, and only waits for the others."""

    @property
    def leads(self) -> bool:
        """Whether it shows the progress and the result of all."""
        return self.rank == 0


LONE = Rank()


def rank_of(environment: Mapping[str, str] = os.environ) -> Rank:
    """The rank that torchrun or Slurm gave this process; `LONE` where neither started it."""

    def number(name: str, default: int = 0) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else default

    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Rank(number("RANK"), number("WORLD_SIZE", 1), number("LOCAL_RANK"), "torchrun")
    if "SLURM_PROCID" in environment or "SLURM_ARRAY_TASK_ID" in environment:
        # An array of jobs, each of which may have several processes.
        job = number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN")
        processes = number("SLURM_NTASKS", 1)
        world = number("SLURM_ARRAY_TASK_COUNT", 1) * processes
        return Rank(job * processes + number("SLURM_PROCID"), world, number("SLURM_LOCALID"), "slurm")
    return LONE
