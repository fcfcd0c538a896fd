"""What a recipe says of a worker's work: settings of training, and about the memory that it takes."""

from typing import Any

from pi_compile.calibration import profiling, quantising
from pi_compile.recipe import Recipe
from pi_compile.training import TrainingWork, TrainSpec
from pi_runtime.artifact.decoder import Decoder


def train_settings(recipe: Recipe) -> dict[str, Any]:
    """Keywords of `stages.train_spec` that a recipe has."""
    return {
        **recipe.train.model_dump(exclude={"tokens"}),
        "perplexity_increase": recipe.quality.perplexity_increase,
        "window": recipe.profile.window,
        "threads": recipe.profile.threads,
        "formats": recipe.pack.model_dump(),
    }


def worker_memory(recipe: Recipe, d: Decoder, spec: TrainSpec) -> int:
    """About the memory of one worker in the stage that takes most."""
    profile, corpus = recipe.profile, recipe.corpus
    counting = profiling.ProfileSpec(
        window=profile.window, batch=profile.batch, layers_at_once=profile.layers_at_once or None
    )
    tokens = (recipe.train.tokens, corpus.tune_tokens, corpus.report_tokens)
    rounding = quantising.QuantiseSpec(window=profile.window, batch=profile.batch, formats={})
    return max(
        profiling.memory_bytes(d, counting),
        quantising.memory_bytes(d, rounding) if recipe.quantise.tokens else 0,
        TrainingWork.of(d, spec, 0.3, *tokens).memory_bytes,
    )
