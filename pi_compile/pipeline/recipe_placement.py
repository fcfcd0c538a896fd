"""Placing a recipe from committed files alone: recipe, activation profile and machine. No model, torch or network."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pi_compile.checkpoint.part_formats import resolve_formats
from pi_compile.cost_model import Workload
from pi_compile.errors import RecipeError
from pi_compile.files import json_digest
from pi_compile.machine import Machine, find_machine, in_bytes
from pi_compile.placement import SECONDS, SOLVERS, Placement, Problem, ladder
from pi_compile.planning import find_planned, published_profile
from pi_compile.recipe import PUBLISHED, Recipe, read_recipe
from pi_compile.results import ActivationProfile
from pi_runtime.errors import Setting, UsageError


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The placements of a recipe, and digests of what they were computed from."""

    inputs: dict[str, str]
    """Digest of each input, by its name in a lock."""
    placements: tuple[Placement, ...]


def check_solver(solver: str, *, locks: bool) -> None:
    """Raise UsageError for an unknown solver, and for one that cannot make a lock."""
    if solver not in SOLVERS:
        raise UsageError("unknown solver", setting=Setting("solver", solver), expected=", ".join(SOLVERS))
    if locks and solver != "exact":
        raise UsageError(
            "a lock holds the answer of the exact solver, whose ties are by rule",
            setting=Setting("solver", solver),
            remedy=("leave ", Setting("solver"), " out, or ", Setting("lock"), " and ", Setting("locked")),
        )


def place_recipe(path: Path, solver: str = "exact", seconds: float = SECONDS) -> Placed:
    """The placements of a recipe that names its activations. Raises RecipeError where it names none."""
    recipe, folder = read_recipe(path), path.resolve().parent
    machine = find_machine(recipe.place.machine, folder)
    work, source = _workload(recipe, folder)
    sections = {"place": recipe.place.model_dump(), "pack": recipe.pack.model_dump()}
    return Placed(
        inputs={
            "recipe": json_digest(sections),
            "activations": source,
            "machine": json_digest(machine.described()),
        },
        placements=place_budgets(
            work,
            machine,
            **recipe.place.model_dump(include={"objective", "vram_gib", "ram_gib"}),
            solver=solver,
            seconds=seconds,
        ),
    )


def place_budgets(
    work: Workload,
    machine: Machine,
    *,
    objective: str,
    vram_gib: Sequence[float],
    ram_gib: float,
    solver: str,
    seconds: float,
) -> tuple[Placement, ...]:
    """Placements for the ladder of budgets and for `vram_gib`; `ram_gib` is 0 for all that the machine has."""
    check_solver(solver, locks=False)
    further, ram = [in_bytes(gib) for gib in vram_gib], machine.ram_bytes(ram_gib)
    return ladder(Problem.of(work, machine), further, ram=ram, objective=objective, solver=solver, seconds=seconds)


def _workload(recipe: Recipe, folder: Path) -> tuple[Workload, str]:
    """The model's workload, and the digest of what it was read from."""
    section = recipe.place
    if not section.activations:
        raise RecipeError(
            '[place] activations = "": no activations to place from',
            expected=f"an activation profile, or {PUBLISHED!r} for a model whose published curve is bundled",
            remedy="pi-compile train RECIPE --export FILE, then activations = FILE",
        )
    if section.activations == PUBLISHED:  # ranks by rule
        model = find_planned(recipe.model.path, folder, recipe.model.ignore_config, in_recipe=True)
        profile, formats = published_profile(model), model.formats(recipe.pack.model_dump())
    else:
        profile = ActivationProfile.load(folder / section.activations)
        formats = resolve_formats(profile.formats, recipe.pack.model_dump(), tied_head=profile.decoder.tied_head)
    work = Workload.of(profile, formats, section.context)
    return work, _published_digest(profile, work) if section.activations == PUBLISHED else profile.placing_digest()


def _published_digest(profile: ActivationProfile, work: Workload) -> str:
    """The digest of what is published of a model."""
    digest = hashlib.sha256(f"{profile.source} {profile.tokens}".encode() + work.counts.astype("<i8").tobytes())
    return digest.hexdigest()
