"""Placing a recipe from committed files alone: recipe, activation profile and machine. No model, torch or network."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pi_compile.checkpoint.part_formats import resolve_formats
from pi_compile.cost_model import Workload
from pi_compile.errors import RecipeError
from pi_compile.machine import Machine, find_machine
from pi_compile.placement import SECONDS, SOLVERS, Placement, Problem, in_bytes, ladder, ram_of
from pi_compile.planning import find_planned, published_profile
from pi_compile.recipe import PUBLISHED, PlaceSection, Recipe, read_recipe
from pi_compile.results import ActivationProfile
from pi_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The placements of a recipe, and digests of what they were computed from."""

    inputs: dict[str, str]
    """Digest of each input, by its name in a lock."""
    placements: tuple[Placement, ...]


def names_activations(path: Path) -> bool:
    """Whether a recipe can be placed without its model."""
    return bool(read_recipe(path).place.activations)


@dataclass(frozen=True, kw_only=True)
class Solving:
    """How a placement is solved; see `placement.stage.place`."""

    solver: str = "exact"
    seconds: float = SECONDS


def solving(solver: str, seconds: float, *, locks: bool) -> Solving:
    """The solver of these flags. Raises UsageError for one that is not known, or that no lock is made with."""
    if solver not in SOLVERS:
        raise UsageError(f"--solver {solver}: unknown solver", expected=", ".join(SOLVERS))
    if locks and solver != "exact":
        raise UsageError(
            f"--solver {solver}: a lock holds the answer of the exact solver, whose ties are by rule",
            remedy="leave --solver out, or --lock and --locked",
        )
    return Solving(solver=solver, seconds=seconds)


def place_recipe(path: Path, how: Solving = Solving()) -> Placed:
    """The placements of a recipe that names its activations. Raises RecipeError where it names none."""
    recipe, folder = read_recipe(path), path.resolve().parent
    machine = find_machine(recipe.place.machine, folder)
    work, source = _workload(recipe, folder)
    sections = {"place": recipe.place.model_dump(), "pack": recipe.pack.model_dump()}
    return Placed(
        inputs={
            "recipe": _digest(sections),
            "activations": source,
            "machine": _digest(machine.model_dump()),
        },
        placements=place_section(work, machine, recipe.place, how),
    )


def place_section(
    work: Workload, machine: Machine, section: PlaceSection, how: Solving = Solving()
) -> tuple[Placement, ...]:
    """Placements for the budgets of a recipe's [place]."""
    return ladder(
        Problem.of(work, machine),
        [in_bytes(gib) for gib in section.vram_gib],
        ram=ram_of(machine, section.ram_gib),
        objective=section.objective,
        solver=how.solver,
        seconds=how.seconds,
    )


def _workload(recipe: Recipe, folder: Path) -> tuple[Workload, str]:
    """The model's workload, and the digest of what it was read from."""
    section = recipe.place
    if not section.activations:
        raise RecipeError(
            '[place] activations = "": no activations to place from',
            expected=f"an activation profile, or {PUBLISHED!r} for a model whose published curve is bundled",
            remedy="pi-compile train RECIPE --export FILE, then activations = FILE",
        )
    if section.activations == PUBLISHED:
        return _published(recipe, folder)
    profile = ActivationProfile.load(folder / section.activations)
    formats = resolve_formats(profile.formats, recipe.pack.model_dump(), tied_head=profile.decoder.tied_head)
    return Workload.of(profile, formats, section.context), profile.placing_digest()


def _published(recipe: Recipe, folder: Path) -> tuple[Workload, str]:
    """The workload by the model's config and its published curve, with ranks by rule."""
    model = find_planned(recipe.model.path, folder, recipe.model.ignore_config, in_recipe=True)
    profile = published_profile(model)
    work = Workload.of(profile, model.formats(recipe.pack.model_dump()), recipe.place.context)
    digest = hashlib.sha256(f"{profile.source} {profile.tokens}".encode() + work.counts.astype("<i8").tobytes())
    return work, digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
