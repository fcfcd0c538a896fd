"""What can go wrong while compiling: leaves added to the tree of `pi_runtime.errors`.

InputError                    exit code 3   something that was read is not usable
├── CheckpointError                         a checkpoint that is damaged, incomplete or not understood
├── RecipeError                             a recipe with unknown, missing or contradicting keys
├── CorpusError                             a corpus that is missing, unreadable or too short
├── TaskError                               a task file that is missing, unreadable or not understood
└── ProfileError                            an activation profile that is missing, damaged or of another model
"""

from pi_runtime.errors import InputError

__all__ = ["CheckpointError", "CorpusError", "ProfileError", "RecipeError", "TaskError"]


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
