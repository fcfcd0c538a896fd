"""Build a model's artifact and say what skipping costs on text it has not seen: the tables of docs/fidelity.md.

python tests/benchmarks/fidelity.py MODEL --text FOLDER --report FILE [--work FOLDER]
"""

import argparse
import os
import tempfile
from pathlib import Path

from pi_compile import report
from pi_compile.building import Pipeline
from pi_compile.evaluation import evaluate
from pi_compile.recipe import Recipe, default_recipe
from pi_runtime import console

FIT_TOKENS, TOKENS, WINDOW = 262_144, 32_768, 256


def recipe(args: argparse.Namespace, folder: Path) -> Recipe:
    model, text, held_out = (
        Path(os.path.relpath(p.resolve(), folder)).as_posix() for p in (args.model, args.text, args.report)
    )
    data = default_recipe(model, corpus=[text]).model_dump()
    data["corpus"] |= {"report": [held_out], "fit_tokens": FIT_TOKENS}
    data["place"] |= {"machine": "stand-in"}
    return Recipe.model_validate(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to fit and tune on")
    parser.add_argument("--report", type=Path, required=True, help="to report on")
    parser.add_argument("--work", type=Path, help="kept for the next run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.work or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        path = folder / f"{args.model.resolve().name}.toml"
        path.write_text(recipe(args, folder).to_toml(), encoding="utf-8")
        pipeline = Pipeline(path, "cpu", console.say, console.progress)
        with pipeline.store.exclusive(console.say):
            pipeline.pack(path.with_suffix(".pi"))
        report.print_report(report.train_report(pipeline.trained))
        with console.progress("scoring", "windows") as progress:
            found = evaluate(
                path.with_suffix(".pi"), [args.report], args.model, tokens=TOKENS, window=WINDOW, progress=progress
            )
    report.print_report(report.eval_report(found))
    perplexity, ffn = found["perplexity"], found["ffn_bytes_per_token"]
    exact = abs(perplexity["gate"] / perplexity["dense"] - 1)
    assert exact < 1e-5, f"gate differs from dense by {exact:.1e}"
    if "predicted" in perplexity:
        change = perplexity["predicted"] / perplexity["dense"] - 1
        print(f"predicted against dense: perplexity {100 * change:+.3f} % (limit +0.100 %)")
        print(f"FFN bytes, predicted ÷ gate: {ffn['predicted'] / ffn['gate']:.3f} (limit 0.800)")


if __name__ == "__main__":
    main()
