"""Exit codes and messages of the errors that end a command."""

import errno
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from pi_runtime.errors import (
    NO_ROOM,
    DoesNotFitError,
    MissingExtraError,
    PiError,
    Setting,
    UsageError,
    install,
    write_error,
)

EXTRA_OF = {
    "highspy": "place",
    "scipy": "place",
    "matplotlib": "report",
    "pydantic": "compile",  # place has it too, but whoever lacks it most likely lacks the rest of compile
    "accelerate": "compile",
    "datasets": "compile",
    "gguf": "pack",
    "huggingface_hub": "pack",
    "safetensors": "pack",
    "torch": "compile",
    "transformers": "pack",
    "zarr": "compile",
    "triton": "cuda",
    "llguidance": "grammar",
    "starlette": "serve",
    "uvicorn": "serve",
    "ray": "ray",
}
"""Extra that installs each optional package."""
FLAGS = {"context": "--ctx-size", "output": "-o"}
"""Flags that are not spelled as their settings are."""
INTERRUPTED = 130
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_FAILING = {
    **dict.fromkeys((errno.EIO, errno.ENXIO, errno.ENODEV), "the disk is sound (dmesg)"),
    errno.ESTALE: "the file server answers and its folder is mounted",
}
"""What to look at, for each error of storage that fails."""


def flag(setting: Setting) -> str:
    """A setting as the command line has it: `--max-tokens 0`."""
    name, value = FLAGS.get(setting.name, f"--{setting.name.replace('_', '-')}"), setting.value
    if name.endswith("-budget") and isinstance(value, int):  # bytes, which a flag has with a unit
        value = f"{value}B" if value % 2**20 else f"{value >> 20}MiB"
    return name if value is None else f"{name} {value}"


def code_and_message(error: BaseException) -> tuple[int, str]:
    """Exit code and message of an error. Whatever the user cannot cause is an internal error, 1."""
    if isinstance(error, KeyboardInterrupt) or (
        _is_named(error, "Abort") and not isinstance(error.__cause__, EOFError)
    ):
        return INTERRUPTED, "interrupted"
    if hasattr(error, "format_message"):  # click's own: a flag it does not know, a missing argument
        return getattr(error, "exit_code", UsageError.exit_code), _usage(error)
    known = error if isinstance(error, PiError) else _as_user_error(error)
    if known is not None:
        return known.exit_code, f"error: {known.message(flag)}"
    return 1, f"error: internal error: {type(error).__name__}: {error}\n  try: run again with --debug"


def _as_user_error(error: BaseException) -> PiError | None:
    """Turn an exception of a library or the system into an error in the user's terms; None where it has none."""
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error.name or "")
    if isinstance(error, MemoryError):
        return DoesNotFitError("not enough memory", found=str(error) or None)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return write_error(_place(error), error, "name an output on another disk")
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return UsageError(f"{_place(error)}: {error.strerror}", remedy="change its permissions, or name another place")
    if isinstance(error, OSError) and error.errno in _FAILING:
        remedy = f"see whether {_FAILING[error.errno]}, and run it again; what is done is kept"
        return UsageError(f"{_place(error)}: {error.strerror}", remedy=remedy)
    return None


def missing_extra(module: str, extra: str = "") -> MissingExtraError | None:
    """The error for a package that is not installed; None for one that no extra installs, if `extra` is not said."""
    package = module.partition(".")[0]
    extra = extra or EXTRA_OF.get(package, "")
    if not extra:
        return None
    what = f"{package} is not installed, and this command needs it"
    return MissingExtraError(what, remedy=install(extra))


def check_extra(extra: str, packages: Iterable[str]) -> None:
    """Raise MissingExtraError where one of an extra's packages is not installed."""
    for package in packages:
        if find_spec(package) is None and (error := missing_extra(package, extra)) is not None:
            raise error


def _place(error: OSError) -> str:
    return str(error.filename or "output")


def _is_named(error: BaseException, name: str) -> bool:
    # typer brings its own click, or takes the installed one: the classes differ, their names do not.
    return type(error).__name__ == name


def _usage(error: Any) -> str:
    message = str(error.format_message())
    if _is_named(error, "NoArgsIsHelpError"):  # a command without its arguments: the message is the help text
        return message
    context = getattr(error, "ctx", None)
    return f"error: {message}" + (f"\n  try: {context.command_path} --help" if context else "")
