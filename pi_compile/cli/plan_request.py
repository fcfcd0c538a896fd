"""The spec of a plan from a command line: a flag overrides the recipe, the recipe overrides the default."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

from pi_compile.checkpoint.part_formats import KEEP
from pi_compile.cli.options import EVERY, PlanOptions
from pi_compile.machine import Machine, find_machine, in_bytes
from pi_compile.machine.this_machine import this_machine
from pi_compile.planning import GIB, PlannedModel, PlanSpec, built_activations, find_planned
from pi_compile.recipe import PUBLISHED, Recipe, read_recipe
from pi_runtime import console
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.console import parse_size
from pi_runtime.errors import InputError, UsageError

CONTEXT = 2048
"""Positions of the cache by default; all of the model's where it has fewer."""
RESERVE = GIB
"""GPU memory that the default budget leaves to the driver and the screen."""


def plan_requests(options: PlanOptions) -> list[PlanSpec]:
    """The spec of a plan for each machine. Raises UsageError, RecipeError, CheckpointError or ProfileError."""
    names: list[str | None] = [*dict.fromkeys(options.machine or ())]
    return [_request(options, name) for name in names or [None]]


def compares_formats(options: PlanOptions) -> bool:
    """Whether `plan` is to compare all formats: as asked for, or where a model is named and nothing else."""
    recipe = options.model.endswith((".toml", ".pi"))
    return options.number_format == EVERY or not (recipe or options.machine or options.number_format)


def model_files(target: str) -> dict[str, int]:
    """Bytes of each GGUF model of a folder, or of a hub name's repository; {} where nothing says."""
    try:
        from pi_compile.checkpoint.folder import gguf_sizes

        return gguf_sizes(target)
    except (ImportError, InputError):
        return {}


def plan_request(options: PlanOptions) -> PlanSpec:
    """The spec of a plan for one machine. Raises what `plan_requests` does, and UsageError for several machines."""
    first, *others = plan_requests(options)
    if others:
        raise UsageError(
            f"--machine {others[0].machine.name}: a report, or a table of formats, is of one machine",
            remedy="`pi-compile plan` compares several machines",
        )
    return first


def _request(options: PlanOptions, machine_name: str | None) -> PlanSpec:
    target, fmt = options.model, options.number_format
    if target.endswith(".pi"):
        raise UsageError(
            f"{target}: an artifact does not say how many rows its predictors pick",
            expected="its recipe, or its config.json with --counts",
            remedy="pi-compile train RECIPE --export PROFILE, then --counts PROFILE",
        )
    recipe = read_recipe(Path(target)) if target.endswith(".toml") else None
    folder = Path(target).resolve().parent if recipe else Path()
    model = _planned(target, recipe, folder, options.ignore_config or [])
    machine = _machine(machine_name, recipe, folder)
    if fmt is not None and fmt not in WEIGHT_FORMATS:
        raise UsageError(f"--format {fmt}: unknown", expected=f"one of {', '.join(WEIGHT_FORMATS)}; {EVERY} with plan")
    wanted = recipe.pack.model_dump() if recipe and not fmt else dict.fromkeys(PARTS, fmt or KEEP)
    context = options.ctx_size or min(recipe.place.context if recipe else CONTEXT, model.decoder.context_length)
    if context > model.decoder.context_length:
        raise UsageError(
            f"--ctx-size {context}: longer than the model's context", expected=f"at most {model.decoder.context_length}"
        )
    known = options.counts or options.curve or options.density
    return PlanSpec(
        model=model,
        machine=machine,
        formats=model.formats(wanted),
        context=context,
        vram=_vram(options.vram_budget, recipe, machine),
        ram=_ram(options.ram_budget, recipe, machine),
        curve=options.curve,
        density=None if options.density is None else _share(options.density),
        counts=options.counts if known else _activations(recipe, folder),
        built=built_activations(Path(target)) if recipe and recipe.place.activations != PUBLISHED else None,
        objective=recipe.place.objective if recipe else "time",
    )


def _planned(target: str, recipe: Recipe | None, folder: Path, ignore_config: Sequence[str]) -> PlannedModel:
    if recipe is None:
        try:
            return find_planned(target, folder, ignore_config)
        except InputError as error:
            config = _fetched_config(target, error)
        return replace(find_planned(str(config), Path(), ignore_config), name=target)
    if ignore_config:
        raise UsageError(
            f"--ignore-config {ignore_config[0]}: a recipe has its own",
            expected="the flag with a config.json or its folder",
            remedy="write it in the recipe: [model] ignore_config",
        )
    return find_planned(recipe.model.path, folder, recipe.model.ignore_config, in_recipe=True)


def _fetched_config(target: str, unknown: InputError) -> Path:
    """The config of a hub name. Raises `unknown` where it is none, or where nothing is installed that fetches."""
    if Path(target).exists():
        raise unknown
    try:
        from pi_compile.checkpoint.folder import fetched_config

        found = fetched_config(target)
    except ModuleNotFoundError:
        raise unknown from None
    except InputError as error:
        raise type(unknown)(unknown.what, expected=unknown.expected, found=error.what, remedy=unknown.remedy) from None
    if found is None:
        raise unknown
    return found


def _machine(name: str | None, recipe: Recipe | None, folder: Path) -> Machine:
    if name is not None:
        return find_machine(name, Path())
    if recipe is None:
        return this_machine(console.say)
    return find_machine(recipe.place.machine, folder)


def _activations(recipe: Recipe | None, folder: Path) -> Path | None:
    """The activation profile that a recipe names."""
    if recipe is None or recipe.place.activations in ("", PUBLISHED):
        return None
    return folder / recipe.place.activations


def _vram(budget: str | None, recipe: Recipe | None, machine: Machine) -> int:
    """The GPU budget: the flag's; else the recipe's largest; else all of the GPU's memory but `RESERVE`."""
    if machine.gpu is None:
        if budget is not None:
            raise UsageError(f"--vram-budget {budget}: {machine.name} has no GPU", remedy="leave it out")
        return 0
    if budget is not None:
        return parse_size(budget, "vram_budget")
    if recipe is not None and recipe.place.vram_gib:
        return in_bytes(max(recipe.place.vram_gib))
    return max(int(machine.gpu.vram_gib * GIB) - RESERVE, 0)


def _ram(budget: str | None, recipe: Recipe | None, machine: Machine) -> int:
    """The RAM budget: the flag's; else the recipe's; else all of the machine's."""
    return parse_size(budget, "ram_budget") if budget else machine.ram_bytes(recipe.place.ram_gib if recipe else 0)


def _share(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise UsageError(f"--density {text}: not a number", expected="a share above 0, at most 1") from None
