"""What placing predicts of a run from disk: tokens per second, share of rows in memory, bytes that a token reads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.divided_rows import divided
from support.row_traces import Trace, counts, persistence

from disk_tier import CONTEXT
from pi_compile.cost_model import Workload
from pi_compile.machine import Machine
from pi_compile.placement import Problem, all_cpu
from pi_compile.placement.three_tiers import ThreeTiers
from pi_compile.results import MILLION, LayerWork
from pi_runtime.artifact.reader import Artifact


class Prediction:
    """A machine's times for one artifact and one text, whose needs are recorded: see `engine.trace`."""

    def __init__(
        self, path: Path, machine: Machine, named: Sequence[Trace], fired: Sequence[Trace],
        routed: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """`named`, `fired`: the neurons of each layer that the predictor names, and that turn out to fire.

        `routed`: (L, X), how many tokens each layer's experts got, of a mixture.
        """
        with Artifact.open(path) as artifact:
            m = artifact.manifest
        self._neurons = neurons = m.decoder.neurons
        over = [1e6 * sum(map(len, n)) / sum(map(len, f)) for n, f in zip(named, fired, strict=True)]
        work = Workload(
            decoder=m.decoder,
            formats=m.formats,
            tokens=len(fired[0]),
            counts=np.stack([counts(trace, neurons) for trace in fired]),
            routed=routed,
            persistence=np.array([persistence(trace, neurons) for trace in fired]),
            layers=tuple(
                LayerWork(rung=layer.rung, rank=layer.rank, read_ppm=max(MILLION, round(ppm)))
                for layer, ppm in zip(m.layers, over, strict=True)
            ),
            context=CONTEXT,
        )
        # Runs from disk leave a GPU out.
        self._problem = Problem.of(work, machine.model_copy(update={"gpu": None, "link": None}))

    def of(self, first: list[list[int]], rest: list[list[int]]) -> tuple[float, float, float]:
        """The figures of a run with these pinned and cached rows of each layer."""
        rows = self._problem.rows
        assert rows is not None
        chosen = tuple(
            divided(rows, n, pinned, cached, first[n][0] == self._neurons) for n, (pinned, cached) in enumerate(rest)
        )
        time = ThreeTiers(self._problem, rows, 0).time(all_cpu(len(chosen)), chosen)
        needed, missed = (sum(getattr(one, name) for one in chosen) for name in ("needed", "missed"))
        return 1e12 / time.total, 1 - missed / needed, sum(one.read for one in chosen)
