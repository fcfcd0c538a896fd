"""What can go wrong while compiling: errors added to the tree of `pi_runtime.errors`, and a hint for misspelt names.

InputError                    exit code 3   something that was read is not usable
├── CheckpointError                         a checkpoint that is damaged, incomplete or not understood
├── RecipeError                             a recipe with unknown, missing or contradicting keys
├── CorpusError                             a corpus that is missing, unreadable or too short
├── TaskError                               a task file that is missing, unreadable or not understood
├── ProfileError                            an activation profile that is missing, damaged or of another model
└── TrainingError                           a training that diverged, or whose saved state is of another
"""

import difflib
from collections.abc import Iterable

from pi_runtime.errors import InputError

__all__ = ["CheckpointError", "CorpusError", "ProfileError", "RecipeError", "TaskError", "TrainingError", "nearest"]


class CheckpointError(InputError):
    pass


class RecipeError(InputError):
    pass


class CorpusError(InputError):
    pass


class ProfileError(InputError):
    pass


class TaskError(InputError):
    pass


class TrainingError(InputError):
    pass


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is most like; None where none is."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return found[0] if found else None
