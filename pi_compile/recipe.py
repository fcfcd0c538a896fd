"""A recipe: one model on one machine, as a complete and strict TOML file.

Every key must be there, unless its docstring says that it may be missing, and none may be unknown: a recipe holds
everything that decides its artifact.
`docs/reference/recipe.md` explains the keys. Paths are relative to the recipe.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from pi_compile.errors import RecipeError, nearest, shown
from pi_compile.files import parse_toml
from pi_runtime.artifact.decoder import ACTIVATIONS
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.rungs import DENSE, GATE, PREDICTED, RUNGS
from pi_runtime.artifact.schema import OBJECTIVES
from pi_runtime.errors import UsageError

if TYPE_CHECKING:
    RungName = str
    Objective = str
    WeightFormat = str
    PredictorFormat = str
    DeclaredActivation = str
else:
    RungName, Objective = Literal[*RUNGS], Literal[*OBJECTIVES]
    WeightFormat, PredictorFormat = Literal["keep", *WEIGHT_FORMATS], Literal["keep", *WEIGHT_FORMATS, "auto"]
    DeclaredActivation = Literal["", *ACTIVATIONS]
AnyRecipe = TypeVar("AnyRecipe", bound="RecipeFile")
ROUNDING_INCREASE = 0.01
"""The relative increase of perplexity that rounding may cost where a recipe does not say it."""
PUBLISHED = "published"
"""Value of `activations` for a model whose config and published curve come with this project."""


class Section(BaseModel):
    """A table of a recipe: complete, strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RecipeFile(Section):
    """A whole recipe: its fields are the tables of a TOML file."""

    def to_toml(self) -> str:
        """The recipe as a file that is read back unchanged."""
        tables = []
        for name, value in self.model_dump().items():
            rows, head = (value, f"[[{name}]]") if isinstance(value, list) else ([value], f"[{name}]")
            tables += [_table(head, row) for row in rows]
        return "\n\n".join(tables) + "\n"


def _table(head: str, values: Mapping[str, Any]) -> str:
    # JSON's strings, integers, floats, booleans and arrays are TOML's.
    return "\n".join([head, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())])


class ModelSection(Section):
    """The checkpoint to compile."""

    path: Annotated[str, Field(min_length=1)]
    """A folder, relative to the recipe's own, or a hub name `owner/name`."""
    revision: str
    """Commit of a hub name, so that the recipe means one model; empty for a folder."""
    ignore_config: list[str]
    """Keys of config.json that this project does not know and that do not change the function."""
    activation: DeclaredActivation = ""
    """Activation of a GGUF file, which does not say it. It may be missing, and is then not written."""

    @model_serializer(mode="wrap")
    def _without_empty(self, serialised: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialised(self)
        return {key: value for key, value in fields.items() if value or key != "activation"}


class CorpusSection(Section):
    """Text to profile and train on, tune on, and report on."""

    text: Annotated[list[str], Field(min_length=1)]
    """Paths or globs (text, JSON, JSON lines, Parquet), `python`, or `hub:OWNER/NAME@REVISION`."""
    report: list[str]
    """The same, held out; empty: report on a stretch of `text` that is used for nothing else."""
    field: str
    """Column that holds the text where the data has columns."""
    fit_tokens: Annotated[int, Field(ge=1)]
    tune_tokens: Annotated[int, Field(ge=64)]
    report_tokens: Annotated[int, Field(ge=64)]


class ProfileSection(Section):
    """How text goes through the model."""

    window: Annotated[int, Field(ge=8)]
    """Tokens of one sequence."""
    batch: Annotated[int, Field(ge=1)]
    """Sequences in one forward pass."""
    layers_at_once: Annotated[int, Field(ge=0)]
    """Layers in memory together; 0 for all. 1 profiles a model larger than memory."""
    cofiring_tokens: Annotated[int, Field(ge=0)]
    """Tokens that are sampled to see which neurons fire together; 0 for none."""
    threads: Annotated[int, Field(ge=1)]
    """Threads that a task of `profile` and `train` computes with, whatever the number of workers."""


class TrainSection(Section):
    """How predictors are trained."""

    tokens: Annotated[int, Field(ge=64)]
    """Tokens of the fit text that train predictors; profiling takes all of them."""
    steps: Annotated[int, Field(ge=0)]
    """Optimiser steps per candidate; 0 keeps the warm start."""
    rungs: Annotated[list[RungName], Field(min_length=1)]
    """Rungs a layer may take."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of everything random in training: the same seed gives the same predictors."""


class QualitySection(Section):
    """How much fidelity may be lost."""

    perplexity_increase: Annotated[float, Field(gt=0, le=1)]
    """Largest relative increase of perplexity that skipping neurons may cost."""
    rounding_increase: Annotated[float, Field(ge=0, le=1)] = ROUNDING_INCREASE
    """The same of rounding weights to fewer bits; 0: not measured. May be missing, and 0.01 is not written."""

    @model_serializer(mode="wrap")
    def _without_default(self, serialised: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialised(self)
        return {key: value for key, value in fields.items() if key != "rounding_increase" or value != ROUNDING_INCREASE}


class PlaceSection(Section):
    """What is placed on the GPU."""

    machine: str
    """A machine profile: a name in `profiles/machines`, or a path."""
    objective: Objective
    """`time`: least predicted time of a token; `hot-mass`: most activations on the GPU, as PowerInfer has it."""
    activations: str
    """An activation profile that `place` reads instead of the model, or `published`; empty to read the model."""
    context: Annotated[int, Field(ge=1)]
    """Positions of the key-value cache; the model's own if that is shorter."""
    vram_gib: list[Annotated[float, Field(gt=0, lt=2**20, allow_inf_nan=False)]]
    """GPU budgets to solve for, beside those that are fixed fractions of the model."""
    ram_gib: Annotated[float, Field(ge=0, lt=2**20, allow_inf_nan=False)]
    """RAM budget; 0 for all that the machine has."""


class PackSection(Section):
    """Number format of each part of the artifact; `keep` is the checkpoint's own."""

    embedding: WeightFormat
    attention: WeightFormat
    ffn: WeightFormat
    head: WeightFormat
    predictor: PredictorFormat
    """`auto`: the one of f16 and the quantised formats with which the model is predicted to run fastest."""


class QuantiseSection(Section):
    """How weights are rounded. It may be missing, and is then not written."""

    tokens: Annotated[int, Field(ge=0)]
    """Tokens of the fit text on which errors of matrices in q4 make each other good; 0: rounded to nearest."""


class BitsSection(Section):
    """A budget within which each matrix gets its format, none wider than [pack] says. The table may be missing, and is
    then not written."""

    file_mib: Annotated[float, Field(ge=0, lt=2**30, allow_inf_nan=False)] = 0.0
    """Most MiB of the artifact, predictors not counted, in which least is lost. It may be missing."""
    perplexity_increase: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest relative increase of perplexity that rounding is expected to cost, in the fewest bytes. It may be
    missing."""
    tokens: Annotated[int, Field(ge=0)]
    """Tokens of the fit text that say what an error of each weight costs."""

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if bool(self.file_mib) == bool(self.perplexity_increase) and self.tokens:
            raise ValueError("one of file_mib and perplexity_increase is above 0")
        return self


OWN_HEAD = "own"
"""The head that is the checkpoint's own layer behind the last (multi-token prediction)."""


class GuessSection(Section):
    """The guess head of an artifact. It may be missing, and is then not written."""

    head: str
    """Folder of a published EAGLE-3 head for the model, or `OWN_HEAD`; empty for none."""


class Recipe(RecipeFile):
    """One model on one machine."""

    model: ModelSection
    corpus: CorpusSection
    profile: ProfileSection
    train: TrainSection
    quality: QualitySection
    place: PlaceSection
    pack: PackSection
    bits: BitsSection = BitsSection(tokens=0)
    quantise: QuantiseSection = QuantiseSection(tokens=0)
    guess: GuessSection = GuessSection(head="")

    @model_serializer(mode="wrap")
    def _without_default(self, serialised: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialised(self)
        return {
            key: value
            for key, value in fields.items()
            if key not in ("bits", "quantise", "guess") or value.get("tokens") or value.get("head")
        }


def default_recipe(
    model: str,
    *,
    revision: str = "",
    corpus: Sequence[str] = ("python",),
    ignore_config: Sequence[str] = (),
    activation: str = "",
    formats: Mapping[str, str] = MappingProxyType({}),
) -> Recipe:
    """The recipe that `init` writes: at most 0.1 % of perplexity lost; what is not in `formats` keeps its own."""
    pack: dict[str, Any] = {**dict.fromkeys(PackSection.model_fields, "keep"), **formats}
    return Recipe(
        model=ModelSection(path=model, revision=revision, ignore_config=list(ignore_config), activation=activation),
        corpus=CorpusSection(
            text=list(corpus), report=[], field="text", fit_tokens=1_000_000, tune_tokens=16_384, report_tokens=16_384
        ),
        profile=ProfileSection(window=512, batch=8, layers_at_once=0, cofiring_tokens=4096, threads=1),
        train=TrainSection(tokens=65_536, steps=300, rungs=[DENSE, GATE, PREDICTED], seed=0),
        quality=QualitySection(perplexity_increase=0.001),
        place=PlaceSection(machine="pc-low", objective="time", activations="", context=2048, vram_gib=[], ram_gib=0.0),
        pack=PackSection(**pack),
    )


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe file. Raises RecipeError naming every problem with its key."""
    return read_toml(path, Recipe, "pi-compile init MODEL", "docs/reference/recipe.md")


def read_toml(path: Path, kind: type[AnyRecipe], init: str, docs: str) -> AnyRecipe:
    """Read and check a recipe of any kind. `init` is the command that writes one, `docs` the page that explains it.

    Raises RecipeError naming every problem with its key.
    """
    try:
        data = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe", remedy=f"{init} -o {path}") from None
    except IsADirectoryError:
        remedy = f"{init.replace('MODEL', str(path))} -o RECIPE.toml"
        raise RecipeError(f"{path}: a folder, not a recipe", remedy=remedy) from None
    except UnicodeDecodeError:
        remedy = "`pi-run` runs an artifact" if path.suffix == ".pi" else f"{init} -o RECIPE.toml"
        raise RecipeError(f"{path}: cannot be read as text, so it is no recipe", remedy=remedy) from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read", found=error) from None
    except ValueError as error:
        raise RecipeError(f"{path}: not TOML", found=error, remedy=f"{init} -o RECIPE.toml") from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        command = init.removesuffix(" MODEL")
        remedy = f"{docs} explains every key; `{command}` writes a complete recipe to compare with"
        raise RecipeError(f"{path}: not a valid recipe:{_problems(error, kind)}", remedy=remedy) from None


def check_settings(**sections: Mapping[str, Any]) -> None:
    """Check arguments of stages by the rules of a recipe, section by section.

    Raises UsageError naming every problem with its key.
    """
    data = default_recipe("any").model_dump()
    try:
        Recipe.model_validate({**data, **{name: data.get(name, {}) | values for name, values in sections.items()}})
    except ValidationError as error:
        remedy = "docs/reference/recipe.md explains every key"
        raise UsageError(f"wrong arguments:{_problems(error, Recipe)}", remedy=remedy) from None


def _problems(error: ValidationError, kind: type[RecipeFile]) -> str:
    """A line for each problem."""
    return "".join(f"\n    {_problem(dict(e), kind)}" for e in error.errors())


def _problem(error: dict[str, Any], kind: type[RecipeFile]) -> str:
    location = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = _known_keys(kind, error["loc"][:-1])
        near = nearest(error["loc"][-1], known)
        return f"{location}: unknown key; " + (f"did you mean {near}?" if near else f"known: {', '.join(known)}")
    if error["type"] == "missing":
        return f"{location}: missing"
    if error["type"] == "model_type":
        return f"{location}: should be a table [{location}] (found {shown(error['input'])})"
    found = f"{location}: {error['msg'].replace('Input should', 'should')} (found {shown(error['input'])})"
    is_a_name = error["type"] == "literal_error" and isinstance(error["input"], str)
    near = nearest(error["input"], _quoted(error["ctx"]["expected"])) if is_a_name else None
    return found + (f"; did you mean {near}?" if near else "")


def _quoted(values: str) -> list[str]:
    """The names in pydantic's list of allowed values, `'a', 'b' or 'c'`."""
    return re.findall(r"'([^']*)'", values)


def _known_keys(kind: type[RecipeFile], location: tuple[Any, ...]) -> list[str]:
    model: Any = kind
    for name in location:
        # A number counts the tables of an array.
        model = get_args(model)[0] if isinstance(name, int) else model.model_fields[name].annotation
    return list(model.model_fields)
