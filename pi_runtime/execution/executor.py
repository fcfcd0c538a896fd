"""The interface of executors, which run a model: a step of one or more sequences in, a result for each out.

CPU, stand-in and GPU implement it, and a caller uses nothing else of them.

Shape letters: T tokens of a sequence in this step, D model width, K experts of a token, V vocabulary, L layers, C·D
states of some layers side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.execution.guess_head import GuessHeadRun
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagePool
from pi_runtime.execution.plan_choice import Allocation

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Observer(Protocol):
    """Looks on at a run between two operations; what it sees belongs to the run, and changes with the next one."""

    def see(self, layer: int, input_TD: Floats, expert_TK: Ints | None) -> None:
        """The input of a layer's FFN, which is about to run, and the tokens' experts; None: those that it routes to."""


@dataclass(frozen=True, kw_only=True)
class SequenceStep:
    """The work of one sequence in a step: its next tokens run, and join those its cache holds."""

    cache: KVCache
    """No two sequences of a step share one."""
    tokens: Ints
    """Up to `Executor.block_tokens` tokens; with selection each gets the bits that it gets alone. Ids and room are the
    caller's promise."""
    select: bool
    """Whether to skip what the layers' rungs skip; else every neuron is computed."""
    logits: Literal["last", "all"] = "last"
    """The tokens whose logits are wanted; `all` takes up to `BLOCK_TOKENS` tokens."""
    observer: "Observer | None" = None
    """Who looks on at the FFNs of these tokens; with `select` and `all` logits."""
    is_tried: bool = False
    """Whether some of these tokens may be taken back afterwards; at most `Executor.draft_tokens` then."""
    states: tuple[int, ...] = ()
    """Layers, rising, whose inputs are wanted of these tokens, where the executor keeps states; the number of layers
    stands for what leaves the last one."""


@dataclass(frozen=True, kw_only=True)
class SequenceResult:
    """The result of one sequence in a step. It belongs to the caller: no later step changes it."""

    logits_TV: Floats
    """One row for each token, or (1, V) for the last one."""
    rows_L2: Ints | None = None
    """Rows of `first` read and neurons kept, for a single token with selection."""
    states_TC: Floats | None = None
    """The residual stream as it enters the layers that were named, side by side, for each token."""


@dataclass(frozen=True)
class DiskStats:
    """What decoding with rows from disk took, since the executor began; prompts are not counted."""

    tokens: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0
    """Time in which nothing could be computed before more rows had come."""
    hits: int = 0
    """Rows that were in memory when they were asked for."""
    misses: int = 0
    bytes_read: int = 0

    def __sub__(self, before: "DiskStats") -> "DiskStats":
        pairs = zip(vars(self).values(), vars(before).values(), strict=True)
        return DiskStats(*(now - then for now, then in pairs))

    def __add__(self, more: "DiskStats") -> "DiskStats":
        return DiskStats(*map(sum, zip(vars(self).values(), vars(more).values(), strict=True)))

    def figures(self) -> dict[str, float | None]:
        """The figures that users are told."""
        return {
            "disk_hit_rate": self.hit_rate,
            "disk_bytes_per_token": self.bytes_per_token,
            "disk_wait_share": self.wait_share,
        }

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows that were in memory; None where none was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes that came from disk for one token."""
        return self.bytes_read / self.tokens if self.tokens else None

    @property
    def wait_share(self) -> float | None:
        """Share of the time that was spent waiting for the disk."""
        return self.seconds_waited / self.seconds if self.seconds else None


class Executor(Protocol):
    """Runs one artifact in one mode. Steps of several threads take turns."""

    context: int
    """Positions that a cache holds."""

    @property
    def allocation(self) -> Allocation | None:
        """The plan it follows and the GPU's bytes that this takes; None where the CPU has everything."""

    @property
    def device_name(self) -> str:
        """The device it runs on: `cpu`, `stand-in`, or a GPU by its name."""

    @property
    def notice(self) -> str | None:
        """A message for the user about where it runs, if there is one."""

    @property
    def disk(self) -> DiskStats | None:
        """What reading rows from disk took; None where all weights are in memory."""

    @property
    def kv_room(self) -> int | None:
        """Bytes that further keys and values may take; None where nothing limits them."""

    @property
    def block_tokens(self) -> int:
        """Most tokens of a prompt that a sequence brings to a step."""

    @property
    def draft_tokens(self) -> int:
        """Most tokens of a sequence that a step computes together with selection; 1: it runs them one by one."""

    @property
    def keeps_states(self) -> bool:
        """Whether a step can give the residual stream."""

    @property
    def guess_head(self) -> GuessHeadRun | None:
        """What drafts tokens from the states of a step; None where the artifact has no such head, or it cannot run."""

    @property
    def neurons(self) -> int:
        """Neurons of all layers and experts."""

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences; returns a result for each, in their order.

        A sequence's result does not depend on the others. Pages that are missing are reserved. Raises UsageError once
        the executor is closed, and PagesExhausted, before anything runs, where a pool has too few pages.
        """

    def new_pool(self, budget: int | None = None) -> PagePool:
        """Pages for caches of some sequences, together at most `budget` bytes."""

    def new_cache(self, pool: PagePool | None = None) -> KVCache:
        """An empty cache for one sequence, in pages of a pool, or with a pool of its own."""

    def close(self) -> None:
        """Close the artifact and free what was allocated; `step` refuses from now on."""
