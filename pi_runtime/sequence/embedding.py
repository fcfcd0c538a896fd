"""A text's embedding: one vector of what the model computes of its tokens, behind the last layer and its norm.

Shape letters: T tokens, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pi_runtime.errors import ArtifactError, ContextError, PromptError
from pi_runtime.sequence.sequence import Floats, Rank, ReadSequence

Pooling = Literal["mean", "last"]
"""What a text's vector is made of: the mean over all tokens, or the last token alone."""


class EmbeddingSequence(ReadSequence):
    """A text whose vector is wanted. All of its tokens run, dense as those of prompts do."""

    def __init__(
        self,
        ids: Sequence[int],
        *,
        context: int,
        layers: int,
        norm: Callable[[Floats], npt.NDArray[np.float64]],
        pooling: Pooling,
    ) -> None:
        """`norm`: what stands behind the last of the `layers`. Raises PromptError for no tokens, or too many."""
        if not ids:
            raise PromptError("there is no token to embed", remedy="give a text of at least one character")
        if len(ids) > context:
            raise ContextError(f"{len(ids)} tokens", expected=f"at most the context of {context}")
        super().__init__(ids, Rank.ASKED)
        self._layers, self._norm, self._pooling, self._sum_D = layers, norm, pooling, np.zeros(0)

    @property
    def num_reusable(self) -> int:
        """How many first tokens need not run if their keys and values are stored: all but those that are pooled."""
        return self.num_computed if self._pooling == "mean" else len(self.tokens) - 1

    @property
    def states(self) -> tuple[int, ...]:
        """What leaves the last layer."""
        return (self._layers,)

    def take_states(self, first: int, states_TC: Floats | None) -> None:
        """Add those of tokens from position `first` on to the vector. Sums go token by token, however a text is cut."""
        assert states_TC is not None
        rows_TD = self._norm(states_TC)
        if self._pooling == "last":
            self._sum_D = rows_TD[-1]
            return
        if first == 0:
            self._sum_D = np.zeros(rows_TD.shape[1])
        for row_D in rows_TD:
            self._sum_D = self._sum_D + row_D

    @property
    def vector(self) -> list[float]:
        """The vector, of length 1. Raises ArtifactError where the model's numbers overflowed."""
        length = float(np.sqrt(np.square(self._sum_D).sum()))
        if not np.isfinite(length) or length == 0:
            raise ArtifactError(
                f"the vector of the text has the length {length}",
                expected="a finite one",
                remedy="`pi-compile verify` on the artifact; if it is whole, its weights overflow the arithmetic",
            )
        found: list[float] = (self._sum_D / length).astype(np.float32).tolist()
        return found
