"""The walk through a model's layers: six operations in their order, each on the side that a plan gives it.

    embed   { [move]  attention  ffn  after_ffn } for each layer   [move]  head

A layer without an FFN ends with its attention; one without attention begins with its FFN's input, which the same
operation makes. A move stands where the residual has to change sides. Every executor that goes through layers one by
one does it by such a list; what an operation does is up to its side. Whoever observes a run looks on between two
operations.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from pi_runtime.artifact.schema import Plan
from pi_runtime.execution.plan_layout import CPU


class Side(Protocol):
    """What a side can do with the tokens that it was given."""

    def embed(self, layer: int, /) -> None:
        """x ← the tokens' embeddings."""

    def move(self, layer: int, /) -> None:
        """Bring the residual x here from the other side."""

    def attention(self, layer: int, /) -> None:
        """x ← x + attention(x); and the input of the layer's FFN."""

    def ffn(self, layer: int, /) -> None:
        """x ← x + FFN(its input), or both sides' parts of the sum."""

    def after_ffn(self, layer: int, /) -> None:
        """What follows the FFN's sum: parts of other sides, its bias, and a norm where the block has it there."""

    def head(self, layer: int, /) -> None:
        """The logits of the tokens for which they are wanted."""


class Operation(NamedTuple):
    """One step of the walk."""

    name: Literal["embed", "move", "attention", "ffn", "after_ffn", "head"]
    side: str
    """The side that runs it; of a move, the one that it leads to."""
    layer: int
    """Its layer; −1 before the first one, and the number of layers behind the last one."""

    def run(self, sides: Mapping[str, Side]) -> None:
        """Let its side run it."""
        getattr(sides[self.side], self.name)(self.layer)


Schedule = tuple[Operation, ...]


def schedule_of(plan: Plan, without_ffn: Sequence[int] = ()) -> Schedule:
    """The operations of a model whose parts are where a plan has them; some layers have no FFN."""
    return tuple(_operations(plan.embedding, plan.attention, plan.head, without_ffn))


def one_side_schedule(layers: int, without_ffn: Sequence[int] = ()) -> Schedule:
    """The operations of a model with so many layers, all of it on the CPU."""
    return tuple(_operations(CPU, [CPU] * layers, CPU, without_ffn))


def _operations(embedding: str, attention: Sequence[str], head: str, without_ffn: Sequence[int]) -> Iterator[Operation]:
    yield Operation("embed", embedding, -1)
    before = embedding
    for layer, side in enumerate([*attention, head]):
        if side != before:
            yield Operation("move", side, layer)
        before = side
        if layer == len(attention):
            yield Operation("head", side, layer)
        else:
            yield Operation("attention", side, layer)
            if layer not in without_ffn:
                yield Operation("ffn", side, layer)
                yield Operation("after_ffn", side, layer)
