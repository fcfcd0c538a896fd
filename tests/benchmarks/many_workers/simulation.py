"""A build by many workers, simulated task by task: who takes what, who is slow, who dies, and what the store does.

Assumed, beside the measured rate and spread of tasks: a worker's own speed is log-normal with a standard deviation of
15 % (machines of one kind), one task in 200 takes three times as long (a straggler), a worker dies once in 24 hours and
is back after 10 minutes; its claim is retaken after 1.75 heartbeats of 10 s. One neuron in ten fires. The choice of
rungs is 4 passes of a text through the model, one after the other: 3 to choose, and one over the report text. Packing
is left out. Tasks are those of `profile` with one layer at once and of `train`, as large as their estimates say.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pi_compile.calibration.profiling import ProfileSpec
from pi_compile.training import TrainingWork, TrainSpec
from pi_compile.training.rung_choice import PASSES
from pi_compile.training.samples import BATCH
from pi_runtime.artifact.decoder import Decoder

HEARTBEAT, RETAKEN = 10.0, 1.75
DEATHS_PER_S, BACK = 1 / 86_400, 600.0
STRAGGLERS, SLOWER, OWN_SPEED = 1 / 200, 3.0, 0.15
PROFILED, FIT, TUNE, REPORT, WINDOW, SHARD = 1_000_000, 65_536, 16_384, 16_384, 512, ProfileSpec.shard
OPERATIONS = 14
"""File operations of a task: claim (make, write, close), result (make, write, sync, rename, sync), reads of what it
needs, removals, a listing counted apart."""


@dataclass(frozen=True)
class Model:
    layers: int
    d_model: int
    d_ff: int
    kv_width: int
    """Width of keys together with values."""

    @property
    def layer(self) -> int:
        return self.d_model * (2 * self.d_model + self.kv_width + 3 * self.d_ff)


MODELS = {"7B": Model(32, 4096, 11008, 8192), "70B": Model(80, 8192, 28672, 2048)}


@dataclass(frozen=True)
class Store:
    """The file system that workers share."""

    seconds_per_listing: float
    """Of a folder with 10,000 files, as measured here."""
    operations_per_s: int = 5_000
    """What a network file system serves: an assumption, of the order of one NFS server."""


@dataclass
class Task:
    seconds: float
    order: int
    """Place in the order of preference."""
    needs: int = 0
    then: list[int] = field(default_factory=list)


def tasks_of(model: Model, flops_per_s: float) -> list[Task]:
    """The tasks of a build, with their times for a worker of normal speed."""
    tasks: list[Task] = []

    def add(flops: float, after: Sequence[int], order: int) -> int:
        tasks.append(Task(flops / flops_per_s, order, len(after)))
        for n in after:
            tasks[n].then.append(len(tasks) - 1)
        return len(tasks) - 1

    tokens, shards = SHARD * WINDOW, -(-PROFILED // (SHARD * WINDOW))
    before: list[int] = [add(0.0, [], 0)]
    for layer in range(model.layers):
        first = layer == 0
        shard = [add(2 * model.layer * tokens, before if first else [before[n]], 1 + layer) for n in range(shards)]
        before = shard
    counted = add(0.0, before, 0)
    batches, ends, work = (FIT + TUNE + REPORT) // (BATCH * WINDOW), list[int](), training_of(model)
    pushed: list[int] = [counted] * batches
    for layer in range(model.layers):
        pushed = [add(2 * model.layer * BATCH * WINDOW, [pushed[n]], 1000 + layer) for n in range(batches)]
        if not work.splits:
            ends.append(add(work.search().operations, pushed, 500 + layer))
            continue
        begun = add(work.begun().operations, pushed, 500 + layer)
        before = [add(work.of_ranks([rank]).operations, [begun], 500 + layer) for rank in work.ranks]
        for rank in work.further():
            before.append(add(work.of_ranks([rank]).operations, before, 500 + layer))
        ends.append(before[-1])
    barrier = add(0.0, [*ends, *pushed], 0)
    for _ in range(PASSES + 1):
        parts = [
            add(2 * model.layer * model.layers * BATCH * WINDOW, [barrier], 0) for _ in range(TUNE // (BATCH * WINDOW))
        ]
        barrier = add(0.0, parts, 0)
    return tasks


def training_of(model: Model, threads: int = 1) -> TrainingWork:
    """The training of a model, as `train` estimates it."""
    heads = model.d_model // 128
    d: Any = Decoder.__new__(Decoder)
    shape = {"d_model": model.d_model, "d_ff": model.d_ff, "n_layers": model.layers, "n_experts": 1, "ffn": "gated"}
    shape |= {"n_heads": heads, "n_kv_heads": model.kv_width // 256, "head_dim": 128, "vocab_size": 32_000}
    shape |= {"experts_per_token": 1, "activation": "relu", "threshold": 0.0}
    for key, value in shape.items():
        object.__setattr__(d, key, value)
    spec = TrainSpec(steps=300, rungs=("dense", "gate", "predicted"), threads=threads)
    return TrainingWork.of(d, spec, 0.1, FIT, TUNE, REPORT)


@dataclass(frozen=True)
class Found:
    seconds: float
    wasted: float
    """Share of the workers' computing that was lost with deaths."""
    operations_per_s: float
    """File operations of all workers, on the average."""
    bound: str
    """What limits the makespan."""


def expected(tasks: list[Task], workers: int, spread: Any, store: Store, runs: int = 5) -> Found:
    """The mean of some simulations."""
    found = [simulate(tasks, workers, spread, store, seed) for seed in range(runs)]
    seconds, wasted, operations = (
        float(np.mean([getattr(f, name) for f in found])) for name in ("seconds", "wasted", "operations_per_s")
    )
    return Found(seconds, wasted, operations, found[0].bound)


def simulate(tasks: list[Task], workers: int, spread: Any, store: Store, seed: int) -> Found:
    """Work the tasks off; each takes a measured spread, its worker's speed and its luck."""
    run = _Run(tasks, workers, spread, store, np.random.default_rng(seed))
    while run.done < len(tasks):
        run.hand_out()
        run.step()
    # Waiting workers look twice a second; each worker shows itself once a heartbeat, with three operations.
    operations = run.operations + 6 * (workers * run.now - run.busy) + 3 * workers * run.now / HEARTBEAT
    return Found(run.now, run.lost / run.busy, operations / run.now, _bound(run, operations / run.now))


def _bound(run: "_Run", operations_per_s: float) -> str:
    if operations_per_s > run.store.operations_per_s / 2:
        return "the store"
    if run.busy > 0.8 * run.workers * run.now:
        return "computing"
    longest = max(task.seconds for task in run.tasks)
    return "the longest task" if longest > 0.1 * run.now else "waiting for each other"


_DONE, _DIED, _BACK, _RETAKE = range(4)


class _Run:
    """The state of a simulation."""

    def __init__(self, tasks: list[Task], workers: int, spread: Any, store: Store, rng: np.random.Generator) -> None:
        self.tasks, self.workers, self.spread, self.store, self.rng = tasks, workers, spread, store, rng
        self.speed = rng.lognormal(0.0, OWN_SPEED, workers) if workers > 1 else np.ones(1)
        self.needs = [task.needs for task in tasks]
        self.ready = [(task.order, n) for n, task in enumerate(tasks) if not task.needs]
        heapq.heapify(self.ready)
        self.free = list(range(workers))
        self.began: dict[int, float] = {}
        self.events: list[tuple[float, int, int, int, int]] = []  # time, serial number, kind, worker, task
        self.now = self.busy = self.lost = self.operations = 0.0
        self.done = self.serial = 0

    def hand_out(self) -> None:
        """Give free workers what is ready, first what is preferred."""
        while self.free and self.ready:
            _, n = heapq.heappop(self.ready)
            worker = self.free.pop()
            # Operations wait for those of all others that are at work.
            queued = OPERATIONS * (self.workers - len(self.free)) / self.store.operations_per_s
            luck = float(self.rng.choice(self.spread))
            if self.rng.random() < STRAGGLERS:
                luck *= SLOWER
            took = self.tasks[n].seconds * luck / self.speed[worker] + self.store.seconds_per_listing + queued
            self.began[n] = self.now
            self.operations += OPERATIONS + 1
            dies = self.rng.exponential(1 / DEATHS_PER_S)
            self._push(min(dies, took), _DIED if dies < took else _DONE, worker, n)

    def step(self) -> None:
        """Go on to the next event."""
        self.now, _, kind, worker, n = heapq.heappop(self.events)
        spent = self.now - self.began[n]
        if kind == _DONE:
            self.busy += spent
            self.done += 1
            self.free.append(worker)
            for after in self.tasks[n].then:
                self.needs[after] -= 1
                if not self.needs[after]:
                    heapq.heappush(self.ready, (self.tasks[after].order, after))
        elif kind == _DIED:
            self.busy, self.lost = self.busy + spent, self.lost + spent
            self._push(RETAKEN * HEARTBEAT, _RETAKE, worker, n)
            self._push(BACK, _BACK, worker, n)
        elif kind == _RETAKE:
            heapq.heappush(self.ready, (self.tasks[n].order, n))
        else:
            self.free.append(worker)

    def _push(self, after: float, kind: int, worker: int, task: int) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + after, self.serial, kind, worker, task))
