"""Measures GPU and CPU together on made-up 7B and 13B models, beside offloading and layer splits, at equal budgets.

python tests/benchmarks/gpu.py [--format f16|q8|q4] [--minutes 7.5] [--json PATH] [--device cpu --tiny]
python tests/benchmarks/gpu.py --predict [--format f16|q8|q4] [--json PATH]

Needs torch, Triton, numba and NumPy. Weights are made on the GPU, each layer has its own; neurons fire as published
curves say. Offloading is that of transformers and accelerate if both can be imported, else a copy of its scheme in
torch; it has the same numbers in f16 whatever the format, and its rows say so. Before a figure is printed, every
placement's logits, and accelerate's, are compared with those of the model all on the GPU, and these with plain torch's.
A row that fails says so, and the bench ends with 1. Rows are taken in order of interest until the time is up; the bench
says which are left out.

`--predict` measures nothing and needs no GPU: what the same model of time says for machines in `profiles/machines`.
"""

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
from support.gpu_bench import devices

devices.prepare()

import numba
import numpy as np
import torch
from support.gpu_bench import baseline, predicting
from support.gpu_bench.measuring import Rates, predict, rates
from support.gpu_bench.model import (
    OPT,
    REGLU,
    SEVEN,
    THIRTEEN,
    TINY,
    Curve,
    MemoryArtifact,
    ModelSize,
    in_f16,
    make_model,
    row_bytes,
)
from support.gpu_bench.offload import Offload
from support.gpu_bench.placing import (
    Case,
    all_on_gpu,
    attention_first,
    budgets,
    bytes_with_blocks,
    nothing,
    whole_layers,
)
from support.gpu_bench.running import Measurement, compared, measure, token_ids
from support.gpu_bench.targets import verdicts

from pi_runtime.artifact.buffers import kv_bytes
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.errors import PiError

FORMATS = ("f16", "q8", "q4")
DEFINITION = "dense, all on the GPU"
ERROR = {"f16": 0.03, "q8": 0.1, "q4": 0.1}
"""How far logits may be off on average, as a fraction of their deviation.

The CPU rounds inputs of q8 and q4 to bytes, and a predictor selects other neurons than a gate that is quantised again.
"""


class WrongLogitsError(Exception):
    """Logits are not what another placement, or plain torch, gives."""


@dataclass(frozen=True)
class Setting:
    """Settings of a run."""

    device: Device
    threads: int
    prompt: int
    tokens: int
    context: int
    deadline: float
    cases: slice
    """The budgets that are taken."""


def rows(
    artifact: MemoryArtifact, curve: Curve, rank: int, case: Case, s: Setting, r: Rates, wanted: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Rows of our placement in each mode, and of a layer split, sparse and dense, where a layer has room."""
    manifest, d = artifact.manifest, artifact.manifest.decoder
    position = compared(s.prompt) + s.tokens // 2
    ours = attention_first(
        manifest, case.budget, s.context, lambda plan: predict(d, plan, curve, rank, position, r).token
    )
    layers = whole_layers(manifest, case.budget, s.context)
    own = [("ours", "auto", ours), ("ours, gate", "gate", ours), ("ours, dense", "dense", ours)]
    split = [("layers, sparse", "auto", layers), ("layers, dense", "dense", layers)]
    for what, mode, plan in own + split * (layers.head == "gpu"):
        if time.monotonic() > s.deadline:
            return

        def row(what: str = what, mode: str = mode, plan: Plan = plan) -> dict[str, Any]:
            found = measure(artifact, mode, plan, s.device, case.budget, s.threads, s.prompt, s.tokens)
            if mode != "dense":
                check(found.logits, wanted, ERROR[manifest.formats["ffn"]])
            return described(d, plan, curve, rank, s, r, found, mode)

        yield attempted(row, curve, case, what, s)


def attempted(
    work: Callable[[], dict[str, Any]], curve: Curve, case: Case, what: str, s: Setting,
    faults: tuple[type[Exception], ...] = (WrongLogitsError, PiError),
) -> dict[str, Any]:  # fmt: skip
    """Make a row, or one that says why there is none; the GPU's memory is freed then."""
    found: dict[str, Any] = {"curve": curve.name, "budget": case.name, "gib": case.budget / 2**30, "what": what}
    try:
        return found | work()
    except faults as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    gc.collect()  # what an executor held that could not be made
    with contextlib.suppress(RuntimeError):
        s.device.limit(None)
    return found


def described(
    d: Any, plan: Plan, curve: Curve, rank: int, s: Setting, r: Rates, found: Measurement, mode: str
) -> dict[str, Any]:
    p = predict(d, plan, curve, rank, compared(s.prompt) + s.tokens // 2, r, mode)
    return {
        "attention": plan.attention.count("gpu"), "neurons": sum(plan.cuts) / (d.d_ff * d.n_layers),
        "active": found.active_on_gpu, "decode": found.decode, "predicted": 1 / p.token,
        "measured/predicted": found.decode * p.token, "prefill": found.prefill, "overlap": found.overlap,
        "handover_us": None if found.handover is None else found.handover * 1e6,
        "gpu_limit": p.gpu_bytes / found.gpu / r.gpu if p.gpu_bytes else None,
        "cpu_limit": p.cpu_bytes / found.cpu / r.cpu_stream if p.cpu_bytes else None,
    }  # fmt: skip


def offloaded(
    artifact: MemoryArtifact, case: Case, s: Setting, other: baseline.Baseline, wanted: np.ndarray
) -> dict[str, Any]:
    decode, resident, logits = baseline.measure(other, artifact, case.budget, s.device, compared(s.prompt))
    if other.checked:  # its residual stream is f16
        check(logits, wanted, 0.1)
    return {"attention": resident, "neurons": resident / artifact.manifest.decoder.n_layers, "decode": decode}


def check(found: np.ndarray, wanted: np.ndarray, error: float) -> None:
    """Raise if logits differ by more than this fraction of their deviation."""
    off = np.abs(found - wanted) / wanted.std()
    if not off.max() <= error * 10 or off.mean() > error:
        raise WrongLogitsError(f"logits differ by {off.mean():.3f} of their deviation, {off.max():.3f} at most")


def definition(
    artifact: MemoryArtifact, plain: MemoryArtifact, curve: Curve, budget: int, s: Setting, r: Rates
) -> dict[str, Any]:
    """Logits, dense speed and share of the memory's bandwidth of the model all on the GPU.

    Its logits, with selection and dense, are checked against torch's with the same numbers in f16.
    """
    error, plan = ERROR[artifact.manifest.formats["ffn"]], all_on_gpu(artifact.manifest, s.context)
    exact = measure(artifact, "dense", plan, s.device, budget, s.threads, s.prompt, s.tokens)
    skipping = measure(artifact, "auto", plan, s.device, budget, s.threads, s.prompt, s.tokens)
    check(skipping.logits, exact.logits, error)
    ids = token_ids(artifact.manifest.decoder.vocab_size)
    with s.device.stream():
        model = Offload(plain, 1 << 50, s.context, s.device.device)
        logits = [model.step(int(token)).cpu().numpy() for token in ids[: compared(s.prompt) + 4]][-4:]
    check(exact.logits, np.stack(logits), error)
    share = exact.decode * weights_read(artifact, curve, compared(s.prompt) + s.tokens) / r.gpu
    return {
        "decode": exact.decode, "share": share, "picked": r.gpu_picked / r.gpu, "logits": skipping.logits,
    }  # fmt: skip


def weights_read(artifact: MemoryArtifact, curve: Curve, context: int) -> int:
    """Bytes that one dense token reads; rows of `up` are read only for neurons that fire."""
    d, row = artifact.manifest.decoder, row_bytes(artifact.manifest.formats["ffn"], artifact.manifest.decoder.d_model)
    layer = 4 * d.d_model + int((2 + curve.density) * d.d_ff)
    return (layer * d.n_layers + d.vocab_size) * row + kv_bytes(d, "f16", context) * d.n_layers


def show(row: dict[str, Any]) -> None:
    def cell(name: str, form: str) -> str:
        value = row.get(name)
        return "" if value is None else format(value, form)

    if "failed" in row:
        print(
            f"| {row['model']} {row['format']} {row['curve']} | {row['budget']} ({row['gib']:.1f} GiB) | {row['what']} "
            f"| failed: {row['failed']} |",
            flush=True,
        )
        return
    if "share" in row:
        print(
            f"{row['model']} {row['format']} {row['curve']}: {row['what']}: {row['decode']:.1f} tokens/s, "
            f"{row['share']:.2f} of memory's bandwidth, {row['picked']:.2f} by hot rows",
            flush=True,
        )
        return
    print(
        f"| {row['model']} {row['format']} {row['curve']} | {row['budget']} ({row['gib']:.1f} GiB) | {row['what']} "
        f"| {row['attention']} / {row['neurons']:.0%} | {cell('active', '.0%')} | {row['decode']:.1f} "
        f"| {cell('predicted', '.1f')} | {cell('measured/predicted', '.2f')} | {cell('prefill', '.0f')} "
        f"| {cell('overlap', '.2f')} | {cell('handover_us', '.0f')} "
        f"| {cell('gpu_limit', '.2f')} | {cell('cpu_limit', '.2f')} |",
        flush=True,
    )


def bench(size: ModelSize, fmt: str, curves: dict[Curve, float], s: Setting, found: list[dict[str, Any]]) -> list[str]:
    """Take all rows of one model, each curve's until its time is up; returns what is left out."""
    began = time.monotonic()
    if began > max(curves.values()):
        return [size.name]
    with s.device.stream():
        base, left = make_model(size, fmt, s.device.device), []
        plain = in_f16(base, size, s.device.device)
    d = size.decoder
    print(f"\n{size.name} {fmt}: made in {time.monotonic() - began:.0f} s", flush=True)
    r = rates(s.device, fmt, d.d_model, min(1 << 30, 4 * d.d_ff * d.d_model * d.n_layers), s.threads)
    print(
        f"GPU {r.gpu / 1e9:.0f} GB/s copied, {r.gpu_stream / 1e9:.0f} by our products, {r.gpu_picked / 1e9:.0f} of "
        f"picked rows; CPU {r.cpu_stream / 1e9:.1f} and {r.cpu_picked / 1e9:.1f}; {r.launch * 1e6:.1f} µs a kernel, "
        f"{r.cpu_launch * 1e6:.1f} and {r.cold * 1e6:.1f} on the CPU, {r.handover * 1e6:.1f} µs a handover",
        flush=True,
    )
    other = baseline.find(plain, s.context, s.device)

    def keep(row: dict[str, Any], of: str) -> None:
        found.append({"model": size.name, "format": of, **row})
        show(found[-1])

    for curve, until in curves.items():
        s = replace(s, deadline=until)
        if time.monotonic() > s.deadline:
            left.append(f"{size.name} {curve.name}")
            continue
        artifact, dense = base.with_curve(curve), plain.with_curve(curve)
        plan = all_on_gpu(artifact.manifest, s.context)
        whole = Case("all on the GPU", bytes_with_blocks(artifact.manifest, plan, s.context, 512))
        row = attempted(partial(definition, artifact, dense, curve, whole.budget, s, r), curve, whole, DEFINITION, s)
        wanted = row.pop("logits", None)
        keep(row, fmt)
        if wanted is None:
            continue
        *cases, last = budgets(artifact.manifest, s.context)
        for case in [*cases, nothing(artifact.manifest, s.context), last][s.cases]:
            if time.monotonic() > s.deadline:
                left.append(f"{size.name} {curve.name} {case.name}")
                continue
            for row in rows(artifact, curve, size.rank, case, s, r, wanted):
                keep(row, fmt)
            if time.monotonic() > s.deadline:
                left.append(f"the rest of {size.name} {curve.name} {case.name}")
            elif not case.name.startswith(("100", "nothing")):
                work = partial(offloaded, dense, case, s, other, wanted)
                keep(attempted(work, curve, case, other.name, s, (Exception,)), "f16")  # whatever others raise
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help=devices.HELP)
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, one budget")
    parser.add_argument("--format", choices=FORMATS, default="f16", help="of all matrices; offloading stays in f16")
    parser.add_argument("--predict", action="store_true", help="no measurement: what the model of time says")
    parser.add_argument("--minutes", type=float, default=7.5, help="after which no row is begun")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.predict:
        predicting.show(a.format, a.json)
        return
    with devices.opened(a.device) as device:
        _measured(a, device)


def _measured(a: argparse.Namespace, device: Device) -> None:
    began = time.monotonic()
    threads = int(numba.config.NUMBA_NUM_THREADS)
    sizes = (8, 1, 128) if a.tiny else (256, 24, 1024)
    s = Setting(device, threads, *sizes, 0.0, slice(-2, None) if a.tiny else slice(None))
    print(f"torch {torch.__version__}, numba {numba.__version__}, {device.name}, {threads} CPU threads")
    print("| model | GPU budget | what | attention / FFN on the GPU | active on the GPU | tokens/s | predicted | ratio "
          "| prompt | overlap | handover µs | GPU limit | CPU limit |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    found: list[dict[str, Any]] = []
    # Kernels are compiled in the first one's time.
    shares = {TINY: {OPT: 1.0}} if a.tiny else {SEVEN: {OPT: 0.4, REGLU: 0.65}, THIRTEEN: {OPT: 0.85, REGLU: 1.0}}
    left = []
    try:
        for size, curves in shares.items():
            until = {curve: began + 60 * a.minutes * share for curve, share in curves.items()}
            left += bench(size, a.format, until, s, found)
    finally:
        if a.json:
            a.json.write_text(json.dumps(found, indent=1))
    print("\n" + "\n".join(verdicts(found)))
    if left:
        print("no time for: " + "; ".join(left))
    failed = sum("failed" in row for row in found)
    if failed:
        sys.exit(f"{failed} of {len(found)} rows failed")


if __name__ == "__main__":
    main()
