"""What each stage is asked to do, from a recipe's sections."""

from collections.abc import Mapping

from pi_compile.checkpoint.part_formats import AUTO, PREDICTOR_FORMATS
from pi_compile.corpus.streams import CorpusSpec
from pi_compile.cost_model.processors import CPU, units_of
from pi_compile.machine.profile import Machine
from pi_compile.profiling import ProfileSpec
from pi_compile.recipe import Recipe
from pi_compile.training.stage import TrainSpec


def corpus_spec(recipe: Recipe) -> CorpusSpec:
    """Which text."""
    section = recipe.corpus.model_dump()
    return CorpusSpec(**{**section, "text": tuple(section["text"]), "report": tuple(section["report"])})


def profile_spec(recipe: Recipe, device: str) -> ProfileSpec:
    """How it is pushed through."""
    section = recipe.profile
    return ProfileSpec(
        window=section.window,
        batch=section.batch,
        layers_at_once=section.layers_at_once or None,
        cofiring_tokens=section.cofiring_tokens,
        device=device,
    )


def train_spec(recipe: Recipe, formats: Mapping[str, str], machine: Machine, device: str) -> TrainSpec:
    """`formats`: of all parts, resolved; the machine's processor is what rungs are chosen for."""
    section = recipe.train
    tried = PREDICTOR_FORMATS if recipe.pack.predictor == AUTO else (formats["predictor"],)
    return TrainSpec(
        window=recipe.profile.window,
        steps=section.steps,
        perplexity_increase=recipe.quality.perplexity_increase,
        predictor_formats=tried,
        ffn_format=formats["ffn"],
        rungs=tuple(section.rungs),
        processor=units_of(machine)[CPU],
        seed=section.seed,
        device=device,
    )
