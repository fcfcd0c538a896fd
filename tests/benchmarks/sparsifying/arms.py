"""The arms of the benchmark: the same model trained on the same tokens, each in its way."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from pi_compile.sparsification.checkpoints import Checkpoints
from pi_compile.sparsification.data import open_mixture, read_evaluation_text
from pi_compile.sparsification.evaluation import evaluate
from pi_compile.sparsification.model import load_model, open_base, packing_of
from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_compile.sparsification.run import sparsify
from pi_compile.sparsification.training import Training, Watch
from sparsifying.base import recipe_of

CONTROL = "control"
RATE = {"learning_rate": 5e-4, "final_learning_rate": 5e-6}


@dataclass(frozen=True)
class Result:
    """What came of an arm with one seed."""

    arm: str
    seed: int
    perplexity: float
    base: float
    """Perplexity of the base model."""
    sparsity: float
    dead: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What the arms share."""

    folder: Path
    text: list[str]
    steps: int
    watch: Watch

    def recipe(self, arm: str, seed: int) -> SparsifyRecipe:
        """The recipe of an arm: `relu`, `drelu`, `progressive-λ`, `constant-λ`, `steered-S` or `fatrelu-S`.

        λ is the last weight of the penalty, S the wanted sparsity in percent. An arm begins with `drelu-` where it is
        not of ReLU, and ends with `-kl` where the original's predictions are learned from too.
        """
        data = recipe_of("base", self.text, self.steps, seed=seed, **RATE).model_dump()
        name = arm.removesuffix("-kl")
        data["train"]["distillation"] = float(name != arm)
        data["run"]["control"] = False
        data["target"]["activation"] = next((a for a in ("drelu", "fatrelu") if name.startswith(a)), "relu")
        kind, _, value = name.removeprefix("drelu-").partition("-")
        match kind:
            case "steered" | "fatrelu":
                data["steer"]["sparsity"] = float(value) / 100
            case "constant":
                data["stages"] = [{"steps": self.steps, "penalty": float(value), "curve": "constant"}]
            case "progressive":
                data["stages"] = progressive(self.steps, float(value))
        return SparsifyRecipe.model_validate(data)

    def run(self, arm: str, seed: int) -> Result:
        """An arm's result, computed unless it is there."""
        path = self.folder / "results" / f"{arm}-seed{seed}-steps{self.steps}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            found = self._control(seed) if arm == CONTROL else self._sparsified(arm, seed)
            path.with_suffix(".part").write_text(json.dumps(found))
            path.with_suffix(".part").rename(path)
        return Result(arm, seed, **json.loads(path.read_text()))

    def output(self, arm: str, seed: int) -> Path:
        """The folder that an arm makes."""
        return self.folder / f"{arm}-seed{seed}-steps{self.steps}"

    def _sparsified(self, arm: str, seed: int) -> dict[str, Any]:
        output = self.output(arm, seed)
        if not output.exists():
            recipe = self.folder / f"{output.name}.toml"
            recipe.write_text(self.recipe(arm, seed).to_toml())
            sparsify(recipe, output, watch=self.watch)
        found = json.loads((output / "sparsify.json").read_text())
        return {
            "perplexity": found["perplexity"]["model"],
            "base": found["perplexity"]["base"],
            **{name: found[name] for name in ("sparsity", "dead", "tokens", "seconds")},
        }

    def _control(self, seed: int) -> dict[str, Any]:
        recipe = recipe_of("base", self.text, self.steps, seed=seed, **RATE)
        checkpoint = open_base(recipe.model, self.folder)
        packing, accelerator = packing_of(checkpoint, recipe.train.window), Accelerator(cpu=True)
        texts = read_evaluation_text(recipe.corpus, self.folder, packing)
        base = evaluate(accelerator, load_model(checkpoint), None, texts.held_out)
        training = Training(
            recipe,
            accelerator,
            load_model(checkpoint),
            None,
            open_mixture(recipe.corpus, self.folder, texts.left_out(packing), seed),
            texts,
            Checkpoints(self.folder / f"{CONTROL}-seed{seed}-steps{self.steps}", accelerator),
            watch=self.watch,
            name=CONTROL,
        )
        trained = training.run()
        found = training.evaluate(tune=False)
        accelerator.free_memory()
        return {
            "perplexity": found.perplexity,
            "base": base.perplexity,
            "sparsity": 0.0,
            "dead": 0.0,
            "tokens": trained.tokens,
            "seconds": trained.seconds,
        }


def progressive(steps: int, weight: float) -> list[dict[str, Any]]:
    """ProSparse's stages: without a penalty, then to a tenth, a third and all of it in sine steps."""
    parts = ((0.1, 0.0, "constant"), (0.2, 0.1, "sine"), (0.3, 0.3, "sine"))
    stages = [{"steps": round(steps * p), "penalty": weight * w, "curve": c} for p, w, c in parts]
    rest = steps - sum(stage["steps"] for stage in stages)
    return [*stages, {"steps": rest, "penalty": weight, "curve": "sine"}]


def table(results: Sequence[Result]) -> str:
    """A row for each arm, with its perplexity over the control's of the same seed and a 95 % interval over seeds."""
    controls = {r.seed: r.perplexity for r in results if r.arm == CONTROL}
    lines = [
        "| arm | seeds | sparsity, % | never fired, % | perplexity | ÷ base | ÷ control | 95 % interval |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in dict.fromkeys(r.arm for r in results):
        own = [r for r in results if r.arm == arm]
        ratios = np.array([r.perplexity / controls[r.seed] for r in own if r.seed in controls])
        cells = [
            arm,
            " ".join(str(r.seed) for r in own),
            f"{100 * np.mean([r.sparsity for r in own]):.1f}",
            f"{100 * np.mean([r.dead for r in own]):.1f}",
            f"{np.mean([r.perplexity for r in own]):.3f}",
            f"{np.mean([r.perplexity / r.base for r in own]):.4f}",
            f"{ratios.mean():.4f}" if len(ratios) else "–",
            _interval(ratios),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(ratios: np.ndarray[Any, Any]) -> str:
    from scipy import stats

    if len(ratios) < 2 or not math.isfinite(spread := stats.sem(ratios)) or not spread:
        return "–"
    margin = stats.t.ppf(0.975, len(ratios) - 1) * spread
    return f"{ratios.mean() - margin:.4f} to {ratios.mean() + margin:.4f}"
