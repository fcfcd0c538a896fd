"""What quality budgets buy: how much of each is used, whether the report text refused a choice, what a token gains.

nox -s bench -- budget MODEL [--text PATH…] [--report PATH…] [--budgets 0.001,0.01,0.03] [--tokens N] [--window N]
                       [--rungs dense,gate,threshold,predicted] [--machine stand-in] [--turns N] [--work FOLDER]

MODEL is a folder or a GGUF file. The modes of each layer are tried once, and kept in `--work`; then they are chosen for
each budget. Used: what the choice costs on the report text, which is the larger of the increase of perplexity and the
divergence, ÷ the budget. Refused: how many choices the report text refused before. FFN bytes and speeds are ÷ those of
`pack --plain`: bytes that a token reads, and processor time of one thread on the report text in turns (median, least
and most).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile import open_checkpoint, pack, profile, read_corpus, train
from pi_compile.pipeline.packed import pack_model
from pi_compile.pipeline.recipe_checkpoint import proposed_recipe
from pi_compile.recipe import default_recipe
from pi_compile.results import ActivationProfile, PredictorSet
from pi_compile.training import stage
from pi_runtime import Model, console, load
from pi_runtime.artifact.reader import Artifact

FIT_TOKENS = 32_768
PIECE = 16
"""Tokens that are decoded in a turn."""
COLUMNS = "model | budget | used | refused | FFN bytes ÷ plain | speed ÷ plain | layers"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", nargs="+", default=["python"])
    parser.add_argument("--report", nargs="+", default=[], help="by default a part of the text")
    parser.add_argument("--budgets", default="0.001,0.01,0.03")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the tune text, and of the report text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rungs", default="dense,gate,threshold,predicted")
    parser.add_argument("--machine", default="stand-in", help="whose time is made least")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--work", type=Path, help="kept for the next run")
    return parser.parse_args()


class Bench:
    """One model and its text, in a folder in which every layer is tried once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.checkpoint = open_checkpoint(args.model)
        recipe = proposed_recipe(self.checkpoint, str(args.model), default_recipe, console.say)
        self.formats = recipe.pack.model_dump()
        amounts = {"tune_tokens": args.tokens, "report_tokens": args.tokens, "window": args.window}
        self.corpus = read_corpus(self.checkpoint, args.text, report=args.report, fit_tokens=FIT_TOKENS, **amounts)
        counts, self.scratch = folder / "profile.npz", folder / "layers"
        self.scratch.mkdir(exist_ok=True)
        if not counts.exists():
            profile(self.checkpoint, self.corpus.fit, window=args.window, threads=2).save(counts)
        self.profile = ActivationProfile.load(counts)
        self.plain = folder / "plain.pi"
        pack_model(str(args.model), self.plain, progress=console.progress, notice=lambda _line: None)

    def trained(self, budget: float) -> tuple[PredictorSet, int]:
        """The choice for a budget, and how many others the report text refused before."""
        reported, measure = [], stage._Training._measure

        def counted(run: Any, text: Any, chosen: Any) -> Any:
            reported.append(text is run.report)
            return measure(run, text, chosen)

        stage._Training._measure = counted  # type: ignore[method-assign]
        try:
            settings = {"tokens": FIT_TOKENS, "steps": 150, "window": self.args.window, "threads": 2}
            with console.progress(f"budget {budget:g}", "steps") as progress:
                found = train(
                    self.checkpoint, self.profile, self.corpus, self.args.machine, rungs=self.args.rungs.split(","),
                    perplexity_increase=budget, formats=self.formats, scratch=self.scratch, progress=progress,
                    **settings,
                )  # fmt: skip
        finally:
            stage._Training._measure = measure  # type: ignore[method-assign]
        return found, sum(reported) - 1

    def row(self, budget: float) -> dict[str, Any]:
        """A row of the table."""
        trained, refused = self.trained(budget)
        cost = max(trained.perplexity["increase"], trained.perplexity["report_divergence"])
        with Artifact.open(self.plain) as plain:
            ffn = sum(s.nbytes for name, s in plain.manifest.arrays.items() if "/ffn/" in name)
        mixed = all(row.kind.dense for row in trained.rows)
        artifact = self.folder / "chosen.pi"
        kept = {"profile": self.profile, "predictors": trained, "mixed": mixed}
        pack(self.checkpoint, artifact, formats=self.formats, **kept)
        rungs = Counter(row.rung for row in trained.rows)
        return {
            "model": self.args.model.stem,
            "budget": budget,
            "used": cost / budget,
            "refused": refused,
            "bytes": sum(row.ffn_bytes for row in trained.rows) / ffn,
            "speed": ratios(artifact, self.plain, self.corpus.report, self.args.turns),
            "layers": ", ".join(f"{count} {rung}" for rung, count in rungs.most_common()),
        }


def ratios(one: Path, other: Path, ids: np.ndarray, turns: int) -> list[float]:
    """How many times as fast one artifact decodes a text as the other, of each turn; the first turn is left out."""

    def seconds(model: Model, turn: int) -> float:
        cache, piece = model.new_cache(), ids[turn * PIECE : (turn + 1) * PIECE]
        began = time.process_time()
        for token in piece:
            model.decode(int(token), cache)
        return time.process_time() - began

    found = []
    with load(one, threads=1) as a, load(other, threads=1) as b:
        for turn in range(turns + 1):
            own = seconds(a, turn)
            found.append(seconds(b, turn) / own)
    return found[1:]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.work or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench, rows = Bench(args, folder), []
        print(f"| {COLUMNS} |\n|{' --- |' * len(COLUMNS.split('|'))}")
        for budget in map(float, args.budgets.split(",")):
            rows.append(row := bench.row(budget))
            speed = f"{statistics.median(row['speed']):.2f} ({min(row['speed']):.2f} to {max(row['speed']):.2f})"
            shown = f"{budget:.1%} | {row['used']:.2f} | {row['refused']} | {row['bytes']:.3f} | {speed}"
            print(f"| {row['model']} | {shown} | {row['layers']} |", flush=True)
        (folder / "rows.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
