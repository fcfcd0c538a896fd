"""A worker that says on which cores it runs, for `test_launching`: processes that are spawned import it."""

import os
from pathlib import Path

from pi_compile.pipeline.launching import Build
from pi_compile.workers import Rank


def say_cores(build: Build, folder: Path, rank: Rank) -> None:
    """Pin as a worker of the build does, and write down the cores."""
    build.pin(rank)
    path = folder.with_name(f"{rank.rank}.new")
    path.write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))))
    path.replace(folder / str(rank.rank))
