"""A build by many workers: processes of this machine, under torchrun or Slurm, or tasks of a Ray cluster.

Every worker goes through the whole pipeline, so a launcher has nothing to do but start processes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pi_compile.machine.doctor import usable_cores
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.workers import Rank, rank_of
from pi_compile.workers.local_processes import LocalProcesses
from pi_runtime import console
from pi_runtime.errors import PiError, Setting, UsageError
from pi_runtime.execution.devices import available_memory
from pi_runtime.execution.numa import Nodes, pin, usable_nodes

ALL_GPUS = "cuda:all"
"""The device of workers that take a GPU each."""
SHARE_OF_MEMORY = 0.8
"""What workers may take together of the memory that is free."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """What all workers of a build are to do."""

    recipe: Path
    until: str
    """The last stage: profile, train, place or pack."""
    output: Path | None = None
    """Where the artifact goes."""
    device: str = "cpu"
    """cpu, cuda:N or cuda:all."""
    workers: int | None = None
    """Processes of this machine, or tasks on the cluster; None for as many as there is room for."""
    ray: str = ""
    """Address of a Ray cluster; empty for none."""
    numa: str | None = None
    """NUMA node of the workers, or `spread`; None for wherever the system puts them."""
    nodes: Nodes = field(default_factory=usable_nodes)
    """The nodes that workers may be on. A worker that is on one of them gives its processes this list."""
    heartbeat: float

    def pipeline(self, rank: Rank) -> Pipeline:
        """The pipeline of one worker. The one that leads shows progress, and says what is to be said."""
        device = self.device if self.device != ALL_GPUS else f"cuda:{rank.local % _gpus()}"
        notice, progress = (console.say, console.progress) if rank.leads else (_ignore, _no_progress)
        return Pipeline(self.recipe, device, notice, progress, rank, self.heartbeat, output=self.output)

    def pin(self, rank: Rank) -> None:
        """Keep a worker on its NUMA node, if it is to have one."""
        if self.numa is not None:
            pin(self.numa, self.nodes, rank.local)


def help_build(build: Build, rank: Rank) -> None:
    """Take part in a build to its end, and say nothing of it but why, if it ends early."""
    build.pin(rank)
    pipeline = build.pipeline(rank)
    try:
        with pipeline.worker:
            match build.until:
                case "profile":
                    _ = pipeline.profile
                case "place" if pipeline.only_dense:
                    pass
                case "train" | "place":
                    _ = pipeline.trained
                case _:
                    assert build.output is not None
                    pipeline.pack(build.output)
    except KeyboardInterrupt:
        return
    except PiError as error:  # the worker that leads says the same
        if rank.launcher == "ray":
            raise RuntimeError(str(error)) from None  # Ray cannot send errors of ours


@contextmanager
def launched(build: Build) -> Iterator[Pipeline]:
    """The pipeline of this process, while other workers go through theirs."""
    pipeline = build.pipeline(rank_of())
    _ = pipeline.build  # checkpoint and text must be usable before a folder is made for results
    helpers: LocalProcesses | RayHelpers
    if build.ray:
        if build.numa is not None:
            raise UsageError(
                (Setting("numa"), " has no effect with ", Setting("ray"), ", which finds processors itself"),
                remedy="leave it out",
            )
        helpers = RayHelpers(build, pipeline)
    else:
        count = build.workers or _room_here(build, pipeline)
        helpers = LocalProcesses(partial(help_build, build), pipeline.rank, count)
    pipeline.rank = helpers.rank
    build.pin(helpers.rank)
    with pipeline.worker as worker:
        worker.call_help = helpers.start
        try:
            yield pipeline
        finally:
            helpers.end()


class RayHelpers:
    """Workers on a Ray cluster; this process only watches."""

    def __init__(self, build: Build, pipeline: Pipeline) -> None:
        from pi_compile.workers.ray_tasks import RayTasks  # noqa: PLC0415  its extra may not be installed

        threads, gpus = pipeline.recipe.profile.threads, build.device != "cpu"
        here = Build(
            **{**vars(build), "recipe": build.recipe.resolve(), "output": build.output and build.output.resolve()}
        )
        run = partial(help_build, here)
        self._tasks = RayTasks(build.ray, run, threads=threads, memory=pipeline.memory_bytes, gpus=gpus)
        room = self._tasks.room  # refused here, or the tasks would wait for ever
        self._count = build.workers or room
        self._pipeline = pipeline
        self.rank = Rank(world=self._count, launcher="ray", watches=True)

    def start(self) -> None:
        self._tasks.start(self._count, self._pipeline.worker)

    def end(self) -> None:
        self._tasks.end()


def _room_here(build: Build, pipeline: Pipeline) -> int:
    """How many workers this machine has cores and memory for, or GPUs; one where a launcher has started them."""
    if pipeline.rank.launcher or build.device not in ("cpu", ALL_GPUS):
        return 1
    if build.device == ALL_GPUS:
        return _gpus()
    node, memory = build.numa or "", available_memory()
    cores = len(build.nodes.get(int(node), ())) if node.isdecimal() else usable_cores()
    by_memory = 1 if memory is None else int(SHARE_OF_MEMORY * memory // pipeline.memory_bytes)
    return max(1, min(cores // pipeline.recipe.profile.threads, by_memory))


def _gpus() -> int:
    import torch  # noqa: PLC0415

    return torch.cuda.device_count()


def _ignore(_line: str) -> None:
    pass


def _no_progress(*_: object) -> AbstractContextManager[Callable[[int, int], None]]:
    return nullcontext(lambda _done, _total: None)
