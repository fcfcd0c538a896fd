"""What GPU and CPU hand each other while tokens are decoded, and the pinned memory that it goes through.

What M tokens hand over lies one after the other, so that it crosses in one copy.

Shape letters: M tokens, D model width, K experts of a token (0 without experts), F neurons of these together, L layers
(in `table_ML` pages of a sequence), V vocabulary.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.artifact.buffers import kv_pages
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.gpu_buffers import handover_ends, handover_slots, pinned_buffers
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.memory.devices import Device, allocate_pinned


@dataclass
class TokenWords:
    """Which tokens are decoded, and where they stand: int64 positions, ids, and tables of their sequences' pages."""

    words: torch.Tensor
    pages: int
    """Pages of a sequence."""
    tokens: int

    def __post_init__(self) -> None:
        self.used = self.words[: self.tokens * (2 + self.pages)]
        self.position_M, self.id_M = self.used[: 2 * self.tokens].view(2, self.tokens)
        self.table_ML = self.used[2 * self.tokens :].view(self.tokens, self.pages)

    def first(self, tokens: int) -> "TokenWords":
        """The same memory for so many tokens."""
        return replace(self, tokens=tokens)


@dataclass(frozen=True)
class HandoverArrays:
    """A handover in pinned memory as NumPy arrays, for the CPU's kernels."""

    x_MD: npt.NDArray[np.float32]
    route_weight_MK: npt.NDArray[np.float32]
    expert_MK: npt.NDArray[np.int32]
    count_M: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]

    def listed(self, rows: int) -> npt.NDArray[np.int32]:
        """The selected rows, of each token at most so many."""
        tokens = len(self.count_M)
        return self.rows[: tokens * rows].reshape(tokens, rows)


@dataclass
class Handover:
    """What one copy carries across: FFN inputs, the tokens' experts and their weights, and the selected rows.

    int32 words; inputs and weights are float32 numbers. The rows' number comes before the rows.
    """

    words: torch.Tensor
    width: int
    slots: int
    """K."""
    tokens: int

    def __post_init__(self) -> None:
        parts, begin = [], 0
        self._ends = handover_ends(self.width, self.slots, self.tokens)
        for end, width in zip(self._ends, (self.width, self.slots, self.slots, 1), strict=True):
            parts.append(self.words[begin : begin + self.tokens * width].view(self.tokens, width))
            begin = end
        self.x_MD, self.route_weight_MK = (part.view(torch.float32) for part in parts[:2])
        self.expert_MK, self.count_M, self.rows = parts[2], parts[3][:, 0], self.words[begin:]

    def listed(self, rows: int) -> NeuronList:
        """The selected rows, of each token at most so many."""
        return NeuronList.of(self.rows[: self.tokens * rows].view(self.tokens, rows), self.count_M)

    def first(self, rows: int | None) -> torch.Tensor:
        """The words that carry at most `rows` rows of each token; with None, neither rows nor their number."""
        return self.words[: self._ends[2] if rows is None else self._ends[3] + self.tokens * rows]

    def arrays(self) -> HandoverArrays:
        return HandoverArrays(*(getattr(self, field.name).numpy() for field in fields(HandoverArrays)))


@dataclass(frozen=True)
class PinnedBuffers:
    """Pinned memory that GPU and CPU copy from and to."""

    token_words: TokenWords
    handover_to_host: Handover
    handover_to_device: Handover
    sum_to_host: torch.Tensor
    sum_to_device: torch.Tensor
    x_to_host: torch.Tensor
    x_to_device: torch.Tensor
    logits_MV: torch.Tensor
    rows_ML2: torch.Tensor

    @classmethod
    def allocate(cls, d: Decoder, context: int, tokens: int, device: Device) -> "PinnedBuffers":
        """Memory for up to so many tokens."""
        t = allocate_pinned(pinned_buffers(d, context, tokens), device)
        words = TokenWords(t.pop("token_words"), kv_pages(context), tokens)
        to_host, to_device = (
            Handover(t.pop(f"handover_to_{to}"), d.d_model, handover_slots(d), tokens) for to in ("host", "device")
        )
        return cls(token_words=words, handover_to_host=to_host, handover_to_device=to_device, **t)

    def first(self, tokens: int) -> "PinnedBuffers":
        """The same memory for the first tokens alone."""
        return replace(self, **{field.name: first_tokens(getattr(self, field.name), tokens) for field in fields(self)})


def first_tokens(values: Any, tokens: int) -> Any:
    """The same memory for the first tokens alone."""
    return values[:tokens] if isinstance(values, torch.Tensor) else replace(values, tokens=tokens)
