"""What both command lines share: sizes, and dataclasses as groups of options."""

import re
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from pi_runtime.console import parse_size, run, shown, takes
from pi_runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("1.5 GB", 1_500_000_000), ("4096B", 4096), ("0", 0), (str(1 << 20), 1 << 20)],
)
def test_a_size_is_a_number_with_a_unit_or_of_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text, "vram_budget") == nbytes


@pytest.mark.parametrize(("text", "meant"), [("8", "8GiB"), ("3 ", "3GiB"), ("0.5", "0.5GiB"), ("2048", "2048MiB")])
def test_a_small_number_without_a_unit_is_no_size(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"did you mean {meant}?")):
        parse_size(text, "ram_budget")


@dataclass(frozen=True, kw_only=True)
class Own:
    name: Annotated[str, typer.Argument()]
    loud: Annotated[bool, typer.Option("--loud")] = False


@dataclass(frozen=True, kw_only=True)
class Shared:
    size: int | None = None
    kept: int = 7


def test_dataclasses_are_groups_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    app, found = typer.Typer(), list[object]()

    def size(text: str) -> int:
        return parse_size(text, "size")

    @app.command()
    @takes(Own, Shared, flags={"size": typer.Option("--big", parser=size)})
    def command(own: Own, shared: Shared, last: int = 1) -> None:
        found.extend((own, shared, last))

    assert run(app, ["a", "--loud", "--big", "2KiB", "--last", "3"]) == 0
    assert found == [Own(name="a", loud=True), Shared(size=2048), 3]
    assert run(app, ["a"]) == 0
    assert found[3:] == [Own(name="a"), Shared(), 1]
    assert run(app, ["a", "--kept", "8"]) == 2  # has no flag
    assert run(app, ["a", "--big", "much"]) == 2
    assert "--size much: not a size" in capsys.readouterr().err


def test_an_error_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """It may quote a file that comes from anyone."""
    app = typer.Typer()

    @app.command()
    def refuse() -> None:
        raise UsageError("m.gguf: no tensor \x1b]0;title\x07", found="\x1b[2J", remedy="another file")

    assert run(app, []) == 2
    assert capsys.readouterr().err == "error: m.gguf: no tensor �]0;title�\n  found: �[2J\n  try: another file\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1000.0, "1,000"), (-999.5, "-999.5000"), (1e-3, "0.0010"), (9e-4, "0.0009"), (12345, "12,345")],
)
def test_values_of_a_list_are_as_long_as_they_tell_something(value: float | None, text: str) -> None:
    assert shown(value) == text
