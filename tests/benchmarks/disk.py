"""The disk tier beside the same model in memory, mapped within the same limit, llama.cpp, and the device's own rate.

nox -s bench -- disk [--formats f16,q4] [--budgets 100,75,50,25,10,5] [--persistence 0.36,0.8] [--tokens N]
                     [--parts budgets,ablation,policies,phases] [--layers N] [--no-llama] [--machine FILE] [--json PATH]

A synthetic Llama (recipes/demo/sparse_model) decodes within `--ram-budget`s that leave room for so many percent of the
FFNs' rows. Every engine runs in the same memory cgroup, which counts the page cache too, with 5 % more than a budget;
where none can be made, this is said, and mapped engines are left out. Embeddings of tokens that follow each other by id
are alike, so the step between the ids of a text sets how many neurons stay active: the persistence that this brings is
measured and printed. The device's rate is taken at the mean size of a run's own reads, and its depth. *Waiting* is the
share of a token's time in which nothing can be computed before rows come, *bookkeeping* what is left beside that and
compiled steps of the model: looking rows up, asking for them, and Python. What placing
predicts of each run stands below it: from the neurons that a recorded text names and fires, and from this machine's
profile, which is measured first. The model has the width of 1.2 B parameters; `--layers 16` is all of it.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from disk_tier import policies, prediction
from disk_tier.ceiling import device_rate
from disk_tier.limits import MemoryGroup, NoGroupError, evict, memory_group
from side_by_side.peers import PEERS
from side_by_side.process import EngineError, Worker
from side_by_side.rounds import LLAMA_CPP
from side_by_side.shape import add_shape, decoder_of
from sparse_model import Spec, build
from support.row_traces import Trace, persistence
from support.synthetic import byte_tokenizer

from pi_compile.machine import Machine, find_machine
from pi_compile.machine.measurement import measure_machine
from pi_compile.results import WINDOWS
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import WORKERS, row_nbytes
from pi_runtime.artifact.sizes import PARTS

LIKENESS = 0.98
"""Of the embeddings of tokens whose ids follow each other."""
WARM = 12
SLACK = 1.05
"""The cgroup's limit ÷ the budget, both without what a process takes before it enters the group."""
SLACK_NBYTES = 8 << 20
"""What a process may have grown by since its smallest budget was computed."""
OURS = "ours"
EMBEDDINGS = 2048
"""Embeddings of the synthetic model that differ."""
TRACED = 64
"""Tokens of a text whose neurons are recorded."""
ALL_PARTS = ("budgets", "ablation", "policies", "phases")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="f16,q4")
    parser.add_argument("--budgets", default="100,75,50,25,10,5", help="percent of the FFNs' rows")
    parser.add_argument("--persistence", default="0.36,0.8")
    parser.add_argument("--parts", default=",".join(ALL_PARTS))
    parser.add_argument("--tokens", type=int, default=40, help="that are timed, of ours")
    parser.add_argument("--mapped-tokens", type=int, default=3, help="the same of mapped engines within a limit")
    parser.add_argument("--mode", default="predicted")
    parser.add_argument(
        "--over-read", type=float, default=1.5, help="neurons that the predictor names ÷ those that fire"
    )
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument("--machine", help="a profile of this machine with its disk; default: one is measured")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--folder", type=Path, help="for the models, some GB; default: a temporary one")
    add_shape(parser)
    parser.set_defaults(layers=6)
    return parser.parse_args()


def texts(tokens: int, wanted: float) -> list[int]:
    """Ids of a text whose neurons persist about as wanted: at 0.36 ids are random, above they count up."""
    if wanted <= 0.4:
        return np.random.default_rng(1).integers(0, EMBEDDINGS, tokens).tolist()
    return [n * step_for(wanted) % EMBEDDINGS for n in range(tokens)]


def step_for(wanted: float) -> int:
    """The step between ids with which about as many neurons persist: a fit to what was measured."""
    return max(1, round(np.log(wanted) / 2.9 / np.log(LIKENESS)))


class Case:
    """One format: its files, and how engines are run."""

    def __init__(self, a: argparse.Namespace, fmt: str, folder: Path, group: MemoryGroup | None) -> None:
        self.a, self.format, self.folder, self._group = a, fmt, folder, group
        self.decoder, self.path, self.gguf = decoder_of(a), folder / f"{fmt}.pi", folder / f"{fmt}.gguf"
        self.rows: list[dict[str, Any]] = []
        self._rates: dict[int, float] = {}
        _build(a, self.decoder, fmt, self.path, a.over_read)
        with self.ours() as worker:
            found = worker.ask("budgets", path=str(self.path))
        self.least, self.most, self._process = found["least"], found["most"], found["process"]
        self.levels = [float(level) for level in a.persistence.split(",")]
        self.predictions: dict[float, prediction.Prediction] = {}

    @cached_property
    def traces(self) -> dict[float, tuple[list[Trace], list[Trace]]]:
        """What the predictors name, and what fires, layer by layer, at each persistence."""
        found, files = {}, [self.folder / f"{kind}.npz" for kind in ("named", "fired")]
        with self.ours(mode="predicted", ram_budget=self.budget(50), two_phases=True) as worker:
            for level in self.levels:
                worker.ask("trace", tokens=texts(TRACED, level), named=str(files[0]), fired=str(files[1]))
                named, fired = map(policies.load_traces, files)
                found[level] = named, fired
        return found

    def predict(self, machine: Machine) -> None:
        """Prepare what is predicted of runs from now on."""
        self.predictions = {
            level: prediction.Prediction(self.path, machine, *traces) for level, traces in self.traces.items()
        }

    def budget(self, percent: float) -> int:
        """The `--ram-budget` that leaves room for this share of the rows."""
        return SLACK_NBYTES + int(self.least + percent / 100 * (self.most - self.least))

    @contextmanager
    def ours(self, limit: int | None = None, **opening: Any) -> Iterator[Worker]:
        """Our engine, with its model opened, in the group if there is a limit."""
        with Worker("pi", "disk_tier.engine", limit_s=300) as worker:
            if limit is not None:
                worker.ask("budgets", path=str(self.path))  # all is imported then
                self._enter(worker, self.path, limit)
            if opening:
                worker.ask("open_model", path=str(self.path), **opening)
            yield worker

    def _enter(self, worker: Worker, path: Path, limit: int) -> None:
        """Put an engine into the group before it opens its file, of which nothing is in the page cache."""
        evict(path)
        if self._group is not None:
            self._group.limit(int(SLACK * (limit - self._process)))
            self._group.add(worker.pid)

    def measure(
        self, name: str, limit: int | None, levels: Sequence[float], tokens: int, **opening: Any
    ) -> dict[float, float]:
        """Decode with ours at each persistence; prints and keeps rows; returns tokens per second."""
        opening, rates = {"mode": self.a.mode, **opening}, {}
        warm = WARM if opening.get("ram_budget") or limit is None else 1
        with self.ours(limit, **opening) as worker:
            for level in levels:
                found = worker.ask("decode", tokens=texts(warm + tokens, level), warm=warm)
                rates[level] = self._row(name, level, found)
                if name == OURS and level in self.predictions:
                    self._compare(level, worker.ask("plan"))
        return rates

    def _compare(self, level: float, plan: dict[str, Any]) -> None:
        """Print what is predicted of the last row."""
        row = self.rows[-1]
        rate, hits, nbytes = row["predicted"] = self.predictions[level].of(**plan)
        print(
            f"    predicted {rate:.2f} tokens/s ({rate / row['tokens_per_s'] - 1:+.0%}), hits {hits:.3f},"
            f" {nbytes / 1e6:.2f} MB/token",
            flush=True,
        )

    def llama(self, limit: int, tokens: int) -> float | None:
        """Decode with llama.cpp, mapped, in the group; None where it fails."""
        try:
            with Worker(LLAMA_CPP, PEERS[LLAMA_CPP][0], limit_s=300) as worker:
                worker.ask("describe")
                self._enter(worker, self.gguf, limit)
                worker.ask("open_model", path=str(self.gguf), context=512)
                return self._row("llama.cpp mapped", None, worker.ask("decode", context=1, tokens=tokens))
        except EngineError as failure:
            print(f"  {failure}", flush=True)
            return None

    def _row(self, name: str, persistence: float | None, found: dict[str, Any]) -> float:
        seconds = found["seconds"]
        mean = statistics.fmean(seconds)
        row = {"format": self.format, "engine": name, "persistence": persistence, "tokens_per_s": 1 / mean, **found}
        p50, p90, p99 = (1e3 * np.percentile(seconds, [50, 90, 99])).tolist()
        line = f"  {name:24}{'' if persistence is None else persistence:>5} {1 / mean:7.2f} tokens/s"
        line += f"  p50 {p50:7.1f} p90 {p90:7.1f} p99 {p99:7.1f} ms"
        if "cpu_s" in found:
            line += f"  CPU {1e3 * found['cpu_s']:6.1f} ms"
        if found.get("reads"):
            size = found["bytes_read"] / found["reads"]
            row["ceiling"] = self.rate(size)
            reading_s = found["bytes_read"] / row["ceiling"] / len(seconds)
            row["reading_share"] = reading_s / mean
            line += f"  hits {found['hits'] / (found['hits'] + found['misses']):.3f}"
            line += f"  {found['bytes_read'] / len(seconds) / 1e6:6.2f} MB/token in reads of {size / 1024:.1f} KiB"
            line += f", {1e3 * reading_s:.1f} ms at the device's {row['ceiling'] / 1e6:.0f} MB/s"
            waiting, computing = found["seconds_waited"] / found["disk_s"], found["computing_s"] / found["disk_s"]
            line += f"  waiting {waiting:.2f}, bookkeeping {1 - waiting - computing:.2f}"
        elif "device_bytes" in found:
            line += f"  {found['device_bytes'] / len(seconds) / 1e6:6.1f} MB/token"
        self.rows.append(row)
        print(line, flush=True)
        return 1 / mean

    def rate(self, nbytes: float) -> float:
        """The device's rate at about this size, taken once for each."""
        size = max(512, round(nbytes / 512) * 512) if nbytes < 4096 else round(nbytes / 4096) * 4096
        if size not in self._rates:
            self._rates[size] = device_rate(self.path, size, WORKERS)
        return self._rates[size]


def _build(a: argparse.Namespace, decoder: Decoder, fmt: str, path: Path, over_read: float) -> None:
    formats = {**dict.fromkeys(PARTS, fmt), "predictor": "q4"}
    spec = Spec(decoder=decoder, formats=formats, density=a.density, rank=a.rank, likeness=LIKENESS)
    build(spec, {over_read: path}, byte_tokenizer())


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
        mapped = case.measure("ours, mapped", budget, levels[:1], a.mapped_tokens)[levels[0]]
        peer = None if a.no_llama else case.llama(budget, a.mapped_tokens)
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
        if "budgets" in parts:
            machine = find_machine(a.machine, Path()) if a.machine else measure_machine(folder)
        for fmt in a.formats.split(","):
            case = Case(a, fmt, folder, group)
            if "budgets" in parts and not a.no_llama and group is not None:
                from side_by_side.gguf_file import write_gguf

                write_gguf(case.gguf, case.decoder, fmt)
            print(f"{fmt}: {case.path.stat().st_size / 1e6:.0f} MB; the device by size of a read:", end=" ")
            print(", ".join(f"{n} KiB {case.rate(n << 10) / 1e6:.0f} MB/s" for n in (4, 8, 16, 32)), flush=True)
            if machine is not None:
                case.predict(machine)
                measure_budgets(case, group)
            if "ablation" in parts:
                measure_ablation(case, group)
            if "policies" in parts and fmt == a.formats.split(",")[-1]:
                measure_policies(case)
            rows += case.rows
            case.path.unlink()
            case.gguf.unlink(missing_ok=True)
        if "phases" in parts:
            rows += measure_phases(a, folder)
        if a.json is not None:
            a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
