"""A machine profile: rates of one computer's processors, memories and link, with the unit in every key.

A profile is a TOML file, measured by `pi-compile machine` or written from a named source.
"""

import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from pi_compile.errors import ProfileError, nearest, shown
from pi_compile.files import bundled_folder, parse_toml
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.errors import Setting

VERSION: Final = 2
"""The version of the file. Version 1 could give picked rows a rate in some formats and leave out others."""

# The upper bound keeps slips (bytes for GB) and infinity out of the solver's integers.
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


def in_bytes(gib: float) -> int:
    """GiB as they were written, in whole bytes, rounded down."""
    return int(Decimal(repr(gib)) * 2**30)


def to_units(value: float, unit: int) -> int:
    """value · unit, exact in decimal as it was written, rounded to an integer, half to even."""
    return int((Decimal(repr(value)) * unit).to_integral_value())


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[*WEIGHT_FORMATS]
Rates = dict[FormatName, Positive]
"""10⁹ stored bytes a second by number format, for formats that are read more slowly than the memory delivers. A block
format that is not listed has the rate of q4, if that is."""
_NEEDED = [name for name in WEIGHT_FORMATS if not FORMATS[name].timed_as]
"""Formats of which `gather_gb_per_s` needs a rate; the others have that of one of these."""


class _Processor(_Section):
    """Rates of one processor and its memory."""

    name: str
    bandwidth_gb_per_s: Positive
    """Sequential reads by all cores, 10⁹ bytes a second."""
    launch_us: NotNegative = 0.0
    """Microseconds to start one operator: a product with a matrix, or attention over the cache."""
    format_gb_per_s: Rates = Field(default_factory=dict)
    """A matrix times one vector; other formats run at `bandwidth_gb_per_s`."""
    neurons_gb_per_s: Rates = Field(default_factory=dict)
    """All neurons of an FFN; other formats run at `format_gb_per_s`."""
    gather_gb_per_s: Rates = Field(default_factory=dict)
    """Some neurons of an FFN, gathered: every format, or none. Without it they come at `format_gb_per_s`."""
    predictor_gb_per_s: Rates = Field(default_factory=dict)
    """Predictors, whose rows are short; other formats run at `format_gb_per_s`."""
    attention_gb_per_s: Positive | None = None
    """10⁹ bytes of keys and values a second that attention takes for one query; None: as fast as they are read."""
    products_gflop_per_s: Positive | None = None
    """A matrix times many vectors, 10⁹ operations a second; a multiplication and an addition are two."""
    format_gflop_per_s: Rates = Field(default_factory=dict)
    """The same by number format."""
    neurons_gflop_per_s: Rates = Field(default_factory=dict)
    """An FFN by neuron times many vectors, all neurons computed. Without both tables prompts count as equally fast."""

    @model_serializer(mode="wrap")
    def _without_prompts(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A profile without these two is what it was before them, in digests too.
        later = ("format_gflop_per_s", "neurons_gflop_per_s")
        return {name: value for name, value in dump(self).items() if value or name not in later}

    @field_validator("gather_gb_per_s")
    @classmethod
    def _every_format(cls, rates: Rates) -> Rates:
        # A format that is left out would be taken to be picked as fast as a whole matrix is read.
        missing = [fmt for fmt in _NEEDED if fmt not in rates]
        if rates and missing:
            raise ValueError(f"no rate for {', '.join(missing)}; expected every format, or none")
        return rates


class Cpu(_Processor):
    """The CPU and RAM."""

    cores: Annotated[int, Field(ge=1)]
    ram_gib: Positive


class Gpu(_Processor):
    """The GPU and its memory."""

    vram_gib: Positive


class Link(_Section):
    """The link between CPU and GPU."""

    pcie_gb_per_s: Positive
    """10⁹ bytes a second in one direction."""
    sync_us: NotNegative
    """Microseconds to hand over a layer's partial result and wait for it (T_sync)."""


class Disk(_Section):
    """The disk that models are on: how fast it is read past the page cache."""

    name: str
    sizes_kib: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], Field(min_length=1)]
    """Sizes of a read, rising."""
    depths: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1)]
    """Numbers of reads that are under way at once, rising."""
    read_mb_per_s: list[list[Positive]]
    """10⁶ bytes a second at random places of a file: for each depth a rate for each size."""
    align_bytes: Annotated[int, Field(ge=1, le=1 << 16)] = 512
    """Reads begin and end at multiples of this."""

    @model_validator(mode="after")
    def _one_rate_each(self) -> Self:
        for name in ("sizes_kib", "depths"):
            values = getattr(self, name)
            if values != sorted(set(values)):
                raise ValueError(f"{name}: expected rising values, found {values}")
        if [len(row) for row in self.read_mb_per_s] != [len(self.sizes_kib)] * len(self.depths):
            raise ValueError("read_mb_per_s: expected a list for each of depths, with a rate for each of sizes_kib")
        return self


class Machine(_Section):
    """One computer. Without `gpu` and `link` everything stays on the CPU; without `disk`, in memory."""

    version: Literal[2] = VERSION
    name: str
    source: str
    """Where the figures are from: a publication, or the method and date of a measurement."""
    cpu: Cpu
    gpu: Gpu | None = None
    link: Link | None = None
    disk: Disk | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.gpu is None) != (self.link is None):
            raise ValueError("gpu and link go together: both or neither")
        return self

    def ram_bytes(self, gib: float = 0.0) -> int:
        """A budget of RAM in bytes; 0 GiB stands for all that the machine has."""
        return in_bytes(gib or self.cpu.ram_gib)

    def described(self) -> dict[str, Any]:
        """The profile as plain values, as digests have it: a profile without a disk is what it was before disks."""
        return self.model_dump(exclude={"disk"} if self.disk is None else None)

    def to_toml(self) -> str:
        """The profile as a file that `read_machine` takes back unchanged."""
        data = self.model_dump(exclude_none=True)
        return "\n".join(_table("", data)) + "\n"


def _table(name: str, data: dict[str, Any]) -> list[str]:
    """Lines of a table: its values, then its tables; empty tables are left out."""
    lines = [_line(key, value) for key, value in data.items() if not isinstance(value, dict)]
    for key, value in data.items():
        if isinstance(value, dict) and value:
            inner = f"{name}.{key}" if name else key
            lines += ["", f"[{inner}]", *_table(inner, value)]
    return lines


def _line(key: str, value: str | int | float) -> str:
    # Strings and numbers are written alike in JSON and TOML, but for escaped surrogates and one control character.
    return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def bundled_machines() -> Path:
    """The folder of the bundled profiles."""
    return bundled_folder("profiles/machines")


def find_machine(name: str, folder: Path) -> Machine:
    """Read a profile by its name in `profiles/machines`, or by its path relative to `folder`. Raises ProfileError."""
    if name.endswith(".toml"):
        return read_machine(folder / name)
    path = bundled_machines() / f"{name}.toml"
    if not path.is_file():
        raise _missing(name, f"{Path(name).stem or 'mine'}.toml")
    return read_machine(path)


def read_machine(path: Path) -> Machine:
    """Read and check a profile. Raises ProfileError naming every problem."""
    try:
        data = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _missing(path, path) from None
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: not a machine profile", found=error) from None
    if data.get("version") != VERSION:
        raise ProfileError(
            f"{path}: a machine profile of another version",
            expected=f"version = {VERSION}",
            found=shown(data["version"]) if "version" in data else "none",
            remedy=f"measured: pi-compile machine -o {path.name}; written by hand: gather_gb_per_s for every format or "
            f"for none, then version = {VERSION}",
        )
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        problems = "\n    ".join(_problem(dict(e)) for e in error.errors())
        raise ProfileError(f"{path}: invalid machine profile", found=f"\n    {problems}") from None


def _missing(name: str | Path, path: str | Path) -> ProfileError:
    """The error of a profile that is not there; one that is measured can be at `path`."""
    known = ", ".join(sorted(p.stem for p in bundled_machines().glob("*.toml")))
    return ProfileError(
        f"{name}: no such machine profile",
        expected=f"{known}, or a path that ends in .toml",
        remedy=(
            *(f"pi-compile machine -o {path}, then ", Setting("machine", path)),
            " (or [place] machine in the recipe)",
        ),
    )


def _problem(error: dict[str, Any]) -> str:
    location = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "value_error":
        return f"{location}: {error['ctx']['error']}" if location else str(error["ctx"]["error"])
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        near = nearest(error["input"], WEIGHT_FORMATS)
        meant = f"; did you mean {near}?" if near else ""
        return f"{location}: {error['msg']} (found {shown(error['input'])}){meant}"
    if error["type"] != "extra_forbidden":
        return f"{location}: {error['msg']}"
    sections: dict[str, type[BaseModel]] = {"cpu": Cpu, "gpu": Gpu, "link": Link, "disk": Disk}
    known = sections.get(str(error["loc"][0]), Machine).model_fields
    near = nearest(error["loc"][-1], known)
    return f"{location}: unknown key" + (f"; did you mean {near}?" if near else "")
