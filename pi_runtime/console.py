"""Common parts of both command lines: results to stdout, progress and errors to stderr, exit codes.

0 ok · 1 internal · 2 usage · 3 bad input or artifact · 4 does not fit · 5 lock or quality budget not met ·
130 interrupted.

Text is made of key–value lists and tables. On a terminal a long value is folded beside its key; elsewhere it stays on
one line, without colours. No digit and no path is ever cut: lines may be longer than the terminal.
"""

import copy
import functools
import inspect
import io
import json
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from pi_runtime.errors import Setting, UsageError
from pi_runtime.errors.exit_codes import INTERRUPTED, code_and_message

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[[int, int], None]
"""Called with (done, total)."""
SHORT = 1000
"""Characters of a line that is written without waiting: a pipe that has room at all has room for more bytes."""
_WIDEST = 10_000
"""Columns of the widest line."""

DEBUG = typer.Option("--debug", envvar="PI_DEBUG", help="Show a traceback with an error.")
JSON = typer.Option("--json", help="Print the result as JSON.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        sys.stdout.write(f"pi-toolchain {version('pi-toolchain')}\n")
        raise typer.Exit


VERSION = typer.Option(
    "--version", callback=_print_version, is_eager=True, show_default=False, help="Print the version and exit."
)


HELP = {"help_option_names": ["-h", "--help"]}
_KINDS = {"path": "FILE", "str": "TEXT", "text": "TEXT", "int": "N", "integer": "N", "float": "N"}


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """How help shows a parameter: values are FILE, FOLDER, N, SIZE or TEXT, and an argument is its name alone."""
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    if record is None:
        return None
    names, text = record
    if parameter.param_type_name == "argument":
        return re.sub(r" <.*>$", "", names).upper(), text
    names = re.sub(r"<(?:list\[)?(\w+)\]?(?: range)?>$", lambda found: _KINDS.get(found[1].lower(), found[0]), names)
    return re.sub(r"<(\w+(?:\|\w+)+)>$", r"\1", names), text


class GroupedCommand(TyperCommand):
    """A command whose help shows the options of each title together, those without one last, and then its epilog."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all options, and the arguments before them."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            title = (
                "Arguments" if parameter.param_type_name == "argument" else getattr(parameter, "rich_help_panel", "")
            )
            if (record := help_record(parameter, ctx)) is not None:
                sections.setdefault(title or "Options", []).append(record)
        sections["Options"] = sections.pop("Options")
        _write_sections({title: records for title, records in sections.items() if records}, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the epilog line by line, as it stands."""
        formatter.write("".join(f"{line}\n" for line in ["", *inspect.cleandoc(self.epilog or "").splitlines()]))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Name arguments as the list of them does."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        named = [(one.required, (help_record(one, ctx) or ("",))[0]) for one in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for required, name in named)]


class GroupedCommands(TyperGroup):
    """A program whose help shows the commands of each panel together, and then its epilog."""

    format_epilog = GroupedCommand.format_epilog

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write a line for each command."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None)
            sections.setdefault(str(title), []).append((name, command.get_short_help_str(100)))
        _write_sections(sections, formatter)


def _write_sections(sections: Mapping[str, list[tuple[str, str]]], formatter: Any) -> None:
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


def takes(
    *groups: type[Any],
    flags: Mapping[str, Any] | None = None,
    titles: Mapping[type[Any], str] | None = None,
    variables: bool = False,
) -> Callable[[Callable[..., None]], Any]:
    """Let a command take the fields of dataclasses as options. It is called with an instance of each, in their order.

    A field has its option in its annotation, or in `flags` by its name; one that has neither keeps its default.
    `titles` are those of groups in the help of a `GroupedCommand`; an option with a panel of its own keeps that. With
    `variables` every option has a variable, `PI_` and its name.
    """
    known, titled = flags or {}, titles or {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = {group: _options(group, known, titled.get(group), variables) for group in groups}
        own = list(inspect.signature(command).parameters.values())[len(groups) :]
        taken = [option for options in fields.values() for option in options]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            made = [group(**{o.name: values.pop(o.name) for o in options}) for group, options in fields.items()]
            command(*made, **values)

        # typer reads options from the signature.
        parameters = [*taken, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


def _options(group: type[Any], flags: Mapping[str, Any], title: str | None, variables: bool) -> list[inspect.Parameter]:
    found = []
    for field in inspect.signature(group).parameters.values():
        kind, option = field.annotation, flags.get(field.name)
        if option is None:
            if get_origin(kind) is not Annotated:
                continue
            kind, option = get_args(kind)
        elif option.parser is not None:
            kind = str  # what has a parser is text for typer
        option = copy.copy(option)
        option.rich_help_panel = title if option.rich_help_panel is None else option.rich_help_panel
        if variables and isinstance(option, OptionInfo):
            option.envvar = option.envvar or f"PI_{field.name.upper()}"
        found.append(field.replace(annotation=Annotated[kind, option]))
    return found


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Run a command line. Every result becomes an exit code, every error a message on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_streams()
    debug = "--debug" in arguments or os.environ.get("PI_DEBUG", "").lower() in ("1", "true", "t", "yes", "y", "on")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not end the text
    try:
        result = app(arguments, standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        if result != INTERRUPTED:
            return result if isinstance(result, int) else 0
        code, message = code_and_message(KeyboardInterrupt())  # typer turns Ctrl-C into a number
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:  # typer's way out of a broken pipe
        if isinstance(end.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except (Exception, KeyboardInterrupt) as error:  # the last line of defence: internal errors have an exit code too
        if debug:
            import traceback  # noqa: PLC0415

            traceback.print_exc()
        code, message = code_and_message(error)
    message = "\n".join(map(_printable, message.split("\n")))
    if "--json" in arguments:
        message = json.dumps({"error": message.removeprefix("error: "), "exit_code": code}, ensure_ascii=False)
    elif sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        message = re.sub(r"\A(?:error|Error): |(?m:^  \w+: )", "\033[1;31m\\g<0>\033[0m", message)
    say(message)
    return code


def _open_streams() -> None:
    """Open what this process was started without (`2>&-`): else a file or a connection gets the number of stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115  it stays open


def _reader_gone() -> int:
    """End quietly: the reader of stdout has closed it. Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def say(message: str) -> None:
    """Print a line for the user on stderr. Where nobody reads it, or the disk is full, nothing else ends for that."""
    try:
        sys.stderr.write(message + "\n")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except OSError:
        pass


def say_now(message: str) -> None:
    """The same without waiting: a line for which a pipe has no room is left out."""
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError):  # it is no file
        number = None
    if number is not None and hasattr(select, "poll"):
        looked = select.poll()
        looked.register(number, select.POLLOUT)
        if not looked.poll(0):
            return
    say(message[:SHORT])


def say_softly(text: str) -> None:
    """Print text on stderr as it comes, dimmed on a terminal."""
    sys.stderr.write(f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text)
    sys.stderr.flush()


@contextmanager
def progress(title: str, unit: str = "bytes") -> Iterator[Progress]:
    """Show a bar with rate and time left on stderr, if that is a terminal. `unit`: bytes or a noun."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich import progress as bars  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    rate: list[bars.ProgressColumn] = (
        [bars.DownloadColumn(), bars.TransferSpeedColumn()]
        if unit == "bytes"
        else [bars.MofNCompleteColumn(), bars.TextColumn(unit)]
    )
    columns = [bars.TextColumn("{task.description}"), bars.BarColumn(), *rate, bars.TimeRemainingColumn()]
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MOST_GIB = 256
"""A number without a unit is most likely meant as GiB below this, and as MiB from this on."""


def parse_size(text: str, name: str) -> int:
    """Parse a size: `8GiB`, `512 MiB`, `1.5GB`, `4096B`; a number without a unit counts bytes, 1 MiB of them or more.

    Raises UsageError naming the setting.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    expected = "a number with B, KiB, MiB, GiB or TiB, like 8GiB"
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError("not a size", setting=Setting(name, text), expected=expected)
    number, unit = match.groups()
    if not unit and 0 < float(number) < _UNITS["MIB"]:
        likely = f"{number}{'GiB' if float(number) < _MOST_GIB else 'MiB'}"
        raise UsageError(
            "a number without a unit counts bytes, and so few hold nothing",
            setting=Setting(name, number),
            expected=expected,
            remedy=f"did you mean {likely}?",
        )
    return int(float(number) * _UNITS[unit.upper()])


def facts(rows: Iterable[tuple[str, str]]) -> "Table":
    """A key–value list."""
    from rich.table import Table  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in rows:
        grid.add_row(_printable(title), _printable(text))
    return grid


def table(rows: Sequence[Mapping[str, Any]], left: Sequence[str] = ()) -> "Table":
    """A table of rows with the same keys, which are its heads.

    Words in the first column stand to the left, and so do the columns that `left` names.
    """
    from rich.table import Table  # noqa: PLC0415

    found = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column, value in rows[0].items():
        words = (isinstance(value, str) and not found.columns) or column in left
        found.add_column(column.replace("_", " "), justify="left" if words else "right", no_wrap=True)
    for row in rows:
        found.add_row(*(_printable(shown(value)) for value in row.values()))
    return found


def text_of(*blocks: "Table") -> str:
    """Key–value lists and tables as text, with a blank line between them."""
    return "\n\n".join(map(_rendered, blocks))


def _rendered(block: "Table") -> str:
    from rich.console import Console  # noqa: PLC0415
    from rich.measure import Measurement  # noqa: PLC0415

    screen = Console(markup=False, emoji=False, highlight=False)
    needed = Measurement.get(screen, screen.options.update(width=_WIDEST), block)
    folds = screen.is_terminal and not block.show_header
    screen.width = max(screen.width, needed.minimum if folds else needed.maximum)
    with screen.capture() as captured:
        screen.print(block)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def shown(value: Any) -> str:
    """A value as a list or a table has it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.2g}"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _printable(text: str) -> str:
    """The text without control characters: a file comes from anyone, and must not steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)
