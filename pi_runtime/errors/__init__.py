"""The errors that a user can cause, and their exit codes.

    PiError                      exit code 1   a fault of this program
    ├── UsageError                         2   the command asks for something impossible
    │   ├── ClosedError                        an engine or a model that was closed, or has failed
    │   ├── DeviceError                        a device that is not there
    │   └── MissingExtraError                  an optional dependency that is not installed
    ├── InputError                         3   something that was read is not usable
    │   ├── ArtifactError                      not an artifact, damaged, or of another version
    │   ├── PromptError                        a prompt that cannot be run
    │   │   └── ContextError                       a prompt that the context does not hold
    │   └── TemplateError                      a chat template that fails or exceeds its limits
    ├── DoesNotFitError                    4   memory or disk is too small
    └── NotMetError                        5   a lock or a quality budget is not met

`pi_compile.errors` adds its own leaves. Every message says what is wrong with which file or setting, and where it helps
what was expected, what was found, and what to do.

A setting has one name and several spellings: the keyword `max_tokens` in Python, the flag `--max-tokens`, the field of
a request. So an error names a `Setting`, and whoever shows the error spells it.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file system or a limit allows no larger file",
}
"""What the system's errors say when there is no room for a file."""


@dataclass(frozen=True)
class Setting:
    """A setting as an error names it: by its keyword in Python, with the value that it was given."""

    name: str
    value: object = None


Text: TypeAlias = str | Setting | tuple["Text", ...]
"""A text of an error: words, and settings between them."""
Spelling = Callable[[Setting], str]


def keyword(setting: Setting) -> str:
    """A setting as Python has it: `max_tokens=0`."""
    value = os.fspath(setting.value) if isinstance(setting.value, os.PathLike) else setting.value
    return setting.name if value is None else f"{setting.name}={value!r}"


_LONGEST = 20_000
"""Characters of a field of a message, which may quote a file with anything in it."""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def spelled(text: object, spelling: Spelling = keyword) -> str:
    """A text of an error with its settings spelled out."""
    if isinstance(text, Setting):
        return spelling(text)
    if isinstance(text, tuple):
        return "".join(spelled(part, spelling) for part in text)
    return str(text)


class PiError(Exception):
    """Base of every error that a user can cause. `str(error)` is the whole message, one field a line.

    `setting` is the setting that is wrong: it stands before `what`, or alone. A setting that is named further on, or in
    what was expected and in the remedy, stands there as a `Setting` among the words.

    >>> error = UsageError(setting=Setting("mode", "sparse"), what="unknown mode", remedy=Setting("mode", "auto"))
    >>> print(error)
    mode='sparse': unknown mode
      try: mode='auto'
    """

    exit_code = 1
    usual_remedy: Text | None = None
    """The remedy of errors that are given none."""

    def __init__(
        self,
        what: Text = "",
        *,
        setting: Setting | None = None,
        expected: object = None,
        found: object = None,
        remedy: Text | None = None,
    ) -> None:
        self.what: Text = what if setting is None else (setting, ": ", what) if what else setting
        self.reason = what
        """What is wrong, without the setting that stands before it."""
        self.setting, self.expected, self.found = setting, expected, found
        self.remedy = self.usual_remedy if remedy is None else remedy
        super().__init__(self.message())

    def message(self, spelling: Spelling = keyword) -> str:
        """The whole message, with its settings spelled out."""
        fields = (("expected", self.expected), ("found", self.found), ("try", self.remedy))
        lines = [f"  {name}: {_cut(spelled(text, spelling))}" for name, text in fields if text is not None]
        return "\n".join([_cut(spelled(self.what, spelling)), *lines])


class UsageError(PiError):
    exit_code = 2


class ClosedError(UsageError):
    pass


class DeviceError(UsageError):
    pass


class MissingExtraError(UsageError):
    pass


def install(extra: str = "") -> str:
    """What installs an extra. No registry has this project: it is installed from a clone."""
    return f"pip install '.{f'[{extra}]' if extra else ''}', in your clone of pi-toolchain"


class InputError(PiError):
    exit_code = 3


class ArtifactError(InputError):
    usual_remedy = "copy or download it again, or pack it anew with `pi-compile build`"


class PromptError(InputError):
    pass


class ContextError(PromptError):
    pass


class TemplateError(InputError):
    pass


class DoesNotFitError(PiError):
    exit_code = 4


class NotMetError(PiError):
    exit_code = 5


def write_error(path: str | os.PathLike[str], error: OSError, remedy: str = "name another output") -> PiError:
    """The error of a file that cannot be written: DoesNotFitError where there is no room for it, else UsageError."""
    if error.errno in NO_ROOM:
        return DoesNotFitError(f"{path}: {NO_ROOM[error.errno]}", remedy=f"make room there, or {remedy}")
    return UsageError(f"{path}: cannot be written", found=error.strerror, remedy=remedy)


def read_error(
    name: str | os.PathLike[str] | Setting,
    error: OSError | UnicodeDecodeError,
    remedy: str,
    kind: type[InputError] = InputError,
) -> InputError:
    """The error of an input file that is not there, or cannot be read. `name`: its path, or the setting that has it."""
    what = name if isinstance(name, Setting) else str(name)
    if isinstance(error, UnicodeDecodeError):
        return kind((what, ": cannot be read as text"), found=error, remedy=remedy)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return kind((what, ": no such file"), remedy=remedy)
    return kind((what, ": cannot be read"), found=error.strerror, remedy=remedy)


def size(nbytes: float) -> str:
    """A number of bytes with its unit: 8589934592 → `8.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
