"""What can go wrong while compiling: errors added to the tree of `pi_runtime.errors`, and a hint for misspelt names.

InputError                    exit code 3   something that was read is not usable
├── CheckpointError                         a checkpoint that is damaged, incomplete or not understood
├── RecipeError                             a recipe with unknown, missing or contradicting keys
├── CorpusError                             a corpus that is missing, unreadable or too short
├── TaskError                               a task file that is missing, unreadable or not understood
├── ProfileError                            an activation profile that is missing, damaged or of another model
└── TrainingError                           a training that diverged, or whose saved state is of another
PiError
└── TaskFailedError                         a task of a build that failed; it has the exit code of its error
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

from pi_runtime.errors import InputError, PiError

_LONGEST = 80
"""Characters of a value that a message quotes."""


class CheckpointError(InputError):
    pass


class RecipeError(InputError):
    pass


class CorpusError(InputError):
    pass


class ProfileError(InputError):
    pass


class TaskError(InputError):
    usual_remedy = "mend this line, or take it out"


class TrainingError(InputError):
    pass


class TaskFailedError(PiError):
    """A task of a build that failed for good. `exit_code` is that of the error it failed with."""

    def __init__(self, what: str, message: str, log: Path, exit_code: int) -> None:
        super().__init__(
            what, found=message, remedy=f"{log} has its log; what is done is kept, `build` goes on from it"
        )
        self.exit_code = exit_code


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is most like; None where none is."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def shown(value: object) -> str:
    """A value as a message quotes it, in a line of moderate length."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
