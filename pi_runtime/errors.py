"""The errors that a user can cause, and their exit codes.

    PiError                      exit code 1   a fault of this program
    ├── UsageError                         2   the command asks for something impossible
    │   ├── DeviceError                        a device that is not there
    │   └── MissingExtraError                  an optional dependency that is not installed
    ├── InputError                         3   something that was read is not usable
    │   ├── ArtifactError                      not an artifact, damaged, or of another version
    │   ├── PromptError                        a prompt that cannot be run
    │   └── TemplateError                      a chat template that fails or exceeds its limits
    ├── DoesNotFitError                    4   memory or disk is too small
    └── NotMetError                        5   a lock or a quality budget is not met

`pi_compile.errors` adds its own leaves. Every message says what is wrong with which file or flag, and where it helps
what was expected, what was found, and what to do.
"""

import errno
import os

__all__ = [
    "ArtifactError",
    "DeviceError",
    "DoesNotFitError",
    "InputError",
    "MissingExtraError",
    "NotMetError",
    "PiError",
    "PromptError",
    "TemplateError",
    "UsageError",
]

NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file system or a limit allows no larger file",
}
"""What the system's errors say when there is no room for a file."""


_LONGEST = 20_000
"""Characters of a field of a message, which may quote a file with anything in it."""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


class PiError(Exception):
    """Base of every error that a user can cause. `str(error)` is the whole message, one field a line."""

    exit_code = 1

    def __init__(self, what: str, *, expected: object = None, found: object = None, remedy: str | None = None) -> None:
        self.what, self.expected, self.found, self.remedy = what, expected, found, remedy
        fields = (("expected", expected), ("found", found), ("try", remedy))
        super().__init__("\n".join([_cut(what), *(f"  {k}: {_cut(str(v))}" for k, v in fields if v is not None)]))


class UsageError(PiError):
    exit_code = 2


class DeviceError(UsageError):
    pass


class MissingExtraError(UsageError):
    pass


class InputError(PiError):
    exit_code = 3


class ArtifactError(InputError):
    pass


class PromptError(InputError):
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
    name: str | os.PathLike[str],
    error: OSError | UnicodeDecodeError,
    remedy: str,
    kind: type[InputError] = InputError,
) -> InputError:
    """The error of an input file that is not there, or cannot be read; `name` is its path, or its flag and path."""
    if isinstance(error, UnicodeDecodeError):
        return kind(f"{name}: cannot be read as text", found=error, remedy=remedy)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return kind(f"{name}: no such file", remedy=remedy)
    return kind(f"{name}: cannot be read", found=error.strerror, remedy=remedy)
