"""What skipping costs a model on text it has not seen, rung by rung: the tables and curves of docs/fidelity.md.

python tests/benchmarks/fidelity.py MODEL --text FOLDER --report FILE [--rungs RUNG,… …] [--formats FMT…]
                                    [--work FOLDER] [--figures FILE.json]

For each number format and each set of rungs (beside dense and gate) the recipe's road from profile to artifact, and the
artifact's evaluation. `--figures` adds what the rungs cost at larger budgets, and recall by rank, as numbers to draw.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi_compile import report
from pi_compile.array_file import read_arrays
from pi_compile.building import Pipeline
from pi_compile.evaluation import evaluate
from pi_compile.machine_file import find_machine
from pi_compile.recipe import Recipe, default_recipe
from pi_compile.stage_specs import train_spec
from pi_compile.training import Texts, train_predictors
from pi_runtime import console

FIT_TOKENS, TRAIN_TOKENS, TUNE_TOKENS, TOKENS, WINDOW = 131_072, 32_768, 8192, 16_384, 256
BUDGETS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Increases of perplexity that the curves go through."""


def recipe(args: argparse.Namespace, folder: Path, rungs: list[str], fmt: str, budget: float) -> Recipe:
    model, text, held_out = (
        Path(os.path.relpath(p.resolve(), folder)).as_posix() for p in (args.model, args.text, args.report)
    )
    data = default_recipe(model, corpus=[text]).model_dump()
    data["corpus"] |= {"report": [held_out], "fit_tokens": FIT_TOKENS}
    data["corpus"] |= {"tune_tokens": TUNE_TOKENS, "report_tokens": TOKENS}
    data["profile"] |= {"window": WINDOW}
    data["train"] |= {"tokens": TRAIN_TOKENS, "rungs": ["dense", "gate", *rungs]}
    data["quality"] |= {"perplexity_increase": budget}
    data["place"] |= {"machine": args.machine}
    data["pack"] |= {**dict.fromkeys(("embedding", "attention", "ffn", "head"), fmt), "predictor": "auto"}
    return Recipe.model_validate(data)


def pipeline_of(args: argparse.Namespace, folder: Path, rungs: list[str], fmt: str, budget: float) -> Pipeline:
    path = folder / f"{args.model.resolve().name}.toml"
    path.write_text(recipe(args, folder, rungs, fmt, budget).to_toml(), encoding="utf-8")
    pipeline = Pipeline(path, "cpu", console.say, console.progress)
    pipeline.store.folder.mkdir(parents=True, exist_ok=True)
    return pipeline


def build(args: argparse.Namespace, folder: Path, rungs: list[str], fmt: str, budget: float) -> Pipeline:
    pipeline = pipeline_of(args, folder, rungs, fmt, budget)
    with pipeline.store.exclusive(console.say):
        pipeline.pack(pipeline.recipe_path.with_suffix(".pi"))
    assert pipeline.trained.perplexity["increase"] <= budget
    return pipeline


def scored(args: argparse.Namespace, pipeline: Pipeline) -> dict[str, Any]:
    """Through the packed file and the runtime."""
    with console.progress("scoring", "windows") as progress:
        return evaluate(
            pipeline.recipe_path.with_suffix(".pi"),
            [args.report],
            None,
            tokens=TOKENS,
            window=WINDOW,
            progress=progress,
        )


def rows(found: dict[str, Any], pipeline: Pipeline, name: str, fmt: str) -> list[dict[str, Any]]:
    """Of a set of rungs, and of dense and gate beside it."""
    layers, tables = found["layers"], []
    exact = abs(found["perplexity"]["gate"] / found["perplexity"]["dense"] - 1)
    assert exact < 1e-5, f"gate differs from dense by {exact:.1e}"
    for mode, perplexity in found["perplexity"].items():
        if perplexity is not None:
            tables.append(
                {
                    "rungs": name if mode == "predicted" else mode,
                    "format": fmt,
                    "predictor": pipeline.trained.predictor_format,
                    "taken": " ".join(layer["rung"][0] for layer in layers) if mode == "predicted" else "",
                    "density": sum(layer["density"] for layer in layers) / len(layers),
                    "read_over_active": sum(layer["rows_read_over_active"] for layer in layers) / len(layers)
                    if mode == "predicted"
                    else None,
                    "perplexity": perplexity,
                    "increase_percent": 100 * (perplexity / found["perplexity"]["dense"] - 1),
                    "agreement": found["agreement"][mode] if mode != "dense" else None,
                    "ffn_bytes": found["ffn_bytes_per_token"][mode],
                    "tokens_per_s": found["tokens_per_s"][mode],
                }
            )
    return tables


def curves(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Bytes and perplexity that each set of rungs comes to at each budget, in f16; predictors are trained once."""
    every = sorted({rung for rungs in args.rungs for rung in rungs.split(",")})
    pipeline = pipeline_of(args, folder, every, "f16", BUDGETS[0])
    streams = pipeline.streams
    texts = Texts(fit=streams.fit[:TRAIN_TOKENS], tune=streams.tune, report=streams.report)
    machine = find_machine(args.machine, folder)
    spec = train_spec(pipeline.recipe, pipeline.checkpoint_formats, machine, "cpu")
    scratch = folder / "curves"
    scratch.mkdir(exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for rungs in sorted(args.rungs, key=lambda r: -r.count(",")):
        for budget in BUDGETS:
            allowed = replace(spec, rungs=("dense", "gate", *rungs.split(",")), perplexity_increase=budget)
            with console.progress(f"{rungs} {budget:g}", "steps") as progress:
                trained = train_predictors(
                    pipeline.checkpoint, pipeline.profile, texts, allowed, scratch=scratch, inputs="", progress=progress
                )
            read, gate = (sum(getattr(row, k) for row in trained.rows) for k in ("ffn_bytes", "gate_bytes"))
            found.setdefault(rungs, []).append(
                {
                    "budget": budget,
                    "bytes_over_gate": read / gate,
                    **{k: trained.perplexity[k] for k in ("increase", "standard_error", "report_divergence")},
                    "format": trained.predictor_format,
                    "rungs": [row.rung for row in trained.rows],
                    "ranks": [row.rank for row in trained.rows],
                }
            )
            console.say(f"{rungs}: {found[rungs][-1]}")
    return found


def recall_by_rank(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Of the predictors that `curves` trained, at the threshold that loses 0.1 % of the energy: what they read."""
    found = []
    for file in sorted((folder / "curves").glob("layer-*.npz")):
        for c in json.loads(str(read_arrays(file, "candidates")["candidates"])):
            if c["rung"] == "predicted":
                reads = {k: c["reads"][k] for k in ("predictor", "first", "rest")}
                keys = ("rank", "trained", "format", "threshold", "error")
                found.append({"layer": int(file.stem.split("-")[1]), **{k: c[k] for k in keys}, **reads})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to fit and tune on")
    parser.add_argument("--report", type=Path, required=True, help="to report on")
    parser.add_argument("--rungs", nargs="+", default=["predicted", "sign", "threshold", "threshold,predicted,sign"])
    parser.add_argument("--formats", nargs="+", default=["f16", "q8", "q4"])
    parser.add_argument("--machine", default="stand-in")
    parser.add_argument("--work", type=Path, help="kept for the next run")
    parser.add_argument("--figures", type=Path, help="numbers for docs/fidelity_curves.py, instead of the tables")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.work or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        if args.figures:
            found = {"curves": curves(args, folder), "predictors": recall_by_rank(args, folder)}
            args.figures.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            return
        for fmt in args.formats:
            for rungs in args.rungs:
                pipeline = build(args, folder, rungs.split(","), fmt, 0.001)
                found = scored(args, pipeline)
                report.print_report({"results": rows(found, pipeline, rungs, fmt), "layers": found["layers"]})


if __name__ == "__main__":
    main()
