"""The key-value cache: what attention remembers of the positions so far."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import kv_shape


class KVCache:
    """Keys and values (layers, 2, G, S, E), float32, for one sequence of at most S = `context` positions."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        self.context = context
        self.tokens: list[int] = []
        """Tokens whose keys and values are held, in order."""
        # zeros, not empty: the pages are mapped only when they are written.
        self.values: npt.NDArray[np.float32] = np.zeros(kv_shape(decoder, context), np.float32)

    @property
    def room(self) -> int:
        """Positions left."""
        return self.context - len(self.tokens)

    def keep_common(self, tokens: Sequence[int]) -> int:
        """Forget what does not begin `tokens`; returns how many are held, fewer than all of them.

        The last token always runs again, because its logits are wanted.
        """
        same = 0
        for held, wanted in zip(self.tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            same += 1
        del self.tokens[same:]
        return same
