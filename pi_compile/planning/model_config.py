"""The model that a plan is for: a config.json, a folder with one, or a published model whose config is bundled."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from pi_compile.checkpoint.config import Config, is_gguf, read_json
from pi_compile.checkpoint.families.registry import decoder_of, find_adapter
from pi_compile.checkpoint.part_formats import AUTO, KEEP
from pi_compile.errors import CheckpointError, ProfileError, nearest
from pi_compile.files import bundled_folder, parse_toml
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.errors import Setting, UsageError

_CONFIG = "config.json"
_DTYPES = {f.number: f.name for f in FORMATS.values() if f.number}


@dataclass(frozen=True, kw_only=True)
class PublishedActivation:
    """The published activation curve and density of a model."""

    curve: str
    """Name of a bundled curve."""
    density: Decimal
    """Mean share of the neurons that fire for a token."""
    source: str


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model as its config describes it, without weights."""

    name: str
    decoder: Decoder
    dtype: str | None
    """Number format of its checkpoint, if the config says."""
    activation: PublishedActivation | None
    """What is published of its neurons, for bundled models."""

    def formats(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """The number format of each part, where `keep` is the checkpoint's, and for predictors the FFN's."""
        kept = {part: wanted[part] if wanted[part] != KEEP else self.dtype for part in PARTS}
        if wanted["predictor"] in (KEEP, AUTO):
            kept["predictor"] = kept["ffn"]
        formats = {part: fmt for part, fmt in kept.items() if fmt is not None}
        if len(formats) < len(PARTS):
            raise UsageError(
                f"{self.name}: its config does not say in which number format it is", remedy=Setting("format", "f16")
            )
        return formats


def find_planned(
    name: str, folder: Path, ignore_config: Collection[str] = (), *, in_recipe: bool = False
) -> PlannedModel:
    """The model of a config.json or of a folder that holds one, relative to `folder`, or of a bundled OWNER/NAME.

    `ignore_config` are keys of it that the user declares to be without effect, by flag or `in_recipe`. Raises
    CheckpointError for anything else, and for a config that is not understood.
    """
    path = folder / Path(name).expanduser()
    if path.is_dir():
        path = path / _CONFIG
    if not path.is_file():
        named = [one for one in bundled_models() if name.lower() in (one.lower(), one.split("/")[1].lower())]
        path = bundled_folder("profiles/models") / (named[0] if len(named) == 1 else name) / _CONFIG
    if is_gguf(path):
        raise CheckpointError(
            f"{name}: a GGUF file is not planned for",
            expected=f"a {_CONFIG}",
            remedy="name that of the model it was made from; `build` places this one too",
        )
    if not path.is_file():
        near = nearest(name, bundled_models())
        raise CheckpointError(
            f"{name}: no config to plan from",
            expected=f"a {_CONFIG}, a folder with one, a recipe (.toml), or one of {', '.join(bundled_models())}",
            remedy=(f"did you mean {near}? Else " if near else "")
            + "fetch the model's config.json and name it: its weights are not needed",
        )
    config = Config(path, read_json(path))
    config = find_adapter(config).text_config(config)
    dtype = config.get("dtype", config.get("torch_dtype"))
    return PlannedModel(
        name=name,
        decoder=decoder_of(config, ignore_config, in_recipe=in_recipe),
        dtype=_DTYPES.get(dtype) if isinstance(dtype, str) else None,
        activation=_activation(path.parent / "activation.toml"),
    )


def bundled_models() -> list[str]:
    """OWNER/NAME of every model whose config is bundled."""
    root = bundled_folder("profiles/models")
    return sorted(path.parent.relative_to(root).as_posix() for path in root.glob(f"*/*/{_CONFIG}"))


def _activation(path: Path) -> PublishedActivation | None:
    if not path.is_file():
        return None
    try:
        data = parse_toml(path.read_text(encoding="utf-8"), parse_float=Decimal)
        return PublishedActivation(
            curve=data.pop("curve"), density=data.pop("density"), source=data.pop("source"), **data
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ProfileError(
            f"{path}: not a published activation", expected="curve, density, source", found=error
        ) from None
