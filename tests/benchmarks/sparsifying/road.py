"""From a folder to tokens: `init`, `build` and `eval`, before and after a model is made sparse."""

import json
from pathlib import Path
from typing import Any

from pi_compile.corpus import documents
from pi_compile.evaluation.fidelity import evaluate
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.recipe import Recipe, default_recipe
from pi_compile.sparsification.data import REPORT, passages_of
from pi_runtime import console


def held_out_file(text: list[str], folder: Path, characters: int = 200_000) -> Path:
    """A file of passages that no arm trains on."""
    path = folder / "held-out.txt"
    if not path.exists():
        passages = (
            p for document in documents(text, folder, "text") for p, _ in passages_of(document, frozenset({REPORT}))
        )
        found = ""
        while len(found) < characters and (passage := next(passages, None)):
            found += passage + "\n"
        path.write_text(found, encoding="utf-8")
    return path


def built(model: Path, text: list[str], folder: Path, rungs: list[str]) -> Path:
    """The artifact of a model, built unless it is there."""
    artifact = folder / f"{model.name}.pi"
    if artifact.exists():
        return artifact
    data = default_recipe(str(model.resolve()), corpus=text).model_dump()
    data["corpus"] |= {"fit_tokens": 131_072, "tune_tokens": 8_192, "report_tokens": 16_384}
    data["profile"] |= {"window": 128}
    data["train"] |= {"tokens": 32_768, "rungs": rungs}
    data["pack"] |= dict.fromkeys(("embedding", "attention", "ffn", "head"), "f16") | {"predictor": "auto"}
    recipe = folder / f"{model.name}.build.toml"
    recipe.write_text(Recipe.model_validate(data).to_toml())
    pipeline = Pipeline(recipe, "cpu", console.say, console.progress)
    with pipeline.worker:
        pipeline.pack(artifact)
    return artifact


def measured(artifact: Path, held_out: Path) -> dict[str, Any]:
    """Perplexity, FFN bytes and tokens a second of each mode."""
    found = evaluate(artifact, [held_out], tokens=4096, window=128)
    names = ("perplexity", "ffn_bytes_per_token", "tokens_per_s")
    return json.loads(json.dumps({name: found[name] for name in names}))
