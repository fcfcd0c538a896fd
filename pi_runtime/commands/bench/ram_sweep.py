"""Decoding within a ladder of memory budgets, from the smallest that fits up to the one that was asked for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi_runtime.artifact.rows import useful_budgets
from pi_runtime.commands.bench.rendering import CURVE
from pi_runtime.console import Progress
from pi_runtime.engine.model import Model
from pi_runtime.errors import Setting, UsageError, size
from pi_runtime.execution.disk_rows import PartlyOnDisk
from pi_runtime.execution.executor import DiskStats
from pi_runtime.execution.host_executor import HostExecutor
from pi_runtime.sequence.sampling import Sampler, Sampling

BUDGETS = 6
LEAD, MOST_TOKENS = 8, 64
"""Tokens before those that are timed, and most of these."""
WIDTH = 30
"""Characters of the fastest budget's bar."""


@dataclass(frozen=True, kw_only=True)
class BudgetRow:
    """What decoding took within one budget."""

    budget: int
    seconds: tuple[float, ...]
    """Seconds that each timed token took."""
    disk: DiskStats

    @property
    def tokens_per_s(self) -> float:
        """Tokens decoded per second."""
        return len(self.seconds) / sum(self.seconds)

    def percentile_s(self, percent: int) -> float:
        """Seconds that so many percent of the tokens took at most."""
        return float(np.percentile(self.seconds, percent))


def sweep(
    open_model: Callable[[int], Model],
    most: int,
    limit_s: float,
    progress: Progress,
    rows: list[BudgetRow],
) -> None:
    """Decode within `BUDGETS` budgets up to `most`, the largest first, for `limit_s` seconds in all.

    Appends to rows. Raises UsageError where the context is too short, DoesNotFitError where not even `most` is enough.
    """
    least, whole = _useful(open_model, most)
    budgets = np.linspace(min(most, whole), least, BUDGETS).astype(int).tolist()
    for n, budget in enumerate(budgets):
        progress(n, len(budgets))
        rows.append(_decoded(open_model, budget, limit_s / len(budgets)))
    progress(len(budgets), len(budgets))


def _useful(open_model: Callable[[int], Model], budget: int) -> tuple[int, int]:
    """The least and the largest budget that are of use to the model, which is opened within this one."""
    with open_model(budget) as model:
        if model.context <= LEAD:
            raise UsageError(
                f"a curve over budgets needs a context of {LEAD + 1} tokens",
                found=model.context,
                remedy=("raise ", Setting("context")),
            )
    assert isinstance(model.executor, HostExecutor)
    assert isinstance(model.executor.rows, PartlyOnDisk)
    return useful_budgets(model.manifest, model.executor.rows.plan.fixed)


def _decoded(open_model: Callable[[int], Model], budget: int, limit_s: float) -> BudgetRow:
    """Let a model go on from a random token, as it samples."""
    with open_model(budget) as model:
        assert model.executor.disk is not None
        model.warm_up()
        vocabulary, cache = model.manifest.decoder.vocab_size, model.new_cache()
        tokens, seconds = [int(np.random.default_rng(0).integers(vocabulary))], list[float]()
        sampler = Sampler(Sampling(temperature=1.0, seed=0), vocabulary)
        before, end = model.executor.disk, time.perf_counter() + limit_s
        while cache.room and len(seconds) < LEAD + MOST_TOKENS:
            if len(seconds) == LEAD:
                before = model.executor.disk
            began = time.perf_counter()
            if len(seconds) > LEAD and began > end:
                break
            logits_V, _ = model.decode(tokens[-1], cache)
            seconds.append(time.perf_counter() - began)
            tokens.append(sampler(logits_V, tokens))
        return BudgetRow(budget=budget, seconds=tuple(seconds[LEAD:]), disk=model.executor.disk - before)


def values(row: BudgetRow) -> dict[str, Any]:
    """A row as plain values."""
    figures = row.disk.figures()
    return {"ram_budget": row.budget, "tokens_per_s": row.tokens_per_s, "seconds": row.seconds, **figures}


def cells(rows: Sequence[BudgetRow]) -> list[dict[str, str]]:
    """The rows of a table, with a bar as long as a budget is fast."""
    fastest = max((row.tokens_per_s for row in rows), default=0)
    return [
        {
            "budget": size(row.budget),
            "tokens/s": f"{row.tokens_per_s:.2f}",
            "p50 ms": f"{1e3 * row.percentile_s(50):.1f}",
            "p99 ms": f"{1e3 * row.percentile_s(99):.1f}",
            "hits": _share(row.disk.hit_rate),
            "read/token": size(row.disk.bytes_per_token or 0),
            "waiting": _share(row.disk.wait_share),
            CURVE: "█" * max(1, round(WIDTH * row.tokens_per_s / fastest)),
        }
        for row in rows
    ]


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
