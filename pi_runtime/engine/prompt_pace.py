"""How many tokens of prompts the next step reads: whether any, by `DecodeShare`, and how many, by what steps took.

A step has a fixed cost, such as reading all weights once, and a cost of each token. Tokens of a prompt that share a
step share its fixed cost. But every answer waits until the step ends, so a larger piece makes gaps longer. Where no
answer is being written nobody waits, and a step reads as much as the executor takes. Else a piece is so large that its
own work takes `OWN` times as long as the fixed cost. That is little where weights are in memory, and much where they
come from a disk or over a bus. Both costs are those of a line through the times of steps.
"""

from collections import defaultdict, deque

import numpy as np

from pi_runtime.engine.scheduler import PIECE, DecodeShare

OWN = 2
"""The work of a piece's tokens, in fixed costs. This makes the product of a step's time and the square of a whole
prompt's least: the longest gap counts once, the time in which all wait twice. A prompt then takes at most half as long
again as in the largest steps, and a gap is three times the shortest one."""
LATEST = 4
"""Steps of a size whose shortest time counts: others may hold up a step, and nothing makes it faster than it is."""


class PieceSize:
    """Chooses how many tokens of a prompt run in a step beside answers: `PIECE`, doubled as often as it pays."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._steps: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=LATEST))
        """Seconds and tokens of the latest steps of each size, by powers of two."""
        self.tokens = min(PIECE, max_tokens)
        """The size of the next piece."""

    def count(self, seconds: float, tokens: int) -> None:
        """Count a step that held so many tokens of prompts."""
        self._steps[tokens.bit_length()].append((seconds, tokens))
        # Never more than twice what is known: a line says little of what is far away.
        limit = min(self._max_tokens, 2 * max(size for steps in self._steps.values() for _, size in steps))
        wanted = min(limit, self._worthwhile())
        self.tokens = min(PIECE, self._max_tokens)
        while 2 * self.tokens <= wanted:
            self.tokens *= 2

    def _worthwhile(self) -> float:
        """The tokens whose own work takes `OWN` times as long as the fixed cost."""
        seconds_N, tokens_N = np.array([min(steps) for steps in self._steps.values()]).T
        if len(tokens_N) == 1:
            return 2 * float(tokens_N[0])
        each_s, fixed_s = np.polyfit(tokens_N, seconds_N, 1, w=1 / np.maximum(seconds_N, 1e-9))
        return float(OWN * fixed_s / each_s) if each_s > 0 else np.inf


class PromptPace:
    """Says how many tokens of prompts the next step may read.

    `share`: the share of their speed that answers keep, 0 for prompts first. `piece`: tokens in a step, None to go by
    what steps took. `block`: most tokens that one sequence can bring.
    """

    def __init__(self, share: float, piece: int | None, block: int) -> None:
        self._share, self._waits = DecodeShare(share), share > 0
        self._piece, self._block, self._size = piece, block, PieceSize(block)

    def tokens(self, decoding: int, *, ahead: bool = False) -> int:
        """Most tokens of prompts in the next step, beside so many answers; 0 where prompts have to wait.

        `ahead`: whether nobody waits for these prompts, but a request that comes would wait for the step's end.
        """
        if not self._share.allows_prompts(decoding):
            return 0
        if self._piece is not None:
            return self._piece
        return self._size.tokens if (decoding or ahead) and self._waits else self._block

    def count(self, seconds: float, decoding: int, prompt_tokens: int, gained: float = 1.0) -> None:
        """Count a step: its time, its answers and tokens of prompts, and the tokens that each answer gained."""
        self._share.count(seconds, decoding, prompt_tokens > 0, gained)
        if prompt_tokens:
            self._size.count(seconds, prompt_tokens)
