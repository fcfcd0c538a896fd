"""The disk tier beside the same model in memory, mapped within the same limit, llama.cpp, and the device's own rate.

nox -s bench -- disk [--formats f16,q4] [--budgets 100,75,50,25,10,5] [--persistence 0.36,0.8] [--tokens N]
                     [--parts budgets,ablation,policies,phases,mixtures,neurons,residency] [--layers N] [--no-llama]
                     [--machine FILE] [--json PATH] [--mixtures SmallThinker-4B,Qwen3-MoE,small-SiLU]
                     [--mixture-budgets 50,25,12.5]

A synthetic Llama (recipes/demo/sparse_model) decodes within `--ram-budget`s that leave room for so many percent of the
FFNs' rows. Every engine runs in the same memory cgroup, which counts the page cache too. Ours has 5 % more there than
its budget, mapped engines have what ours took of it at most, so that both have the same bytes. Where no group can be
made, this is said, and mapped engines are left out. Embeddings of tokens that follow each other by id
are alike, so the step between the ids of a text sets how many neurons stay active: the persistence that this brings is
measured and printed. The device's rate is taken at the mean size of a run's own reads, and its depth. *Waiting* is the
share of a token's time in which nothing can be computed before rows come, *bookkeeping* what is left beside that and
compiled steps of the model: looking rows up, asking for them, and Python. What placing
predicts of each run stands below it: from the neurons that a recorded text names and fires, and from this machine's
profile, which is measured first. The model has the width of 1.2 B parameters; `--layers 16` is all of it. The part
`mixtures` decodes with mixtures of experts (`disk_tier.mixtures`), `neurons` with neurons inside experts
(`disk_tier.neurons`), `residency` compares which of them stay in memory on
three traces (`disk_tier.residency`).
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from disk_tier import mixtures, neurons, policies, residency
from disk_tier.case import OURS, Case
from disk_tier.limits import MemoryGroup, NoGroupError, memory_group
from side_by_side.shape import add_shape
from support.row_traces import persistence

from pi_compile.machine import Machine, find_machine
from pi_compile.machine.measurement import measure_machine
from pi_compile.results import WINDOWS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import row_nbytes

PARTS = ("budgets", "ablation", "policies", "phases", "mixtures", "neurons", "residency")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="f16,q4")
    parser.add_argument("--budgets", default="100,75,50,25,10,5", help="percent of the FFNs' rows")
    parser.add_argument("--persistence", default="0.36,0.8")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=40, help="that are timed, of ours")
    parser.add_argument("--mapped-tokens", type=int, default=3, help="the same of mapped engines within a limit")
    parser.add_argument("--mode", default="predicted")
    parser.add_argument(
        "--over-read", type=float, default=1.5, help="neurons that the predictor names ÷ those that fire"
    )
    parser.add_argument("--mixtures", default=",".join(mixtures.MIXTURES))
    parser.add_argument("--mixture-budgets", default="50,25,12.5", help="percent of the experts")
    parser.add_argument("--densities", default="5,10,20,30", help="percent of an expert's neurons that fire")
    parser.add_argument("--pattern", default="MEMEM*E", help="layers of Nemotron-3 Nano's shape")
    parser.add_argument("--neuron-budgets", default="50,25", help="percent of the experts' rows")
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument(
        "--machine",
        help="a profile of this machine with its disk; default: one is measured; none: nothing is predicted",
    )
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--folder", type=Path, help="for the models, some GB; default: a temporary one")
    add_shape(parser)
    parser.set_defaults(layers=6)
    return parser.parse_args()


def measure_budgets(case: Case, group: MemoryGroup | None) -> None:
    """Each budget: ours at each persistence, ours mapped and llama.cpp within the same limit."""
    a, levels = case.a, case.levels
    in_memory = case.measure("in memory, mapped", None, levels, a.tokens)
    for percent in map(float, a.budgets.split(",")):
        budget = case.budget(percent)
        print(f" {percent:g} % of the rows, --ram-budget {budget} ({budget / 2**20:.0f} MiB)", flush=True)
        ours = case.measure(OURS, budget, levels, a.tokens, ram_budget=budget)
        print("  " + ", ".join(f"{ours[p] / in_memory[p]:.2f} of in memory at {p:g}" for p in levels), flush=True)
        if group is None or percent >= 100:
            continue
        print(f"  ours took {case.taken / 2**20:.0f} MiB: mapped engines have as much", flush=True)
        mapped = case.measure("ours, mapped", case.taken, levels[:1], a.mapped_tokens, slack=1.0)[levels[0]]
        peer = None if a.no_llama else case.llama(a.mapped_tokens)
        print(f"  {ours[levels[0]] / mapped:.1f} × ours mapped", end="")
        print("" if peer is None else f", {ours[levels[0]] / peer:.1f} × llama.cpp", flush=True)


def measure_ablation(case: Case, group: MemoryGroup | None) -> None:
    """PowerInfer-2's order, with half of the rows in memory: mapped, bundles, cache, pipeline."""
    a, budget, level = case.a, case.budget(50), case.levels[-1:]
    print(" 50 % of the rows, step by step", flush=True)
    if group is not None:
        case.measure("mapped", budget, level, a.mapped_tokens)
    case.measure("rows when needed", budget, level, a.tokens // 2, ram_budget=budget, only="bundles")
    case.measure("and a cache", budget, level, a.tokens, ram_budget=budget, only="cache")
    case.measure("and a pipeline", budget, level, a.tokens, ram_budget=budget)


def measure_policies(case: Case) -> None:
    """Hit rates of cache policies on the traces of both persistences."""
    with Artifact.open(case.path) as artifact:
        rows_per_page = max(1, 4096 // row_nbytes(artifact.manifest.decoder, artifact.manifest.formats["ffn"])["first"])
    for level, (named, _) in case.traces.items():
        traces = named[:: max(1, case.decoder.n_layers // 4)]
        active, *before = np.sum([persistence(trace, case.decoder.d_ff) for trace in traces], axis=0).tolist()
        found = ", ".join(f"{some / active:.2f} in {back}" for some, back in zip(before, WINDOWS, strict=True))
        print(f" persistence {level:g}: of the neurons named, active in the last tokens: {found}", flush=True)
        shares = (0.5, 0.25, 0.1)
        for name, rates in policies.hit_rates(traces, case.decoder.d_ff, shares, rows_per_page):
            case.rows.append({"policy": name, "persistence": level, "hit_rates": dict(zip(shares, rates, strict=True))})
            print(f"  {name:28}" + "  ".join(f"{rate:.3f}" for rate in rates), flush=True)


def measure_phases(a: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bytes of a token with `rest` after `first`, and with both at once: q4, D = 4096, two layers."""
    wide = argparse.Namespace(
        **{**vars(a), "layers": 2, "d_model": 4096, "d_ff": 11008, "rank": 1024, "over_read": 1.5}
    )
    case = Case(wide, "q4", folder, None)
    print("q4, D = 4096, 1.5 × the neurons that fire are named, 25 % of the rows in memory", flush=True)
    for name, two in (("both at once", False), ("first, then rest", True)):
        case.measure(name, None, [0.36], a.tokens // 2, ram_budget=case.budget(25), two_phases=two)
    both, two = (row["bytes_read"] for row in case.rows)
    print(f"  two phases save {1 - two / both:.0%} of the bytes")
    return case.rows


def measure_format(
    a: argparse.Namespace, fmt: str, folder: Path, group: MemoryGroup | None, machine: Machine | None
) -> list[dict[str, Any]]:
    """The parts that are about one format."""
    parts, case = a.parts.split(","), Case(a, fmt, folder, group)
    if "budgets" in parts and not a.no_llama and group is not None:
        from side_by_side.gguf_file import write_gguf

        write_gguf(case.gguf, case.decoder, fmt)
    print(f"{fmt}: {case.path.stat().st_size / 1e6:.0f} MB; the device by size of a read:", end=" ")
    print(", ".join(f"{n} KiB {case.rate(n << 10) / 1e6:.0f} MB/s" for n in (4, 8, 16, 32)), flush=True)
    if "budgets" in parts:
        if machine is not None:
            case.predict(machine)
        measure_budgets(case, group)
    if "ablation" in parts:
        measure_ablation(case, group)
    if "policies" in parts and fmt == a.formats.split(",")[-1]:
        measure_policies(case)
    case.path.unlink()
    case.gguf.unlink(missing_ok=True)
    return case.rows


def main() -> None:
    a, rows = arguments(), list[dict[str, Any]]()
    parts: Sequence[str] = a.parts.split(",")
    with ExitStack() as stack:
        folder = a.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        group = None
        try:
            group = stack.enter_context(memory_group())
        except NoGroupError as reason:
            print(f"no memory cgroup, so mapped engines are left out: {reason}", flush=True)
        machine = None
        if a.machine != "none" and {"budgets", "mixtures"}.intersection(parts):
            machine = find_machine(a.machine, Path()) if a.machine else measure_machine(folder)
        if "residency" in parts:
            rows += residency.compare()
        formats = a.formats.split(",")
        for fmt, name in product(formats, a.mixtures.split(",")) if "mixtures" in parts else ():
            rows += mixtures.measure(a, name, fmt, folder, group, machine)
        for fmt in formats if "neurons" in parts else ():
            rows += neurons.measure(a, fmt, folder, group)
        for fmt in formats if {"budgets", "ablation", "policies"}.intersection(parts) else ():
            rows += measure_format(a, fmt, folder, group, machine)
        if "phases" in parts:
            rows += measure_phases(a, folder)
        if a.json is not None:
            a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
