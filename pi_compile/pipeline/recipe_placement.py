"""Placing a recipe from committed files alone: recipe, activations, machine profile. No model, no torch, no network."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pi_compile.checkpoint.part_formats import resolve_formats
from pi_compile.cost_model.default_rungs import untrained_layers
from pi_compile.cost_model.workload import Workload
from pi_compile.errors import RecipeError
from pi_compile.machine.profile import Machine, find_machine
from pi_compile.placement.activation_file import Activations
from pi_compile.placement.stage import Placement, in_bytes, ladder, ram_of
from pi_compile.planning.forecast import PlanSpec, firing_of
from pi_compile.planning.model_config import find_planned
from pi_compile.recipe import PUBLISHED, PlaceSection, Recipe, read_recipe


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What came of it, and digests of what went in."""

    inputs: dict[str, str]
    placements: tuple[Placement, ...]


def names_activations(path: Path) -> bool:
    """Whether a recipe can be placed without its model."""
    return bool(read_recipe(path).place.activations)


def place_recipe(path: Path) -> Placed:
    """The placements of a recipe that names its activations. Raises RecipeError where it names none."""
    recipe, folder = read_recipe(path), path.resolve().parent
    machine = find_machine(recipe.place.machine, folder)
    work, source = _workload(recipe, folder, machine)
    sections = {"place": recipe.place.model_dump(), "pack": recipe.pack.model_dump()}
    return Placed(
        inputs={
            "recipe": _digest(sections),
            "activations": source,
            "machine": _digest(machine.model_dump()),
        },
        placements=place_section(work, machine, recipe.place),
    )


def place_section(work: Workload, machine: Machine, section: PlaceSection) -> tuple[Placement, ...]:
    """Placements for the budgets of a recipe's [place]."""
    budgets = [in_bytes(gib) for gib in section.vram_gib]
    return ladder(work, machine, budgets, ram=ram_of(machine, section.ram_gib), objective=section.objective)


def _workload(recipe: Recipe, folder: Path, machine: Machine) -> tuple[Workload, str]:
    """The model's work, and the digest of what it was read from."""
    section = recipe.place
    if not section.activations:
        raise RecipeError(
            '[place] activations = "": no activations to place from',
            expected=f"an activation file, or {PUBLISHED!r} for a model whose published curve comes with us",
            remedy="pi-compile train RECIPE --export FILE, then activations = FILE",
        )
    if section.activations == PUBLISHED:
        return _published(recipe, folder, machine)
    found = Activations.load(folder / section.activations)
    work = Workload(
        shape=found.shape,
        formats=resolve_formats(found.formats, recipe.pack.model_dump(), tied_head=found.shape.tied_head),
        tokens=found.tokens,
        counts=found.ordered_counts(),
        routed=found.routed,
        layers=found.layers() or untrained_layers(found.shape),
        context=min(section.context, found.shape.context_length),
    )
    return work, found.digest()


def _published(recipe: Recipe, folder: Path, machine: Machine) -> tuple[Workload, str]:
    """From the model's config and its published curve, with ranks by rule."""
    model = find_planned(recipe.model.path, folder)
    formats = model.formats(recipe.pack.model_dump())
    context = min(recipe.place.context, model.shape.context_length)
    firing = firing_of(PlanSpec(model=model, machine=machine, formats=formats, context=context, vram=0, ram=0))
    work = Workload(
        shape=model.shape,
        formats=formats,
        tokens=firing.tokens,
        counts=firing.counts,
        routed=firing.routed,
        layers=untrained_layers(model.shape),
        context=context,
    )
    digest = hashlib.sha256(f"{firing.source} {firing.tokens}".encode() + work.counts.astype("<i8").tobytes())
    return work, digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
