"""Steps of the first run on a GPU: each returns figures, or raises `WrongError` with what is wrong in a sentence."""

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from pi_compile.machine import find_machine
from pi_compile.machine.measurement import measure_machine
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import LIBRARIES, Device
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.plan_choice import allocation
from support.gpu_bench.model import OPT, MemoryArtifact, ModelSize, make_model
from support.gpu_bench.offload import Offload
from support.gpu_bench.placing import all_on_gpu, attention_first, budgets, bytes_with_blocks
from support.gpu_bench.planned import planned_seconds
from support.gpu_bench.running import measure, token_ids
from support.gpu_bench.targets import plan_verdicts, verdicts
from support.gpu_running import allocated_bytes
from support.paths import BENCHMARKS, ROOT

MOST_TOGETHER = 8


class WrongError(Exception):
    """Something is not as it must be: nothing after it is worth measuring."""


@dataclass
class FirstRun:
    """What is run, on what, and what was found so far."""

    device_name: str
    size: ModelSize
    out: Path
    deadline: float
    tiny: bool
    found: dict[str, Any] = field(default_factory=dict)
    coming: list[str] = field(default_factory=list)
    """Steps that are still to be taken, the present one first."""
    device: Device = field(init=False)

    @property
    def context(self) -> int:
        return self.size.context

    @property
    def tokens(self) -> int:
        """Tokens that are timed."""
        return 4 if self.tiny else 24

    @property
    def on_gpu(self) -> bool:
        return self.device.device.type == "cuda"

    @cached_property
    def artifact(self) -> MemoryArtifact:
        """The model that is run, in f16."""
        with self.device.stream():
            return make_model(self.size, "f16", self.device.device).with_curve(OPT)

    def left(self) -> float:
        """Minutes."""
        return (self.deadline - time.monotonic()) / 60

    def open(self, plan: Plan, budget: int) -> CudaExecutor:
        taken = allocation(self.artifact.manifest, plan, self.context, budget)
        return CudaExecutor(self.artifact, "auto", 1 if self.tiny else os.cpu_count() or 1, taken, self.device)  # type: ignore[arg-type]


def machine(run: FirstRun) -> dict[str, Any]:
    """Versions, the GPU, and what a run cannot do without."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise WrongError("there is no C compiler, and Triton builds what starts kernels with one: install gcc")
    if run.on_gpu and "TRITON_INTERPRET" in os.environ:
        raise WrongError("TRITON_INTERPRET is set: kernels would not run on the GPU")
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "gpu": run.device.name,
    }


def tests(run: FirstRun) -> dict[str, Any]:
    """All tests of the GPU tier; a few of them where no GPU is."""
    chosen = ["-k", "merging or norms"] if run.tiny else []
    if run.on_gpu and find_spec("xdist"):
        chosen = ["-n", "4", "--dist", "loadfile"]  # most of the time is the compiler's
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/runtime/cuda", *chosen]
    limit = max(60.0, run.left() * 60 / 2)
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise WrongError(f"the tests of the GPU tier took more than {limit:.0f} s") from error
    if "No module named pytest" in done.stderr or "No module named 'hypothesis'" in done.stdout + done.stderr:
        raise WrongError("the tests need pytest, pytest-timeout and hypothesis: put them on PYTHONPATH")
    if done.returncode:
        raise WrongError("a test of the GPU tier failed:\n" + done.stdout[-4000:] + done.stderr[-1000:])
    return {"tests": done.stdout.strip().splitlines()[-1], "seconds": time.monotonic() - began}


def memory(run: FirstRun) -> dict[str, Any]:
    """What executors hold at budgets from little to all, against what torch's allocator was asked for."""
    manifest, rows = run.artifact.manifest, []
    for case in budgets(manifest, run.context)[: 1 if run.tiny else 4]:
        gc.collect()
        before = _requested(run)
        executor = run.open(
            attention_first(manifest, case.budget, run.context, lambda plan: -sum(plan.cuts)), case.budget
        )
        try:
            held, counted = allocated_bytes(executor), executor.allocation.total - executor.allocation.products
            asked = _requested(run) - before if run.on_gpu else held
            if asked != held:
                raise WrongError(f"{case.name}: tensors hold {held} bytes, torch was asked for {asked}")
            if held > min(case.budget, counted):
                raise WrongError(f"{case.name}: {held} bytes are held, and {counted} were counted")
            _decode(executor, token_ids(manifest.decoder.vocab_size)[:4], 1)
            peak = torch.cuda.max_memory_allocated(run.device.device) - before if run.on_gpu else held
            if peak > case.budget + LIBRARIES:
                raise WrongError(f"{case.name}: {peak} bytes at most, above the budget and what libraries may have")
        finally:
            executor.close()
        rows.append({"budget": case.name, "bytes": case.budget, "counted": counted, "held": held, "peak": peak})
    return {"rows": rows}


def _requested(run: FirstRun) -> int:
    if not run.on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats(run.device.device)
    return int(torch.cuda.memory_stats(run.device.device)["requested_bytes.all.current"])


def batches(run: FirstRun) -> dict[str, Any]:
    """Tokens a second of one to eight sequences together, all on the GPU, and torch's own decoding beside them."""
    manifest = run.artifact.manifest
    plan = all_on_gpu(manifest, run.context)
    room = 2 * bytes_with_blocks(manifest, plan, run.context, 512)
    executor, rows = run.open(plan, room), []
    ids = token_ids(manifest.decoder.vocab_size)[: run.tokens]
    try:
        alone = _decode(executor, ids, 1)[1]
        for count in range(1, executor.allocation.batch_tokens + 1):
            _decode(executor, ids[:2], count)
            speed, logits = _decode(executor, ids, count)
            if not np.array_equal(logits[:1], alone[:1]):
                raise WrongError(f"a token has other bits among {count} than alone")
            rows.append({"together": count, "tokens_per_second": speed})
    finally:
        executor.close()
    with run.device.stream():
        model = Offload(run.artifact, 1 << 50, run.context, run.device.device)
        model.read(ids[:2])
        run.device.synchronize()
        began = time.perf_counter()
        model.read(ids)
        run.device.synchronize()
        dense = len(ids) / (time.perf_counter() - began)
    return {"rows": rows, "torch_dense_tokens_per_second": dense}


def _decode(executor: CudaExecutor, ids: Sequence[int], count: int) -> tuple[float, np.ndarray]:
    """(Tokens a second, last logits) of so many sequences that read the same tokens."""
    caches, began = [executor.new_cache() for _ in range(count)], time.perf_counter()
    for token in ids:
        steps = [SequenceStep(cache=c, tokens=np.array([token], np.int64), select=True) for c in caches]
        found = executor.step(steps)
    taken = time.perf_counter() - began
    return count * len(ids) / taken, np.concatenate([f.logits_TV for f in found])


def timeline(run: FirstRun) -> dict[str, Any]:
    """One token's calls by the host's clock, and its graphs by the GPU's, as a trace for chrome://tracing."""
    manifest = run.artifact.manifest
    case = budgets(manifest, run.context)[-1]  # neurons of all layers are on both sides
    plan = attention_first(manifest, case.budget, run.context, lambda plan: -sum(plan.cuts))
    executor = run.open(plan, case.budget)
    try:
        _decode(executor, token_ids(manifest.decoder.vocab_size)[:2], 1)
        with run.device.stream():
            events = _traced(executor, run)
    finally:
        executor.close()
    path = run.out / "timeline.json"
    path.write_text(json.dumps({"traceEvents": events}))
    busy = {side: sum(e["dur"] for e in events if e["tid"] == side) for side in ("GPU", "CPU")}
    whole = max(e["ts"] + e["dur"] for e in events)
    both = max(0.0, busy["GPU"] + busy["CPU"] - whole) / max(1e-9, min(busy.values()))
    return {
        "trace": path.name,
        "us": whole,
        "gpu_us": busy["GPU"],
        "cpu_us": busy["CPU"],
        "overlap": both if run.on_gpu else None,
    }


def _traced(executor: CudaExecutor, run: FirstRun) -> list[dict[str, Any]]:
    """Microseconds from the first call on. Without a GPU a graph's time is the host's."""

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    run.device.synchronize()
    begin, began = mark() if run.on_gpu else None, time.perf_counter()
    spans, graphs = [], []
    for call in executor.calls:
        first, start = mark() if run.on_gpu and call.kind == "gpu" else None, time.perf_counter()
        call.run()
        end = time.perf_counter()
        if first is not None:
            graphs.append((call, first, mark()))
        else:
            spans.append((call, (start - began) * 1e6, (end - start) * 1e6))
    run.device.synchronize()
    spans += [(c, begin.elapsed_time(a) * 1e3, a.elapsed_time(b) * 1e3) for c, a, b in graphs]
    sides = {"gpu": "GPU", "cold": "CPU", "cpu": "CPU"}
    return [
        {
            "name": f"{call.kind} {call.layer}",
            "ph": "X",
            "pid": 0,
            "tid": sides.get(call.kind, "waiting"),
            "ts": at,
            "dur": us,
        }
        for call, at, us in spans
    ]


def plan(run: FirstRun) -> dict[str, Any]:
    """Speeds that `plan` says for this machine as `pi-compile machine` measures it, against those of decoding."""
    manifest, rows = run.artifact.manifest, []
    with run.device.stream():
        machine = measure_machine(run.out) if run.on_gpu else find_machine("pc-high", run.out)
    for case in budgets(manifest, run.context)[: 2 if run.tiny else 3]:
        for mode in ("auto", "gate", "dense"):

            def seconds(tried: Plan, mode: str = mode) -> float:
                position = 36 + run.tokens // 2
                return planned_seconds(manifest, mode, tried, OPT, position, machine)

            chosen = attention_first(manifest, case.budget, run.context, seconds)
            threads = 1 if run.tiny else os.cpu_count() or 1
            found = measure(run.artifact, mode, chosen, run.device, case.budget, threads, 32, run.tokens)
            said = 1 / seconds(chosen)
            rows.append(
                {
                    "budget": case.name,
                    "mode": mode,
                    "decode": found.decode,
                    "planned": said,
                    "measured/planned": found.decode / said,
                }
            )
    return {"machine": machine.described(), "rows": rows, "verdicts": list(plan_verdicts(rows))}


def bench(fmt: str) -> Callable[[FirstRun], dict[str, Any]]:
    """The bench's step in one format."""

    def step(run: FirstRun) -> dict[str, Any]:
        run.__dict__.pop("artifact", None)  # its memory
        gc.collect()
        path = run.out / f"bench-{fmt}.json"
        coming = sum(WEIGHTS[name] for name in run.coming if name in WEIGHTS)
        minutes = max(1.0, run.left() * WEIGHTS[f"bench_{fmt}"] / coming - 1)
        options = ["--device", run.device_name, *(["--tiny"] if run.tiny else [])]
        command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--format", fmt, "--json", str(path), *options]
        done = subprocess.run([*command, "--minutes", f"{minutes:.1f}"], capture_output=True, text=True, check=False)
        print(done.stdout, flush=True)
        if done.returncode:
            raise WrongError(f"the bench in {fmt} failed:\n{done.stdout[-2000:]}{done.stderr[-1000:]}")
        rows = json.loads(path.read_text())
        return {"rows": rows, "verdicts": list(verdicts(rows))}

    step.__doc__ = f"The bench in {fmt}: dense, gate and predicted, budgets from none to all, prompts, offloading."
    return step


WEIGHTS = {"bench_f16": 2, "bench_q8": 1, "bench_q4": 1}
"""How the time that is left is shared."""
STEPS: dict[str, Callable[[FirstRun], dict[str, Any]]] = {
    **{step.__name__: step for step in (machine, tests, memory, batches, timeline, plan)},
    **{name: bench(name.removeprefix("bench_")) for name in WEIGHTS},
}
