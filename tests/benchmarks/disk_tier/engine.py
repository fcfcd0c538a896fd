"""Ours as an engine in a child process: mapped, or within a budget of memory, with parts of the disk tier left out."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from side_by_side.process import threads

from disk_tier import CONTEXT
from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import useful_budgets
from pi_runtime.disk.ram_plan import Slots, fixed_bytes, sequence_kv_bytes
from pi_runtime.disk.row_store import REGIONS, Request, RowRange, RowStore
from pi_runtime.engine import loading as model_module
from pi_runtime.execution import disk_ahead, disk_rows, ops, rows
from pi_runtime.execution.devices import resident_bytes
from pi_runtime.kernels.ffn import steps

_models: list[Model] = []
_computing = [0.0]
"""Seconds in compiled steps of the model; what is neither these nor waiting is bookkeeping."""


def _timed(function: Any) -> Any:
    """The same function, whose seconds are added up."""

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            _computing[0] += time.perf_counter() - began

    timed.signatures = function.signatures  # type: ignore[attr-defined]
    return timed


def _time_steps() -> None:
    """Add up the seconds of all compiled steps of a run from disk."""
    timed = {name: _timed(step) for name, step in vars(steps).items() if hasattr(step, "signatures")}
    for module in (disk_rows, disk_ahead):
        module.steps = SimpleNamespace(**timed)  # type: ignore[attr-defined]
    for name in ("embed", "attention", "after_ffn", "head"):
        setattr(ops, name, _timed(getattr(ops, name)))
    rows.ffn_of_experts = _timed(rows.ffn_of_experts)
    disk_ahead.norm = _timed(disk_ahead.norm)


def _one_after_the_other(store: RowStore, requests: Iterable[Request], keep: bool) -> Iterator[RowRange]:
    """`RowStore.ranges` without overlap: each range is read, and then used."""
    for n, part in enumerate(part for request in requests for part in store._cut(request)):
        store._asked(part, n % REGIONS, keep)
        store.reader.wait(n % REGIONS)
        yield part
        for name, _ in part.request.needs:
            store._clear(name, part.request.layer, n % REGIONS)


def budgets(path: str) -> dict[str, int]:
    """The smallest budget, the one from which on all rows are in memory, and what this process takes already."""
    with Artifact.open(Path(path)) as artifact:
        kv_nbytes = sequence_kv_bytes(artifact.manifest, CONTEXT, "auto")
        fixed = fixed_bytes(artifact.manifest, CONTEXT, "auto", kv_nbytes)
        least, most = useful_budgets(artifact.manifest, fixed)
    return {"least": least, "most": most, "process": resident_bytes()}


def open_model(
    path: str, mode: str, ram_budget: int | None = None, only: str | None = None, two_phases: bool | None = None
) -> None:
    """Open an artifact; where there is no budget it is mapped, however little memory is free.

    `only`: `bundles` reads every row when it is needed, `cache` keeps rows but does not overlap reading and computing.
    `two_phases`: whether `rest` is always, or never, read after it is known what fires.
    """
    model_module.ram_budget_for = lambda _nbytes: None
    if two_phases is not None:
        disk_ahead.TWO_PHASES_FROM = -1.0 if two_phases else 9.0
    if only is not None:
        RowStore.ranges = _one_after_the_other  # type: ignore[method-assign, assignment]
        disk_ahead.FasterWay.second = False  # type: ignore[method-assign, assignment]
    if only == "bundles":
        plan_for = ram_budget.plan_for

        def without_cache(artifact: Artifact, mode: str, budget: int, fixed: int) -> Any:
            plan = plan_for(artifact, mode, budget, fixed)
            none_L = (Slots(0, 0),) * len(plan.first_L)
            return replace(plan, first_L=none_L, rest_L=none_L)

        ram_budget.plan_for = without_cache
    if ram_budget is not None:
        _time_steps()
    _models.append(load(path, mode=mode, context=CONTEXT, threads=threads(), device="cpu", ram_budget=ram_budget))
    _models[0].warm_up()


def decode(tokens: list[int], warm: int) -> dict[str, Any]:
    """Decode tokens one by one: what those after the first `warm` took."""
    model, seconds = _models[0], []
    cache, executor = model.new_cache(), model.executor
    for token in tokens[:warm]:
        model.decode(token, cache)
    cpu, device, disk_before, reads = time.process_time(), _bytes_from_devices(), executor.disk, _reads(model)
    _computing[0], rows_2 = 0.0, np.zeros(2)
    for token in tokens[warm:]:
        began = time.perf_counter()
        _, rows_L2 = model.decode(token, cache)
        seconds.append(time.perf_counter() - began)
        rows_2 += rows_L2.sum(0)
    found = {"seconds": seconds, "cpu_s": (time.process_time() - cpu) / len(seconds), "peak": _peak()}
    found["rows"] = (rows_2 / len(seconds)).tolist()
    found["device_bytes"] = _bytes_from_devices() - device
    if executor.disk is not None:
        since = asdict(executor.disk - disk_before)
        found |= {"disk_s": since.pop("seconds"), "reads": _reads(model) - reads, "computing_s": _computing[0], **since}
    return found


def _reads(model: Model) -> int:
    return model.executor.rows.reader.reads if model.executor.disk is not None else 0  # type: ignore[attr-defined]


def _bytes_from_devices() -> int:
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _peak() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def plan() -> dict[str, list[tuple[int, int]]]:
    """How many rows of each layer are pinned, and how many its cache holds, by array."""
    found = _models[0].executor.rows.plan
    return {
        "first": [(slots.pinned, slots.cached) for slots in found.first_L],
        "rest": [(slots.pinned, slots.cached) for slots in found.rest_L],
    }


def trace(tokens: list[int], named: str, fired: str) -> dict[str, Any]:
    """Decode tokens in two phases; write to files what each layer's predictor names, and what fires, for each."""
    needed: dict[str, dict[int, list[np.ndarray]]] = {"first": {}, "rest": {}}
    ranges = RowStore.ranges

    def spy(self: RowStore, requests: Sequence[Request], keep: bool) -> Iterator[RowRange]:
        for request in requests:
            for name, neuron_I in request.needs:
                needed[name].setdefault(request.layer, []).append(neuron_I.copy())
        return ranges(self, requests, keep)

    RowStore.ranges = spy  # type: ignore[method-assign, assignment]
    decode(tokens, 1)
    RowStore.ranges = ranges  # type: ignore[method-assign]
    for path, by_layer in ((named, needed["first"]), (fired, needed["rest"])):
        traces = [by_layer[layer] for layer in sorted(by_layer)]
        flat = {f"{n}": np.concatenate(trace) for n, trace in enumerate(traces)}
        np.savez(path, **flat, **{f"{n}_counts": [len(step) for step in trace] for n, trace in enumerate(traces)})
    return {"tokens": len(tokens)}


def routes(tokens: list[int]) -> dict[str, Any]:
    """Decode tokens one by one: the experts of each, layer by layer, and those that each layer's router would have
    taken before its turn, where it is asked."""
    steps_of = disk_rows.tokens_by_expert, disk_ahead.tokens_by_expert
    taken, ahead = list[list[int]](), list[list[int]]()

    def spied(function: Any, into: list[list[int]]) -> Any:
        def spy(expert_TK: np.ndarray, *others: Any) -> Any:
            into.append(expert_TK[0].tolist())
            return function(expert_TK, *others)

        return spy

    disk_rows.tokens_by_expert, disk_ahead.tokens_by_expert = (
        spied(function, into) for function, into in zip(steps_of, (taken, ahead), strict=True)
    )
    disk_ahead.FasterWay.second = True  # type: ignore[method-assign, assignment]
    decode(tokens, 0)
    disk_rows.tokens_by_expert, disk_ahead.tokens_by_expert = steps_of
    return {"taken": taken, "ahead": ahead}


HANDLERS = {f.__name__: f for f in (budgets, open_model, decode, plan, trace, routes)}
