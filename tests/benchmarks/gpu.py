"""GPU and CPU together on made-up 7B and 13B models, beside offloading and a split by layers, under the same budgets.

python tests/benchmarks/gpu.py [--format f16|q8|q4] [--minutes 8.5] [--json PATH] [--device cpu --tiny]
python tests/benchmarks/gpu.py --predict [--format f16|q8|q4] [--json PATH]

Needs torch, Triton, numba and NumPy. Weights are made on the GPU, each layer its own; neurons fire as published curves
say. Offloading is that of transformers and accelerate where both can be imported, else a copy of its scheme in torch;
it has the same numbers in f16 whatever the format, and its rows say so. Every placement's logits are held against those
of all on the GPU, and these against plain torch, before a figure is printed, and accelerate's too. Rows are taken in
order of interest until the time is up; what is left out is said.

`--predict` measures nothing and needs no GPU: what the same model of time says for machines in `profiles/machines`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
# Threads that wait for the GPU between layers stay awake, as `pi_runtime.cuda.opening` has them.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import numba
import numpy as np
import torch
from gpu_bench import predicting, rival
from gpu_bench.measuring import Rates, predict, rates
from gpu_bench.model import OPT, REGLU, SEVEN, THIRTEEN, TINY, Curve, MemoryArtifact, Shape, in_f16, make, row_bytes
from gpu_bench.offload import Offload
from gpu_bench.placing import Case, attention_first, budgets, everything_there, whole_layers
from gpu_bench.running import Row, measure, text

from pi_runtime.artifact.footprint import kv_bytes
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.devices import Cuda, Device, Interpreted
from pi_runtime.cuda.placed import needed_bytes

FORMATS = ("f16", "q8", "q4")
ERROR = {"f16": 0.03, "q8": 0.1, "q4": 0.1}
"""How far logits may be off, on average, in shares of their deviation: the CPU rounds inputs of q8 and q4 to bytes, and
a predictor names other neurons than a gate that is quantised once more."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a run."""

    device: Device
    threads: int
    prompt: int
    tokens: int
    context: int
    deadline: float
    cases: slice
    """Which of the budgets."""


def rows(
    artifact: MemoryArtifact, curve: Curve, rank: int, case: Case, s: Setting, r: Rates, wanted: np.ndarray | None
) -> Iterator[dict[str, Any]]:
    """Ours, and the two splits by layers: with skipping and dense."""
    manifest, d = artifact.manifest, artifact.manifest.decoder
    position = 32 + s.tokens // 2
    ours = attention_first(
        manifest, case.budget, s.context, lambda plan: predict(d, plan, curve, rank, position, r, dense=False).token
    )
    layers = whole_layers(manifest, case.budget, s.context)
    for what, mode, plan in (
        ("ours", "auto", ours),
        ("layers, sparse", "auto", layers),
        ("layers, dense", "dense", layers),
    ):
        if time.monotonic() > s.deadline:
            return
        found = measure(artifact, mode, plan, s.device, case.budget, s.threads, s.prompt, s.tokens)
        if wanted is not None and mode == "auto":
            check(f"{case.name}, {what}", found.logits, wanted, ERROR[manifest.formats["ffn"]])
        yield described(d, plan, curve, rank, s, r, what, case, found, dense=mode == "dense")


def described(
    d: Any, plan: Plan, curve: Curve, rank: int, s: Setting, r: Rates, what: str, case: Case, found: Row, *, dense: bool
) -> dict[str, Any]:
    p = predict(d, plan, curve, rank, 32 + s.tokens // 2, r, dense=dense)
    gpu_left = max(1e-9, 1 / found.decode - found.cold)
    return {
        "curve": curve.name, "budget": case.name, "gib": case.budget / 2**30, "what": what,
        "attention": plan.attention.count("gpu"), "neurons": sum(plan.cuts) / (d.d_ff * d.n_layers),
        "active": found.active_on_gpu, "decode": found.decode, "predicted": 1 / p.token,
        "measured/predicted": found.decode * p.token, "prefill": found.prefill, "overlap": found.overlap,
        "handover_us": None if found.handover is None else found.handover * 1e6,
        "gpu_limit": p.gpu_bytes / gpu_left / r.gpu,
        "cpu_limit": p.cpu_bytes / found.cold / r.cpu_stream if found.cold else None,
    }  # fmt: skip


def offloaded(
    artifact: MemoryArtifact, curve: Curve, case: Case, s: Setting, other: rival.Rival, wanted: np.ndarray
) -> dict[str, Any]:
    decode, resident, logits = rival.measure(other, artifact, case.budget, s.device)
    if other.checked:  # its residual stream is f16
        check(f"{case.name}, {other.name}", logits, wanted, 0.1)
    return {
        "curve": curve.name, "budget": case.name, "gib": case.budget / 2**30, "what": other.name,
        "attention": resident, "neurons": resident / artifact.manifest.decoder.n_layers, "decode": decode,
    }  # fmt: skip


def check(what: str, found: np.ndarray, wanted: np.ndarray, error: float) -> None:
    """Stop where logits differ by more than a share of their deviation."""
    off = float(np.abs(found - wanted).max() / wanted.std())
    if not off <= error * 10 or float(np.abs(found - wanted).mean() / wanted.std()) > error:
        raise SystemExit(f"{what}: logits differ by {off:.3f} of their deviation")


def definition(artifact: MemoryArtifact, plain: MemoryArtifact, curve: Curve, s: Setting) -> tuple[np.ndarray, float]:
    """Logits of all on the GPU, which skips nothing that fires; checked against torch's of the same numbers in f16; its
    dense speed."""
    error = ERROR[artifact.manifest.formats["ffn"]]
    plan = everything_there(artifact.manifest, s.context)
    budget = needed_bytes(artifact.manifest, plan, s.context, 512)
    exact = measure(artifact, "dense", plan, s.device, budget, s.threads, s.prompt, s.tokens)
    skipping = measure(artifact, "auto", plan, s.device, budget, s.threads, s.prompt, s.tokens)
    check(f"{curve.name}: skipping against dense", skipping.logits, exact.logits, error)
    ids = text(artifact.manifest.decoder.vocab_size)
    with s.device.at_work():
        model = Offload(plain, 1 << 50, s.context, s.device.device)
        logits = [model.step(int(token)).cpu().numpy() for token in ids[:36]][-4:]
    check(f"{curve.name}: dense against torch", exact.logits, np.stack(logits), error)
    return skipping.logits, exact.decode


def weights_read(artifact: MemoryArtifact, context: int) -> int:
    """Bytes of one dense token."""
    d, row = artifact.manifest.decoder, row_bytes(artifact.manifest.formats["ffn"], artifact.manifest.decoder.d_model)
    return ((4 * d.d_model + 3 * d.d_ff) * d.n_layers + d.vocab_size) * row + kv_bytes(d, "f16", context) * d.n_layers


def show(row: dict[str, Any]) -> None:
    def cell(name: str, form: str) -> str:
        value = row.get(name)
        return "" if value is None else format(value, form)

    print(
        f"| {row['model']} {row['format']} {row['curve']} | {row['budget']} ({row['gib']:.1f} GiB) | {row['what']} "
        f"| {row['attention']} / {row['neurons']:.0%} | {cell('active', '.0%')} | {row['decode']:.1f} "
        f"| {cell('predicted', '.1f')} | {cell('measured/predicted', '.2f')} | {cell('prefill', '.0f')} "
        f"| {cell('overlap', '.2f')} | {cell('handover_us', '.0f')} "
        f"| {cell('gpu_limit', '.2f')} | {cell('cpu_limit', '.2f')} |",
        flush=True,
    )


def bench(shape: Shape, fmt: str, curves: dict[Curve, float], s: Setting, found: list[dict[str, Any]]) -> list[str]:
    """All rows of one model, each curve up to its time; returns what there was no time for."""
    began = time.monotonic()
    with s.device.at_work():
        base, left = make(shape, fmt, s.device.device), []
        plain = in_f16(base, shape, s.device.device)
    d = shape.decoder
    print(f"\n{shape.name} {fmt}: made in {time.monotonic() - began:.0f} s", flush=True)
    r = rates(s.device, fmt, d.d_model, min(1 << 28, 4 * d.d_ff * d.d_model), s.threads)
    print(
        f"GPU {r.gpu / 1e9:.0f} GB/s copied, {r.gpu_stream / 1e9:.0f} by our products, {r.gpu_picked / 1e9:.0f} of "
        f"picked rows; CPU {r.cpu_stream / 1e9:.1f} and {r.cpu_picked / 1e9:.1f}; {r.gap * 1e6:.1f} µs a kernel, "
        f"{r.handover * 1e6:.1f} µs there and back",
        flush=True,
    )
    other = rival.find(plain, s.context, s.device)
    for curve, until in curves.items():
        s = replace(s, deadline=until)
        artifact = base.with_curve(curve)
        wanted, dense = definition(artifact, plain.with_curve(curve), curve, s)
        share = dense * weights_read(artifact, 32 + s.tokens) / r.gpu
        print(
            f"{shape.name} {fmt} {curve.name}: dense, all on the GPU: {dense:.1f} tokens/s, "
            f"{share:.2f} of its bandwidth"
        )
        for case in budgets(artifact.manifest, s.context)[s.cases]:
            if time.monotonic() > s.deadline:
                left.append(f"{shape.name} {curve.name} {case.name}")
                continue
            for row in rows(artifact, curve, shape.rank, case, s, r, wanted):
                found.append({"model": shape.name, "format": fmt, **row})
                show(found[-1])
            if not case.name.startswith("100") and time.monotonic() < s.deadline:
                row = offloaded(plain.with_curve(curve), curve, case, s, other, wanted)
                found.append({"model": shape.name, "format": "f16", **row})
                show(found[-1])
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda:0", help="cuda:N, or cpu: Triton's interpreter, for a test of the bench"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, one budget")
    parser.add_argument("--format", choices=FORMATS, default="f16", help="of all matrices; offloading stays in f16")
    parser.add_argument("--predict", action="store_true", help="no measurement: what the model of time says")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.predict:
        predicting.show(a.format, a.json)
        return
    began = time.monotonic()
    device: Device = Interpreted() if a.device == "cpu" else Cuda(int(a.device.partition(":")[2] or 0))
    threads = int(numba.config.NUMBA_NUM_THREADS)
    sizes = (8, 1, 128) if a.tiny else (256, 24, 1024)
    s = Setting(device, threads, *sizes, 0.0, slice(-1, None) if a.tiny else slice(None))
    print(f"torch {torch.__version__}, numba {numba.__version__}, {device.name}, {threads} CPU threads")
    print("| model | GPU budget | what | attention / FFN on the GPU | active there | tokens/s | predicted | ratio "
          "| prompt | overlap | hand-over µs | GPU limit | CPU limit |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    found: list[dict[str, Any]] = []
    # Kernels are compiled in the first one's time.
    shares = {TINY: {OPT: 1.0}} if a.tiny else {SEVEN: {OPT: 0.4, REGLU: 0.65}, THIRTEEN: {OPT: 0.85, REGLU: 1.0}}
    left = []
    for shape, curves in shares.items():
        until = {curve: began + 60 * a.minutes * share for curve, share in curves.items()}
        left += bench(shape, a.format, until, s, found)
    if left:
        print("no time for: " + "; ".join(left))
    if a.json:
        a.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
