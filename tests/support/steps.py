"""One sequence's step, for tests of executors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.executor import Executor, SequenceResult, SequenceStep
from pi_runtime.execution.firing import Firing
from pi_runtime.execution.kv_cache import KVCache


def examined(
    executor: Executor, path: Path, mode: str, ids: Sequence[int], cache: KVCache
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Logits of these tokens with selection, and what fires in the FFNs of the artifact that the executor runs."""
    with Artifact.open(path) as artifact:
        firing = Firing(artifact, mode)
        found = step(executor, ids, cache, select=True, logits="all", observer=firing)
        return found.logits_TV, firing.counts_L3


def step(executor: Executor, ids: Sequence[int], cache: KVCache, *, select: bool, **wanted: Any) -> SequenceResult:
    """What comes of these tokens; `wanted` are further fields of the step."""
    return executor.step([SequenceStep(cache=cache, tokens=np.array(ids, np.int64), select=select, **wanted)])[0]
