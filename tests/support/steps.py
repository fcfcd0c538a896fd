"""One sequence's step, for tests of executors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pi_runtime.execution.executor import Executor, SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache


def step(executor: Executor, ids: Sequence[int], cache: KVCache, *, select: bool, **wanted: Any) -> SequenceResult:
    """What comes of these tokens; `wanted` are further fields of the step."""
    return executor.step([SequenceStep(cache=cache, tokens=np.array(ids, np.int64), select=select, **wanted)])[0]
