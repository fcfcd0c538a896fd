"""The registry of families: those of this project, and those of installed packages (entry points).

They are loaded when the first checkpoint is opened.
"""

from collections.abc import Collection
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import iter_modules

from pi_compile.checkpoint.config import Config, check_keys, refuse_changes
from pi_compile.checkpoint.families.adapter import Adapter
from pi_compile.checkpoint.quantised.scheme import KEY, read_scheme
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder

GROUP = "pi_compile.families"
"""Entry points of installed packages; each names an `Adapter`."""


@cache
def adapters() -> dict[str, Adapter]:
    """Every known family by each of its `model_type`s.

    Raises CheckpointError for an installed family that cannot be loaded, or that claims a `model_type` of another.
    """
    known = {name: adapter for adapter in _built_in() for name in (adapter.family, *adapter.aliases)}
    for point in installed():
        adapter = _loaded(point)
        for name in (adapter.family, *adapter.aliases):
            if name in known:
                raise _refused(point, f"model_type {name!r}, which another family has")
            known[name] = adapter
    return known


def _built_in() -> list[Adapter]:
    """The families of this project: every adapter that a module of this folder has."""
    modules = (import_module(f"{__package__}.{found.name}") for found in iter_modules([str(Path(__file__).parent)]))
    return [value for module in modules for value in vars(module).values() if isinstance(value, Adapter)]


def installed() -> tuple[EntryPoint, ...]:
    """Families of installed packages, sorted by name."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)))


def family_names() -> tuple[str, ...]:
    """Names of the families whose checkpoints are read, sorted."""
    return tuple(sorted({a.family for a in adapters().values() if not a.plan_only}))


def find_adapter(config: Config) -> Adapter:
    """The family of a config. Raises CheckpointError where none is known."""
    known = adapters()
    architectures = config.get("architectures")
    # Older configs of some families name only their class.
    named = architectures if isinstance(architectures, list) else []
    of_class = [adapter.family for adapter in known.values() if adapter.architectures[0] in named]
    family = config.get("model_type", of_class[0] if of_class else None)
    if not isinstance(family, str) or family not in known:
        own_code = " through its own code (auto_map), which is never run" if config.get("auto_map") else ""
        raise CheckpointError(
            f"{config.path}: model type {family!r} is not supported{own_code}",
            expected=f"one of the families {', '.join(family_names())}",
            found=f"model_type = {family!r}, architectures = {architectures}",
            remedy="use a checkpoint of a supported family",
        )
    return known[family]


def decoder_of(config: Config, ignore_config: Collection[str] = (), *, in_recipe: bool = False) -> Decoder:
    """The decoder that a config describes, for planning; see `check_keys` for the keys to ignore.

    Unknown keys of a family that is only planned for are let through. Raises CheckpointError naming the key in
    question, and what `check_keys` raises.
    """
    adapter = find_adapter(config)
    config = adapter.text_config(config)
    read_scheme(config)
    read = adapter.read_keys | {KEY}
    if adapter.plan_only:
        refuse_changes(config, read, adapter.neutral_keys)
    else:
        check_keys(config, read, adapter.neutral_keys, ignore_config, in_recipe=in_recipe)
    return adapter.decoder(config)


def _loaded(point: EntryPoint) -> Adapter:
    try:
        adapter = point.load()
    except Exception as error:
        raise _refused(point, f"{type(error).__name__}: {error}") from error
    if not isinstance(adapter, Adapter):
        raise _refused(point, f"{point.value} is {type(adapter).__name__}")
    return adapter


def _refused(point: EntryPoint, found: str) -> CheckpointError:
    return CheckpointError(
        f"the installed family {point.name!r} ({point.value}) cannot be used",
        expected="an Adapter of a new model_type",
        found=found,
        remedy=f"update or uninstall {point.dist.name if point.dist else 'its package'}",
    )
