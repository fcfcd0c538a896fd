"""What skipping costs a model on text it has not seen, rung by rung.

python tests/benchmarks/fidelity.py MODEL --text FOLDER --report FILE [--rungs RUNG,… …] [--work FOLDER]
                                    [--steps N] [--budgets SHARE…] [--figures FILE.json]

Every rung is tried once, in f16. For each set of rungs (beside dense and gate) the choice is then made for several
budgets; the one for the first of them is packed in f16, q8 and q4 and evaluated through the runtime. `--figures`
keeps the numbers, for docs/pictures/fidelity_curves.py to draw.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pi_compile.cli.rendering import print_report
from pi_compile.evaluation.fidelity import evaluate
from pi_compile.files import read_arrays
from pi_compile.machine.profile import find_machine
from pi_compile.packing import PackSpec, pack
from pi_compile.pipeline import summary
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.pipeline.stages import train
from pi_compile.recipe import Recipe, default_recipe
from pi_compile.results.predictor_set import PredictorSet
from pi_runtime import console

FIT_TOKENS, TRAIN_TOKENS, TUNE_TOKENS, TOKENS, WINDOW = 131_072, 32_768, 4096, 8192, 256
BUDGETS = (1e-3, 1e-2, 1e-1)
"""Increases of perplexity that the curves go through; artifacts are made for the first."""
FORMATS = ("f16", "q8", "q4")


def recipe(args: argparse.Namespace, folder: Path) -> Recipe:
    model, text, held_out = (
        Path(os.path.relpath(p.resolve(), folder)).as_posix() for p in (args.model, args.text, args.report)
    )
    data = default_recipe(model, corpus=[text]).model_dump()
    data["corpus"] |= {"report": [held_out], "fit_tokens": FIT_TOKENS}
    data["corpus"] |= {"tune_tokens": TUNE_TOKENS, "report_tokens": TOKENS}
    data["profile"] |= {"window": WINDOW}
    data["train"] |= {"tokens": TRAIN_TOKENS, "steps": args.steps}
    data["place"] |= {"machine": args.machine}
    data["pack"] |= {**dict.fromkeys(("embedding", "attention", "ffn", "head"), "f16"), "predictor": "auto"}
    return Recipe.model_validate(data)


class Bench:
    """One model, its text, and a scratch folder in which every layer is tried once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        path = folder / f"{args.model.resolve().name}.toml"
        path.write_text(recipe(args, folder).to_toml(), encoding="utf-8")
        self.pipeline = Pipeline(path, "cpu", console.say, console.progress)
        self.pipeline.store.folder.mkdir(parents=True, exist_ok=True)
        self.scratch = folder / "layers"
        self.scratch.mkdir(exist_ok=True)

    def trained(self, rungs: Sequence[str], budget: float) -> PredictorSet:
        p = self.pipeline
        with console.progress(f"{' '.join(rungs)} {budget:g}", "steps") as progress:
            return train(
                p.checkpoint,
                p.profile,
                p.streams,
                find_machine(self.args.machine, self.folder),
                tokens=TRAIN_TOKENS,
                steps=p.recipe.train.steps,
                rungs=("dense", "gate", *rungs),
                perplexity_increase=budget,
                window=p.recipe.profile.window,
                formats=p.recipe.pack.model_dump(),
                scratch=self.scratch,
                progress=progress,
            )

    def scored(self, trained: PredictorSet, fmt: str) -> dict[str, Any]:
        """Through the packed file and the runtime."""
        path, p = self.folder / "a.pi", self.pipeline
        formats = {**dict.fromkeys(("embedding", "attention", "ffn", "head"), fmt)}
        spec = PackSpec(formats={**formats, "predictor": trained.predictor_format})
        pack(p.checkpoint, spec, path, recipe={}, profile=trained.refine(p.profile), predictor_set=trained)
        with console.progress("scoring", "windows") as progress:
            return evaluate(path, [self.args.report], None, tokens=TOKENS, window=WINDOW, progress=progress)

    def predictors(self) -> list[dict[str, Any]]:
        """All that were tried, with what they read and lose on the tune text."""
        found = []
        for file in sorted(self.scratch.glob("layer-*.npz")):
            for c in json.loads(str(read_arrays(file, "candidates")["candidates"])):
                layer = {"layer": int(file.stem.split("-")[1]), **c.pop("layer")}
                found.append(layer | c)
        return found


def rows(found: dict[str, Any], name: str, fmt: str) -> list[dict[str, Any]]:
    """Of a set of rungs, and of dense and gate beside it."""
    layers, perplexity, tables = found["layers"], found["perplexity"], []
    exact = abs(perplexity["gate"] / perplexity["dense"] - 1)
    assert exact < 1e-5, f"gate differs from dense by {exact:.1e}"
    for mode in [mode for mode, value in perplexity.items() if value is not None]:
        chosen = mode == "predicted"
        tables.append(
            {
                "rungs": name if chosen else mode,
                "format": fmt,
                "taken": " ".join(layer["rung"][0] for layer in layers) if chosen else "",
                "perplexity": perplexity[mode],
                "increase_percent": 100 * (perplexity[mode] / perplexity["dense"] - 1),
                "agreement": found["agreement"][mode],
                "ffn_bytes": found["ffn_bytes_per_token"][mode],
                "over_gate": found["ffn_bytes_per_token"][mode] / found["ffn_bytes_per_token"]["gate"],
                "tokens_per_s": found["tokens_per_s"][mode],
            }
        )
    return tables


def curve(bench: Bench, rungs: list[str], budgets: list[float]) -> tuple[list[dict[str, Any]], PredictorSet]:
    """Bytes and perplexity that a set of rungs comes to at each budget, and what was chosen for the first."""
    points, kept = [], None
    for budget in budgets:
        trained = bench.trained(rungs, budget)
        assert trained.perplexity["increase"] <= budget
        kept = kept or trained
        figures = summary.train_report(trained)
        points.append({"budget": budget, **figures})
        console.say(f"{rungs} {budget:g}: {figures['ffn_bytes_over_gate']:.3f}, {figures['increase']:+.2e}")
    assert kept is not None
    return points, kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to fit and tune on")
    parser.add_argument("--report", type=Path, required=True, help="to report on")
    parser.add_argument("--rungs", nargs="+", default=["threshold,predicted", "predicted", "threshold"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--machine", default="stand-in")
    parser.add_argument("--work", type=Path, help="kept for the next run")
    parser.add_argument("--figures", type=Path, help="where to keep the numbers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.work or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        bench = Bench(args, folder)
        sets = [s.split(",") for s in args.rungs]
        figures: dict[str, Any] = {"curves": {}, "artifacts": []}
        # What the first set tries in each layer is there for the others.
        for rungs in sorted(sets, key=len, reverse=True):
            name = " ".join(rungs)
            figures["curves"][name], trained = curve(bench, rungs, args.budgets)
            figures["predictors"] = bench.predictors()
            print_report({"layers": [asdict(row) for row in trained.rows]})
            for fmt in FORMATS:
                figures["artifacts"] += rows(bench.scored(trained, fmt), name, fmt)
            print_report({"results": figures["artifacts"]})
            if args.figures:
                args.figures.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
