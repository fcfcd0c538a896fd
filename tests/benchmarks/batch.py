"""Decode in batches beside llama.cpp, with the neurons that a batch shares, and hold the ratios to their targets.

nox -s bench -- batch [--formats f16,q8,q4] [--batches 1,2,4,8,16,32] [--exponents 0.83,1.5] [--baseline PYTHON]
                      [--rounds N] [--quick] [--json PATH]

A synthetic Llama whose neurons fire at a set density (recipes/demo/sparse_model) decodes batches through the
executor's step, dense and predicted; llama.cpp decodes random weights of the same shape in its own batches. All
sequences of a batch share a context and get pseudo-random tokens of their own. How many neurons the tokens of a batch
share follows from the exponent of the power law of their frequencies: 0.83 as in the other benchmarks, and 1.5, whose
unions grow as those measured of OPT-6.7B (9.5, 15.3, 20.6, 29.0, 39.8 and 51.7 % of a layer for 1 to 32 tokens). The
unions are measured and printed. Before anything is timed, the logits of a batch are held against those of each sequence
alone, bit for bit.

An engine with one request is compared with `Model.generate`. `--baseline` names the Python of another checkout, with
which prompts and single tokens are compared too. Where llama.cpp fails, its rows say how.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from side_by_side.batches import (
    BatchRow,
    PairRow,
    Target,
    batch_rows,
    pair_row,
    print_batch_rows,
    print_pair_rows,
    print_targets,
    targets,
)
from side_by_side.gguf_file import write_gguf
from side_by_side.peers import open_peer
from side_by_side.process import Worker
from side_by_side.rounds import LLAMA_CPP, Contender
from side_by_side.shape import add_shape, decoder_of
from side_by_side.table import print_activity
from sparse_model import Spec, build
from support.synthetic import byte_tokenizer

from pi_runtime.artifact.sizes import PARTS

OURS, CONTEXT = "pi", 64
ENGINE = "one request: engine ÷ generate"
DECODED = "predicted, one token: this ÷ baseline"
PROMPTS = (64, 512)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="f16,q8,q4")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--exponents", default="0.83,1.5")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=3, help="steps of a batch in one round")
    parser.add_argument("--quick", action="store_true", help="three rounds, one exponent, up to 8 sequences")
    parser.add_argument("--baseline", help="the Python of another checkout's environment")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--folder", type=Path, help="for the models, some GB; default: a temporary one")
    parser.add_argument("--predictor-format", default="q4")
    parser.add_argument("--peer-limit", type=float, default=600, metavar="SECONDS")
    add_shape(parser)
    a = parser.parse_args()
    if a.quick:
        a.rounds, a.exponents, a.batches = 3, "1.5", "1,2,4,8"
    return a


class Case:
    """One format: its artifacts and engines, opened."""

    def __init__(self, a: argparse.Namespace, fmt: str, folder: Path, stack: ExitStack) -> None:
        self.a, self.format = a, fmt
        self.batches = sorted({int(b) for b in a.batches.split(",")})
        decoder, paths = decoder_of(a), {}
        formats = {**dict.fromkeys(PARTS, fmt), "predictor": a.predictor_format}
        for exponent in map(float, a.exponents.split(",")):
            paths[exponent] = path = folder / f"{exponent}.pi"
            spec = Spec(decoder=decoder, formats=formats, density=a.density, rank=a.rank, exponent=exponent)
            print_activity(f"{fmt}, exponent {exponent:g}", build(spec, {1.0: path}, byte_tokenizer())[1.0])
        worker = stack.enter_context(Worker(OURS, "side_by_side.ours"))
        modes = {"dense": ("dense", next(iter(paths.values())))}
        modes |= {f"predicted {exponent:g}": ("predicted", path) for exponent, path in paths.items()}
        self.ours = [self._open(worker, name, *found) for name, found in modes.items()]
        write_gguf(folder / "peer.gguf", decoder, fmt)
        positions = CONTEXT + max(self.batches) * (a.tokens + 1)
        self.peer = open_peer(
            LLAMA_CPP, fmt, stack, limit_s=a.peer_limit,
            path=str(folder / "peer.gguf"), context=positions, sequences=max(self.batches),
        )  # fmt: skip
        self.baseline: list[Contender] = []
        if a.baseline:
            other = stack.enter_context(Worker("baseline", "side_by_side.ours", python=a.baseline))
            # The modes without an exponent's name come first: dense, then the first artifact's predicted one.
            self.baseline = [self._open(other, name, *found) for name, found in list(modes.items())[:2]]

    def _open(self, worker: Worker, name: str, mode: str, path: Path) -> Contender:
        context = decoder_of(self.a).context_length
        opened = worker.ask("open_model", name=name, path=str(path), mode=mode, context=context)
        return Contender(OURS, self.format, name, opened["isa"], worker, {"name": name})

    def batch_rows(self) -> list[BatchRow]:
        """Every mode and llama.cpp at every batch. Raises RuntimeError where a batch changes what is computed."""
        for c in self.ours:
            batch = max(self.batches)
            if changed := c.worker.ask("changed_by_company", batch=batch, context=CONTEXT, **c.options):
                raise RuntimeError(f"{c.format}, {c.mode}: {changed} of {batch} sequences get other logits than alone")
        shares = {
            c.mode: c.worker.ask("shares", batches=self.batches, context=CONTEXT, steps=2, **c.options)
            for c in self.ours
            if c.mode != "dense"
        }
        sizes = {"context": CONTEXT, "tokens": self.a.tokens, "rounds": self.a.rounds}
        return batch_rows([*self.ours, self.peer], self.batches, shares, **sizes)

    def pair_rows(self) -> list[PairRow]:
        """The engine beside `generate`; with a baseline also prompts and single tokens."""
        dense, predicted, rounds = *self.ours[:2], self.a.rounds
        engine, alone = (replace(predicted, options={**predicted.options, "engine": on}) for on in (True, False))
        rows = [pair_row(ENGINE, engine, alone, _answer, rounds)]
        if self.baseline:
            rows.append(pair_row(DECODED, predicted, self.baseline[1], _decode, rounds))
            for tokens in PROMPTS:
                own, base = (replace(c, options={**c.options, "tokens": tokens}) for c in (dense, self.baseline[0]))
                rows.append(pair_row(_prompt(tokens), own, base, _prefill, max(3, rounds * 64 // (tokens + 64))))
        return rows


def _prompt(tokens: int) -> str:
    return f"prompt of {tokens}: this ÷ baseline"


def _answer(c: Contender) -> float:
    return float(32 / c.worker.ask("answer", tokens=32, **c.options)["seconds"])


def _decode(c: Contender) -> float:
    found = c.worker.ask("decode", context=CONTEXT, tokens=8, **c.options)
    return 1 / statistics.median(found["seconds"])


def _prefill(c: Contender) -> float:
    return float(c.options["tokens"] / c.worker.ask("prefill", **c.options)["seconds"])


def main() -> None:
    a = arguments()
    rows: list[BatchRow] = []
    pairs: list[PairRow] = []
    held: list[Target] = []
    for fmt in a.formats.split(","):
        with tempfile.TemporaryDirectory(dir=a.folder) as folder, ExitStack() as stack:
            case = Case(a, fmt, Path(folder), stack)
            own_rows = case.batch_rows()
            print_batch_rows(own_rows)
            own_pairs = case.pair_rows()
            print_pair_rows(own_pairs)
        rows, pairs = rows + own_rows, pairs + own_pairs
        wanted = {ENGINE: 0.97, DECODED: 0.97, **{_prompt(tokens): 1.0 for tokens in PROMPTS}}
        held = list(targets(rows, pairs, wanted))
        if a.json:
            found = {"rows": rows, "pairs": pairs, "targets": held}
            told = {name: [asdict(value) for value in values] for name, values in found.items()}
            a.json.write_text(json.dumps(told, indent=1) + "\n")
    print_targets(held)


if __name__ == "__main__":
    main()
