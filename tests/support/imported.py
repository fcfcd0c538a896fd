"""Imports what builds and trainings import late: in a process that has it, a fork costs milliseconds, not seconds.

Nothing is called: a library that has started threads must not be forked.
"""

import datasets
import scipy.stats
import transformers.integrations.accelerate
import transformers.models.llama.modeling_llama

__all__ = ["datasets", "scipy", "transformers"]
