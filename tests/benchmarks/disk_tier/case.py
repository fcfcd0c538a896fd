"""One model of the disk tier's benchmark: its files, its texts, and engines that run it within a limit of memory."""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side.peers import PEERS
from side_by_side.process import EngineError, Worker
from side_by_side.rounds import LLAMA_CPP
from side_by_side.shape import decoder_of
from sparse_model import Spec, build
from support.row_traces import Trace
from support.synthetic import byte_tokenizer

from disk_tier import policies, prediction
from disk_tier.ceiling import device_rate
from disk_tier.limits import MemoryGroup, evict
from pi_compile.machine import Machine
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rows import WORKERS
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

    mapped_warm = 1
    """Tokens of mapped engines within a limit before those that are timed."""

    def __init__(
        self, a: argparse.Namespace, fmt: str, folder: Path, group: MemoryGroup | None, decoder: Decoder | None = None
    ) -> None:
        self.a, self.format, self.folder, self._group, self.mode = a, fmt, folder, group, a.mode
        self.decoder, self.path, self.gguf = decoder or decoder_of(a), folder / f"{fmt}.pi", folder / f"{fmt}.gguf"
        self.rows: list[dict[str, Any]] = []
        self._rates: dict[int, float] = {}
        self.taken = 0
        """Most bytes that ours had in memory in its last run within a budget."""
        self.build()
        with self.ours() as worker:
            found = worker.ask("budgets", path=str(self.path))
        self.least, self.most, self._process = found["least"], found["most"], found["process"]
        self.levels = [float(level) for level in a.persistence.split(",")]
        self.predictions: dict[float, prediction.Prediction] = {}

    def build(self) -> None:
        """Write the artifact."""
        formats = {**dict.fromkeys(PARTS, self.format), "predictor": "q4"}
        spec = Spec(decoder=self.decoder, formats=formats, density=self.a.density, rank=self.a.rank, likeness=LIKENESS)
        build(spec, {self.a.over_read: self.path}, byte_tokenizer())

    def text(self, tokens: int, level: float) -> list[int]:
        """The tokens of a text with about this persistence."""
        return texts(tokens, level)

    @cached_property
    def traces(self) -> dict[float, tuple[list[Trace], list[Trace]]]:
        """What the predictors name, and what fires, layer by layer, at each persistence."""
        found, files = {}, [self.folder / f"{kind}.npz" for kind in ("named", "fired")]
        with self.ours(mode="predicted", ram_budget=self.budget(50), two_phases=True) as worker:
            for level in self.levels:
                worker.ask("trace", tokens=self.text(TRACED, level), named=str(files[0]), fired=str(files[1]))
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
    def ours(self, limit: int | None = None, slack: float = SLACK, **opening: Any) -> Iterator[Worker]:
        """Our engine, with its model opened, in the group if there is a limit."""
        with Worker("pi", "disk_tier.engine", limit_s=300) as worker:
            if limit is not None:
                worker.ask("budgets", path=str(self.path))  # all is imported then
                self._enter(worker, self.path, limit, slack)
            if opening:
                worker.ask("open_model", path=str(self.path), **opening)
            yield worker

    def _enter(self, worker: Worker, path: Path, limit: int, slack: float) -> None:
        """Put an engine into the group before it opens its file, of which nothing is in the page cache."""
        evict(path)
        if self._group is not None:
            self._group.limit(int(slack * (limit - self._process)))
            self._group.add(worker.pid)

    def measure(
        self, name: str, limit: int | None, levels: Sequence[float], tokens: int, slack: float = SLACK, **opening: Any
    ) -> dict[float, float]:
        """Decode with ours at each persistence; prints and keeps rows; returns tokens per second."""
        opening, rates = {"mode": self.mode, **opening}, {}
        warm = WARM if opening.get("ram_budget") or limit is None else self.mapped_warm
        with self.ours(limit, slack, **opening) as worker:
            for level in levels:
                found = worker.ask("decode", tokens=self.text(warm + tokens, level), warm=warm)
                rates[level] = self._row(name, level, found)
                if name == OURS:
                    self.taken = found["peak"]
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

    def llama(self, tokens: int) -> float | None:
        """Decode with llama.cpp, mapped, in the group with what ours took last; None where it fails."""
        try:
            with Worker(LLAMA_CPP, PEERS[LLAMA_CPP][0], limit_s=300) as worker:
                worker.ask("describe")
                self._enter(worker, self.gguf, self.taken, 1.0)
                # What it repacks would be a copy in memory, which the group has no room for.
                worker.ask("open_model", path=str(self.gguf), context=512, repack=False)
                text = self.text(self.mapped_warm + tokens, self.levels[0])
                found = worker.ask("decode_text", tokens=text, warm=self.mapped_warm)
                return self._row("llama.cpp mapped", None, found)
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
