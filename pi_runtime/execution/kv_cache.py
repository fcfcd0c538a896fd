"""The key-value cache: keys and values of the positions so far.

Shape letters: G key-value heads, S positions, E head width.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.buffers import kv_cache
from pi_runtime.artifact.schema import Manifest

Ints = npt.NDArray[np.int64]


class KVCache:
    """Keys and values (layers, 2, G, S, E) for one sequence of at most S = `context` positions.

    Their number type is that of `buffers.kv_cache`.
    """

    def __init__(self, manifest: Manifest, context: int) -> None:
        self.context = context
        self._tokens: list[int] = []
        d = manifest.decoder
        buffer = kv_cache(d, manifest.formats["attention"], context, d.n_layers)
        self.values: npt.NDArray[np.floating] = buffer.in_ram()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens whose keys and values are held, in order."""
        return tuple(self._tokens)

    @property
    def length(self) -> int:
        """Number of positions held."""
        return len(self._tokens)

    @property
    def address(self) -> int:
        """Where the values lie, for compiled kernels."""
        return int(self.values.ctypes.data)

    @property
    def room(self) -> int:
        """Positions left."""
        return self.context - len(self._tokens)

    def keep_common_prefix(self, tokens: Sequence[int]) -> int:
        """Drop what is not a common prefix with `tokens`; returns how many of these are still held, never all.

        The last token always runs again, because its logits are needed.
        """
        same = 0
        for held, wanted in zip(self._tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            same += 1
        self.truncate(same)
        return same

    def append(self, tokens: Ints) -> None:
        """Count these tokens as held, whose keys and values have been written."""
        self._tokens += tokens.tolist()

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` positions; there may be fewer already."""
        del self._tokens[length:]
