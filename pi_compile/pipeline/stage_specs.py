"""Specs of the stages, from the sections of a recipe."""

from collections.abc import Mapping

from pi_compile.checkpoint.part_formats import AUTO, PREDICTOR_FORMATS
from pi_compile.corpus import CorpusSpec
from pi_compile.cost_model import CPU, processors_of
from pi_compile.machine import Machine
from pi_compile.profiling import ProfileSpec
from pi_compile.recipe import Recipe
from pi_compile.training import TrainSpec


def corpus_spec(recipe: Recipe) -> CorpusSpec:
    """The text to read and how it is divided."""
    section = recipe.corpus.model_dump()
    return CorpusSpec(**{**section, "text": tuple(section["text"]), "report": tuple(section["report"])})


def profile_spec(recipe: Recipe, device: str) -> ProfileSpec:
    """How text is pushed through the model to count activations."""
    section = recipe.profile
    return ProfileSpec(
        window=section.window,
        batch=section.batch,
        layers_at_once=section.layers_at_once or None,
        cofiring_tokens=section.cofiring_tokens,
        device=device,
    )


def train_spec(recipe: Recipe, formats: Mapping[str, str], machine: Machine, device: str) -> TrainSpec:
    """How predictors are trained, and rungs chosen for the machine's CPU; `formats` has all parts, resolved."""
    section = recipe.train
    tried = PREDICTOR_FORMATS if recipe.pack.predictor == AUTO else (formats["predictor"],)
    return TrainSpec(
        window=recipe.profile.window,
        steps=section.steps,
        perplexity_increase=recipe.quality.perplexity_increase,
        predictor_formats=tried,
        ffn_format=formats["ffn"],
        rungs=tuple(section.rungs),
        processor=processors_of(machine)[CPU],
        seed=section.seed,
        device=device,
    )
