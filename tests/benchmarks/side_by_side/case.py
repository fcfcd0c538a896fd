"""One comparison: a shape, a format and a density; its files written, its engines started, its rounds run."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sparse_model import Spec, build
from support.synthetic import byte_tokenizer

from side_by_side.gguf_file import write_gguf
from side_by_side.peers import TRANSFORMERS, open_peer
from side_by_side.plain_file import write_plain
from side_by_side.process import Worker
from side_by_side.rounds import LLAMA_CPP, Contender, Row, decode_rows, prefill_rows
from side_by_side.table import print_activity

OURS, WHOLE = "pi", "whole matrices"
"""Our name, and the mode of a plain file, which is how most models run."""
LARGEST_ERROR = 0.01
"""Relative distance of logits that a result may have: neurons at their threshold may go either way."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to compare, and for how long."""

    spec: Spec
    format: str
    isas: tuple[str, ...]
    """Instruction sets to force ours to."""
    peer_limit_s: float
    """Seconds that a request to a peer may take before the peer is ended."""
    over_reads: tuple[float, ...] = (1.0, 1.5)
    contexts: tuple[int, ...] = (64,)
    prompts: tuple[int, ...] = (64, 512)
    transformers: bool = False
    start_up: bool = False
    rounds: int = 9
    tokens: int = 4

    @property
    def parameters(self) -> int:
        d = self.spec.decoder
        heads = (2 * d.n_heads + 2 * d.n_kv_heads) * d.head_dim
        return d.d_model * (2 * d.vocab_size + d.n_layers * (heads + 3 * d.d_ff))


def run(case: Case, folder: Path) -> list[Row]:
    """Write the files, run the rounds, delete the files."""
    rows: list[Row] = []
    with ExitStack() as files, ExitStack() as stack:
        paths = {over_read: files.enter_context(_deleted(folder / f"{over_read}.pi")) for over_read in case.over_reads}
        for over_read, activity in build(case.spec, paths, byte_tokenizer()).items():
            print_activity(f"{case.format}, predictor × {over_read}", activity)
        plain = files.enter_context(_deleted(folder / "plain.pi"))
        write_plain(paths[case.over_reads[0]], plain)
        ours = _ours(case, paths, plain, stack)
        peers = _peers(case, files.enter_context(_deleted(folder / "peer.gguf")), stack)
        sizes = {"rounds": case.rounds, "parameters": case.parameters}
        for context in case.contexts:
            rows += decode_rows([*ours, *peers], context=context, tokens=case.tokens, **sizes)
        dense = [c for c in ours if c.mode in ("dense", WHOLE)]
        for tokens in case.prompts:
            # One long prompt says as much as many short ones.
            sizes["rounds"] = max(3, case.rounds * 64 // (tokens + 64))
            rows += prefill_rows([*dense, peers[0]], tokens=tokens, **sizes)
        stack.close()
        if case.start_up:
            start_up(case, paths[case.over_reads[0]])
    return rows


@contextmanager
def _deleted(path: Path) -> Iterator[Path]:
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _ours(case: Case, paths: Mapping[float, Path], plain: Path, stack: ExitStack) -> list[Contender]:
    contenders = []
    length = case.spec.decoder.context_length
    exact = next(iter(paths.values()))
    models = {WHOLE: (plain, "dense"), "dense": (exact, "dense"), "gate": (exact, "gate")}
    models |= {("predicted" if o == 1 else f"predicted × {o}"): (path, "predicted") for o, path in paths.items()}
    for isa in case.isas:
        worker = stack.enter_context(_our_worker(PI_ISA=isa))
        for name, (path, mode) in models.items():
            opened = worker.ask("open_model", name=name, path=str(path), mode=mode, context=length)
            contenders.append(Contender(OURS, case.format, name, opened["isa"], worker, {"name": name}))
    return contenders


def _our_worker(**environment: str) -> Worker:
    return Worker(OURS, "side_by_side.ours", **environment)


def _peers(case: Case, gguf: Path, stack: ExitStack) -> list[Contender]:
    """llama.cpp first, with a file written to `gguf`."""
    decoder, limit_s = case.spec.decoder, case.peer_limit_s
    write_gguf(gguf, decoder, case.format)
    length = decoder.context_length
    peers = [open_peer(LLAMA_CPP, case.format, stack, limit_s=limit_s, path=str(gguf), context=length)]
    if case.transformers and _has_room(case):
        peers.append(open_peer(TRANSFORMERS, "bf16", stack, limit_s=limit_s, shape=asdict(decoder)))
    return peers


def _has_room(case: Case) -> bool:
    """Whether transformers' weights fit beside the mapped files."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, needed = int(meminfo["MemAvailable"].split()[0]) * 1024, case.parameters * 2
    # Files of the other engines stay in the page cache, which counts as available.
    mapped = case.parameters * 2 * (len(case.over_reads) + 1)
    if available - mapped > needed * 1.2:
        return True
    print(f"transformers skipped: {needed / 1e9:.1f} GB of weights, {(available - mapped) / 1e9:.1f} GB free")
    return False


def check(case: Case, folder: Path) -> None:
    """Hold ours against the NumPy reference on two layers. Raises RuntimeError where it computes something else."""
    decoder = replace(case.spec.decoder, n_layers=2, vocab_size=min(case.spec.decoder.vocab_size, 2048))
    with _deleted(folder / "check.pi") as path:
        build(replace(case.spec, decoder=decoder), {1.0: path}, byte_tokenizer())
        for isa in case.isas:
            with _our_worker(PI_ISA=isa) as worker:
                errors = worker.ask("check", path=str(path), tokens=8)
            told = ", ".join(f"{mode} {error:.1e}" for mode, error in errors.items())
            print(f"{case.format} {isa}: relative distance to the reference: {told}", flush=True)
            if not max(errors.values()) <= LARGEST_ERROR:
                raise RuntimeError(f"wrong result: at most {LARGEST_ERROR} expected")


def start_up(case: Case, path: Path) -> None:
    """Print what a fresh process takes to its first token, and what memory it holds beyond the mapped artifact."""
    command = [sys.executable, "-m", "pi_runtime", str(path), "--prompt", "8 tokens", "--max-tokens", "1"]
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    with _our_worker() as worker:
        length = case.spec.decoder.context_length
        worker.ask("open_model", name="", path=str(path), mode="predicted", context=length)
        worker.ask("prefill", name="", tokens=512)
        worker.ask("decode", name="", context=64, tokens=8)
        held = worker.ask("memory")
    # The first process may have had pages to fault in.
    print(
        f"{case.format}: pi-run with a prompt of 8 tokens: {statistics.median(seconds[1:]):.2f} s for the process to",
        end=" ",
    )
    print(f"its first token and end; resident beyond the artifact {held['anonymous'] / 1e6:.0f} MB", end="")
    print(f", with a key-value cache of {held['cache'] / 1e6:.0f} MB", flush=True)
