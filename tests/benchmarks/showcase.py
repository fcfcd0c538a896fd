"""Four published models, each as its file is, beside llama.cpp: the page docs/reference/measured.md, by one command.

nox -s showcase -- FOLDER [--turns 7] [--parts speed,start,load,quality] [--peer PROGRAM] [--write]

FOLDER has the GGUF files of `MODELS`, which digests name; one that is not there is a row that says so. `--peer` is the
`llama-bench` of another engine, as ik_llama.cpp's, whose figures then stand beside. `--write` puts the table of this
kind of processor into the page, and its ratios into docs/pictures/gain.toml.

    speed     prompts of 64, 512 and 2,048 tokens, writing alone, 8 and 32 together: paired rounds, in turns
    start     from the start of a process to the first token, the file in the page cache, and the memory taken then
    load      8 clients of a server: the first token and the gaps, beside llama-server
    quality   how far the logits are from those of the file's own values, in nats a token
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import tokenizers
from real_files import Reference, of_llama, of_ours, packed
from serving.load import Prompts, closed
from serving.servers import llama_server, our_server
from serving.table import percentile
from side_by_side.llama_cpp_build import SERVER
from side_by_side.process import EngineError, Worker, threads

from pi_compile import open_checkpoint
from pi_compile.calibration.quantising import text_windows
from pi_compile.checkpoint.tokenizer_files import TOKENIZER
from pi_runtime.kernels.codegen.isa import ISA

ROOT = Path(__file__).parents[2]
PAGE, FIGURES = ROOT / "docs" / "reference" / "measured.md", ROOT / "docs" / "pictures" / "gain.toml"
BEGIN, END = f"<!-- {ISA.name}: begin -->\n", f"<!-- {ISA.name}: end -->\n"
"""The page has a table, and the picture a panel, for each kind of processor."""
CONTEXT, HELD, CLIENTS, ANSWER = 4096, 64, 8, 64
LONG_TURNS = 3
"""Rounds of the longest prompt."""


@dataclass(frozen=True)
class Known:
    """A file by its digest, and whose model it is."""

    name: str
    makers: str
    sha256: str


MODELS = (
    Known(
        "SmolLM2 135 M Q4_1",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Known(
        "Gemma 3 270 M Q4_K_M",
        "google/gemma-3-270m",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Known(
        "Qwen2.5-Coder 0.5 B Q4_K_M",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    Known(
        "Qwen2.5-Coder 1.5 B Q4_K_M",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)
SPEEDS: dict[str, tuple[str, dict[str, int], int]] = {
    "a prompt of 64": ("prefill", {"tokens": 64}, 64),
    "a prompt of 512": ("prefill", {"tokens": 512}, 512),
    "a prompt of 2,048": ("prefill", {"tokens": 2048}, 2048),
    "writing": ("decode", {"context": HELD, "tokens": 24}, 1),
    "8 together": ("decode_batch", {"batch": 8, "context": HELD, "tokens": 8}, 8),
    "32 together": ("decode_batch", {"batch": 32, "context": HELD, "tokens": 4}, 32),
}
"""What each engine is asked for, and how many tokens a call, or a step of it, takes."""


@dataclass(frozen=True)
class Cell:
    """A figure of ours and of llama.cpp's, and the ratios of paired rounds where there are some."""

    ours: str
    theirs: str = ""
    ratios: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.ratios:
            return f"**{median(self.ratios):.2f}** ({min(self.ratios):.2f}–{max(self.ratios):.2f})"
        return f"{self.ours}/{self.theirs}" if self.theirs else self.ours


Cells = Iterator[tuple[str, Cell]]


@dataclass(frozen=True)
class Case:
    """A model at hand: its file, and what is packed of it."""

    file: Path
    artifact: Path
    folder: Path
    args: argparse.Namespace


def speed(case: Case) -> Cells:
    """Tokens a second, in paired rounds; the peer's of its own program beside, where there is one."""
    with ExitStack() as stack:
        ours = stack.enter_context(Worker("pi-run", "side_by_side.ours"))
        peer = stack.enter_context(Worker("llama.cpp", "side_by_side.llama_cpp_engine", limit_s=900))
        ours.ask("open_model", name="a", path=str(case.artifact), mode="dense", context=CONTEXT)
        found: dict[str, list[tuple[float, float]]] = {what: [] for what in SPEEDS}
        failure = ""
        try:
            peer.ask("open_model", path=str(case.file), context=CONTEXT, sequences=32)
        except EngineError as error:
            failure = str(error)
        for turn in range(case.args.turns + 1):
            for what, (do, asked, tokens) in SPEEDS.items():
                if turn > LONG_TURNS and tokens > 512:
                    continue
                sides: dict[str, float] = {}
                for side in ("ours", "theirs")[:: 1 if turn % 2 else -1]:
                    worker, name = (ours, {"name": "a"}) if side == "ours" else (peer, {})
                    if side == "theirs" and failure:
                        continue
                    try:
                        seconds = worker.ask(do, **name, **asked)["seconds"]
                    except EngineError as error:
                        failure = str(error)
                        continue
                    sides[side] = tokens / (median(seconds) if isinstance(seconds, list) else seconds)
                if turn:  # the first faults pages in
                    found[what].append((sides.get("ours", 0.0), sides.get("theirs", 0.0)))
    for what, rates in found.items():
        own, other = (median(side) for side in zip(*rates, strict=True))
        if failure or not other:
            yield f"{what}, tokens/s", Cell(f"{own:.1f}", failure or "failed")
            continue
        yield f"{what}, tokens/s", Cell(f"{own:.1f}", f"{other:.1f}")
        yield f"{what}, ÷ llama.cpp", Cell("", ratios=tuple(a / b for a, b in rates))
    if case.args.peer:
        yield from _of_program(case)


def _of_program(case: Case) -> Cells:
    """Tokens a second by another engine's `llama-bench`, alone on the machine."""
    command = [case.args.peer, "-m", case.file, "-p", "64,512,2048", "-n", "32", "-t", threads(), "-o", "json"]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    for row in json.loads(done.stdout):
        what = f"a prompt of {row['n_prompt']:,}" if row["n_prompt"] else "writing"
        yield f"{what}, by {Path(case.args.peer).name}", Cell(f"{row['avg_ts']:.1f}")


def start(case: Case) -> Cells:
    """Seconds from the start of a process to its first token, and what it has in memory then."""
    seconds, program = [], [sys.executable, "-m", "pi_runtime", str(case.artifact), "--prompt", "Hi", "-n", "1"]
    for _ in range(4):
        began = time.perf_counter()
        subprocess.run([*program, "--ctx-size", "1024"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    sizes = {}
    for side, module in (("ours", "side_by_side.ours"), ("theirs", "side_by_side.llama_cpp_engine")):
        with Worker(side, module) as worker:
            given: dict[str, Any] = {"path": str(case.artifact), "name": "a", "mode": "dense", "context": 1024}
            if side == "theirs":
                given = {"path": str(case.file), "context": 1024}
            try:
                worker.ask("open_model", **given)
                worker.ask("decode", **({"name": "a"} if side == "ours" else {}), context=HELD, tokens=2)
                sizes[side] = f"{psutil.Process(worker.pid).memory_info().rss / 2**20:,.0f} MiB"
            except EngineError as failure:
                sizes[side] = str(failure)
    yield "from the start of `pi-run` to its first token, s", Cell(f"{median(seconds[1:]):.2f}")
    yield "resident memory at a context of 1,024", Cell(sizes["ours"], sizes["theirs"])


def load(case: Case) -> Cells:
    """The first token and the gaps of 8 clients who ask again at once, in turns."""
    with ExitStack() as stack:
        vocabulary = open_checkpoint(case.file).decoder.vocab_size
        prompts = Prompts([32, 128, 256], vocabulary, ANSWER)
        ours = stack.enter_context(
            our_server(case.artifact, CLIENTS, 1024, 1 << 30, "dense", threads(), case.folder / "ours.log")
        )
        peer = stack.enter_context(
            llama_server(case.args.server, case.file, CLIENTS, 1024, threads(), case.folder / "peer.log")
        )
        # Ends of texts are no tokens there: an answer has its length on both.
        ours.body["ignore_eos"] = True
        found: dict[str, list[Any]] = {"ours": [], "theirs": []}
        said = {}
        for turn in range(1 + max(1, case.args.turns // 3)):
            for side, server in (("ours", ours), ("theirs", peer))[:: 1 if turn % 2 else -1]:
                try:
                    loaded = closed(server, prompts, CLIENTS, (1 + (turn > 0)) * CLIENTS, turn)
                    found[side] += [loaded] if turn else []
                except EngineError as failure:
                    said[side] = str(failure)
    for what, field in (("first token", "first_s"), ("gap between tokens", "gaps_s")):
        for share in (0.5, 0.95):
            cells = [
                said.get(side) or f"{percentile([s for one in runs for s in getattr(one, field)], share):.2f}"
                for side, runs in found.items()
            ]
            yield f"{CLIENTS} clients: {what}, {share:.0%} within, s", Cell(*cells)
    rates = [said.get(side) or f"{median(one.tokens_per_s for one in runs):.1f}" for side, runs in found.items()]
    yield f"{CLIENTS} clients: tokens/s", Cell(*rates)


def quality(case: Case) -> Cells:
    """The divergence of either program's predictions from those of the file's own values."""
    checkpoint = open_checkpoint(case.file)
    tokenizer = tokenizers.Tokenizer.from_buffer(checkpoint.text_files.files[TOKENIZER])
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    ids = np.array(tokenizer.encode(text[:200_000], add_special_tokens=False).ids[: case.args.tokens])
    reference = Reference(checkpoint, text_windows(checkpoint.decoder, ids, 512))
    found = [reference.compared(of_ours(case.artifact, reference.ids_NT))]
    found.append(reference.compared(of_llama(case.file, reference.ids_NT, case.folder)))
    yield "divergence from the file's own values, nats", Cell(*(one.split(" | ")[2].partition(" ")[0] for one in found))
    yield "perplexity ÷ that of the file's own values", Cell(*(one.split(" | ")[1] for one in found))


PARTS: dict[str, Callable[[Case], Cells]] = {f.__name__: f for f in (speed, start, load, quality)}


def at_hand(folder: Path) -> dict[str, Path]:
    """The files of a folder by digest."""
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(folder.glob("*.gguf"))}


def measured(known: Known, file: Path | None, args: argparse.Namespace) -> dict[str, Cell]:
    """All rows of a model."""
    if file is None:
        return {"file": Cell("not in the folder")}
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name)
        path, began = folder / "a.pi", time.perf_counter()
        packed(file, "keep", path)
        seconds, nbytes = time.perf_counter() - began, path.stat().st_size
        rows = {
            "file": Cell(f"{file.stat().st_size / 1e6:,.0f} MB"),
            "artifact, ÷ file": Cell(f"{nbytes / 1e6:,.0f} MB, {nbytes / file.stat().st_size:.3f}"),
            "packed in, s": Cell(f"{seconds:.1f}"),
        }
        for part in args.parts.split(","):
            try:
                for what, cell in PARTS[part](Case(file, path, folder, args)):
                    print(f"{known.name}: {what}: {cell}", flush=True)
                    rows[what] = cell
            except (EngineError, subprocess.CalledProcessError, AssertionError) as failure:
                rows[part] = Cell(f"failed: {failure}")
                print(f"{known.name}: {part}: {failure}", flush=True)
    return rows


def table(found: dict[str, dict[str, Cell]]) -> str:
    """A row for each figure, a column for each model."""
    whats = list(dict.fromkeys(what for rows in found.values() for what in rows))
    lines = [f"| ours/llama.cpp's | {' | '.join(found)} |", f"|{' --- |' * (1 + len(found))}"]
    lines += [f"| {what} | {' | '.join(str(rows.get(what, '')) for rows in found.values())} |" for what in whats]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """The processor, by its name and instruction set, and what llama.cpp was built with."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", cpu)
    amx = "with AMX" if "amx_int8" in cpu else "without AMX"
    with Worker("llama.cpp", "side_by_side.llama_cpp_engine") as peer:
        try:
            build = re.sub(r"(?<=[A-Z0-9]) (?=[A-Z])", ",", peer.ask("describe")["build"])
        except EngineError as failure:
            build = str(failure)
    return f"{name[1] if name else 'unknown'} ({ISA.name}, {amx}), {threads()} threads; llama.cpp {build}"


def write(text: str, found: dict[str, dict[str, Cell]]) -> None:
    """Put the table into its page, and the medians into the picture's figures."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", encoding="utf-8")
    bars = []
    for name, rows in found.items():
        for n, what in enumerate(("writing", "a prompt of 64", "a prompt of 512")):
            if (cell := rows.get(f"{what}, ÷ llama.cpp")) is not None:
                bars.append(f'    ["{name + ", " if n == 0 else ""}{what}", {median(cell.ratios):.2f}],\n')
    figures = FIGURES.read_text(encoding="utf-8")
    own = rf'(?<=isa = "{ISA.name}"\nbars = \[\n).*?(?=^\])'
    figures = re.sub(own, lambda _: "".join(bars), figures, count=1, flags=re.DOTALL | re.MULTILINE)
    FIGURES.write_text(figures, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text for `quality`")
    parser.add_argument("--server", type=Path, default=SERVER, help="the program llama-server")
    parser.add_argument("--peer", type=Path, help="the program llama-bench of another engine")
    parser.add_argument("--scratch", type=Path, help="a folder for artifacts; default: the system's")
    parser.add_argument("--write", action="store_true", help="write the page and the picture's figures")
    args = parser.parse_args(arguments)
    files = at_hand(args.folder)
    found = {known.name: measured(known, files.get(known.sha256), args) for known in MODELS}
    text = f"On {machine()}.\n\n{table(found)}"
    print(text)
    if args.write:
        write(text, found)


if __name__ == "__main__":
    main()
