"""Predicts speeds for machines in `profiles/machines` by the model of time, without a GPU: nothing here is measured.

A machine's rates are its profile's: products at `format_gb_per_s`, picked rows at `gather_gb_per_s` (where that is
missing as products, else as memory), `launch_us` for every kernel, `sync_us` for every hand-over. Offloading reads all
weights in f16 and brings up the layers that do not stay at the link's full rate, which pageable memory does not reach:
the ratios to it are lower bounds.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_runtime.artifact.schema import Plan
from support.gpu_bench.measuring import Rates, predict
from support.gpu_bench.model import OPT, REGLU, SEVEN, THIRTEEN, Curve, ModelSize, manifest_of
from support.gpu_bench.offload import layer_bytes, resident_layers
from support.gpu_bench.placing import all_on_gpu, attention_first, budgets, whole_layers
from support.paths import ROOT

MACHINES = ROOT / "profiles" / "machines"
NAMES = ("pc-high", "pc-low")
MODELS = ((SEVEN, OPT), (SEVEN, REGLU), (THIRTEEN, OPT), (THIRTEEN, REGLU))
CONTEXT, POSITION = 1024, 44
"""Positions of the cache, and positions before the token that is timed; both as when measuring."""
TARGETS = {OPT: 3.0, REGLU: 1.8}
"""Wanted speed ÷ that of the dense layer split at a quarter of the model; `OFFLOAD`: ÷ that of offloading."""
OFFLOAD = 5.0


@dataclass(frozen=True)
class Machine:
    """A machine's profile in bytes and seconds."""

    name: str
    title: str
    vram: int
    link: float
    profile: Mapping[str, Any]

    @classmethod
    def read(cls, name: str) -> "Machine":
        p = tomllib.loads((MACHINES / f"{name}.toml").read_text(encoding="utf-8"))
        title = f"{p['gpu']['name']}, {p['cpu']['name']}"
        return cls(name, title, int(p["gpu"]["vram_gib"] * 2**30), p["link"]["pcie_gb_per_s"] * 1e9, p)

    def rates(self, fmt: str) -> Rates:
        gpu, cpu = self.profile["gpu"], self.profile["cpu"]
        return Rates(
            format=fmt,
            gpu=gpu["bandwidth_gb_per_s"] * 1e9,
            gpu_stream=_rate(gpu, fmt, "format"),
            gpu_picked=_rate(gpu, fmt, "gather"),
            cpu_stream=_rate(cpu, fmt, "format"),
            cpu_picked=_rate(cpu, fmt, "gather"),
            launch=gpu["launch_us"] / 1e6,
            cpu_launch=cpu.get("launch_us", 0.0) / 1e6,
            cold=2 * cpu.get("launch_us", 0.0) / 1e6,
            handover=self.profile["link"]["sync_us"] / 1e6,
        )


def _rate(processor: Mapping[str, Any], fmt: str, kind: str) -> float:
    found = processor.get(f"{kind}_gb_per_s", {}).get(fmt)
    if found is None and kind == "gather":
        return _rate(processor, fmt, "format")
    return float(processor["bandwidth_gb_per_s"] if found is None else found) * 1e9


def table(machine: Machine, fmt: str, size: ModelSize, curve: Curve) -> Iterator[dict[str, Any]]:
    """Tokens a second at every budget that the card has memory for."""
    manifest, r = manifest_of(size, fmt), machine.rates(fmt)

    def seconds(plan: Plan, mode: str = "auto") -> float:
        return predict(manifest.decoder, plan, curve, size.rank, POSITION, r, mode).token

    for case in sorted(budgets(manifest, CONTEXT), key=lambda case: case.budget):
        if case.budget > machine.vram:
            continue
        layers = whole_layers(manifest, case.budget, CONTEXT)
        yield {
            "machine": machine.name, "model": size.name, "format": fmt, "curve": curve.name, "budget": case.name,
            "gib": case.budget / 2**30,
            "ours": 1 / seconds(attention_first(manifest, case.budget, CONTEXT, seconds)),
            "sparse_layers": 1 / seconds(layers),
            "dense_layers": 1 / seconds(layers, "dense"),
            "offload": 1 / offload_seconds(machine, size, curve, case.budget),
        }  # fmt: skip


def offload_seconds(machine: Machine, size: ModelSize, curve: Curve, budget: int) -> float:
    """One token of offloading, in f16."""
    manifest = manifest_of(size, "f16")
    d, plan = manifest.decoder, all_on_gpu(manifest, CONTEXT)
    resident = predict(d, plan, curve, size.rank, POSITION, machine.rates("f16"), "dense").token
    absent = d.n_layers - resident_layers(manifest, budget, CONTEXT)
    return resident + absent * layer_bytes(manifest) / machine.link


def show(fmt: str, to: Path | None) -> None:
    """Print the table, and write it."""
    rows = []
    print(f"Predicted, not measured. Tokens a second; weights in {fmt}, offloading's in f16.")
    print("| machine | model | GPU budget | ours | layers, sparse | layers, dense | offload | ours ÷ layers, dense "
          "| ours ÷ offload |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for machine in map(Machine.read, NAMES):
        for size, curve in MODELS:
            for row in table(machine, fmt, size, curve):
                rows.append(row)
                _print(row, TARGETS[curve] if row["budget"].startswith("25 % of the model") else None)
    for machine in map(Machine.read, NAMES):
        print(f"{machine.name}: {machine.title}; {machine.profile['source']}")
    if to:
        to.write_text(json.dumps(rows, indent=1))


def _print(row: Mapping[str, Any], target: float | None) -> None:
    split, offload = f"{row['ours'] / row['dense_layers']:.1f}", f"{row['ours'] / row['offload']:.1f}"
    wanted = ("", "") if target is None else (f" (target {target:g})", f" (target {OFFLOAD:g})")
    if row["format"] != "f16":
        offload, wanted = "", (wanted[0], "")  # unlike things
    print(
        f"| {row['machine']} | {row['model']} {row['curve']} | {row['budget']} ({row['gib']:.1f} GiB) "
        f"| {row['ours']:.1f} | {row['sparse_layers']:.1f} | {row['dense_layers']:.1f} | {row['offload']:.2f} "
        f"| {split}{wanted[0]} | {offload}{wanted[1]} |"
    )
