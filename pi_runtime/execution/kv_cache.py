"""The key-value cache: what attention remembers of the positions so far."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import kv_itemsize, kv_shape
from pi_runtime.artifact.schema import Manifest


class KVCache:
    """Keys and values (layers, 2, G, S, E) for one sequence of at most S = `context` positions.

    float16, which is half as much to hold and to read; float32 beside attention weights that are.
    """

    def __init__(self, manifest: Manifest, context: int) -> None:
        self.context = context
        self.tokens: list[int] = []
        """Tokens whose keys and values are held, in order."""
        dtype = np.dtype(f"f{kv_itemsize(manifest.formats['attention'])}")
        # zeros, not empty: the pages are mapped only when they are written.
        self.values: npt.NDArray[np.floating] = np.zeros(kv_shape(manifest.decoder, context), dtype)

    @property
    def words(self) -> npt.NDArray[np.uint16]:
        """The same memory as compiled kernels take it: 16-bit words."""
        return self.values.view(np.uint16)

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
