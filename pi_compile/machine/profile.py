"""A machine profile: what one computer's memories and links can do, with the unit in every key.

Read from TOML, measured by `pi-compile machine` or written from a named source.
"""

import difflib
import json
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pi_compile.errors import ProfileError
from pi_compile.files.bundled import bundled

# The upper bound keeps a slip (bytes for GB) and infinity out of the solver's integers.
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


def whole(value: float, unit: int) -> int:
    """value · unit from the decimal digits that were written, rounded to an integer, half to even."""
    return int((Decimal(repr(value)) * unit).to_integral_value())


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Rates = dict[Literal["f32", "f16", "bf16", "q8", "q4"], Positive]
"""10⁹ stored bytes a second by number format, for formats that a unit reads more slowly than its memory delivers."""


class _Unit(_Section):
    """What a processor makes of its memory."""

    name: str
    bandwidth_gb_per_s: Positive
    """Sequential reads by all cores, 10⁹ bytes a second."""
    launch_us: NotNegative = 0.0
    """Starting one operator, microseconds: a product with a matrix, or attention over the cache."""
    format_gb_per_s: Rates = Field(default_factory=dict)
    """A matrix times one vector; a format that is not here runs at `bandwidth_gb_per_s`."""
    neurons_gb_per_s: Rates = Field(default_factory=dict)
    """All neurons of an FFN; a format that is not here runs at `format_gb_per_s`, as for the next two."""
    gather_gb_per_s: Rates = Field(default_factory=dict)
    """Neurons picked out of an FFN."""
    predictor_gb_per_s: Rates = Field(default_factory=dict)
    """Predictors, whose rows are short."""
    attention_gb_per_s: Positive | None = None
    """10⁹ bytes of keys and values a second, once for each query; without it, reading them is what takes time."""
    products_gflop_per_s: Positive | None = None
    """A matrix times many vectors at once, 10⁹ operations a second, an addition and a multiplication being two."""


class Cpu(_Unit):
    """Processor and RAM."""

    cores: Annotated[int, Field(ge=1)]
    ram_gib: Positive


class Gpu(_Unit):
    """Graphics card and its memory."""

    vram_gib: Positive


class Link(_Section):
    """Between the two."""

    pcie_gb_per_s: Positive
    """One way."""
    sync_us: NotNegative
    """T_sync: handing a layer's partial result over and waiting for it, microseconds."""


class Machine(_Section):
    """One computer. Without `gpu` and `link` everything stays on the CPU."""

    name: str
    source: str
    """How the figures were had: a publication, or the method and date of a measurement."""
    cpu: Cpu
    gpu: Gpu | None = None
    link: Link | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.gpu is None) != (self.link is None):
            raise ValueError("gpu and link go together: both or neither")
        return self

    def to_toml(self) -> str:
        """The profile as a file that `read_machine` takes back unchanged."""
        data = self.model_dump(exclude_none=True)
        return "\n".join(_table("", data)) + "\n"


def _table(name: str, data: dict[str, Any]) -> list[str]:
    """A table's values, then its tables; empty ones are left out."""
    lines = [_line(key, value) for key, value in data.items() if not isinstance(value, dict)]
    for key, value in data.items():
        if isinstance(value, dict) and value:
            inner = f"{name}.{key}" if name else key
            lines += ["", f"[{inner}]", *_table(inner, value)]
    return lines


def _line(key: str, value: str | int | float) -> str:
    # JSON's strings and numbers are TOML's, but for escaped surrogates and one control character.
    return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def library() -> Path:
    """Folder of the bundled profiles."""
    return bundled("machines")


def find_machine(name: str, folder: Path) -> Machine:
    """A profile by name (`profiles/machines/NAME.toml`) or by path, relative to `folder`. Raises ProfileError."""
    if not name.endswith(".toml"):
        return read_machine(library() / f"{name}.toml")
    return read_machine(folder / name)


def read_machine(path: Path) -> Machine:
    """Read and check a profile. Raises ProfileError naming every problem."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in library().glob("*.toml")))
        raise ProfileError(
            f"{path}: no such machine profile",
            expected=f"{known}, or a path",
            remedy=f"pi-compile machine -o {path.name}",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{path}: not a machine profile", found=error) from None
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        problems = "\n    ".join(_problem(dict(e)) for e in error.errors())
        raise ProfileError(f"{path}: invalid machine profile", found=f"\n    {problems}") from None


def _problem(error: dict[str, Any]) -> str:
    location = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] != "extra_forbidden":
        return f"{location}: {error['msg']}"
    sections: dict[str, type[BaseModel]] = {"cpu": Cpu, "gpu": Gpu, "link": Link}
    known = sections.get(str(error["loc"][0]), Machine).model_fields
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
    return f"{location}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
