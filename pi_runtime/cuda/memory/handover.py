"""What GPU and CPU hand each other while a token is decoded, and the pinned memory that it goes through.

Shape letters: D model width, K experts of a token (0 without experts), F neurons of these together, L layers.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.artifact.buffers import handover_slots, pinned_buffers
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.memory.devices import Device, allocate_pinned


@dataclass(frozen=True)
class HandoverArrays:
    """A handover in pinned memory as NumPy arrays, for the CPU's kernels."""

    x_D: npt.NDArray[np.float32]
    route_weight_K: npt.NDArray[np.float32]
    expert_K: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    index_F: npt.NDArray[np.int32]


@dataclass
class Handover:
    """What one copy carries across: the FFN's input, the token's experts and their weights, and the selected rows.

    int32 [D + K + K + 1 + F]; the first D + K are float32 numbers, the 1 is the number of rows.
    """

    words: torch.Tensor
    width: int
    slots: int
    """K."""

    def __post_init__(self) -> None:
        self._end = self.width + 2 * self.slots  # words before the number of rows
        rows = len(self.words) - self._end - 1
        parts = self.words.split([self.width, self.slots, self.slots, 1, rows])
        self.x_D, self.route_weight_K = (part.view(torch.float32) for part in parts[:2])
        self.expert_K, self.count, self.index_F = parts[2:]

    def first(self, rows: int | None) -> torch.Tensor:
        """The words that carry at most `rows` rows; with None, neither rows nor their number."""
        return self.words[: self._end if rows is None else self._end + 1 + rows]

    def arrays(self) -> HandoverArrays:
        return HandoverArrays(*(getattr(self, field.name).numpy() for field in fields(HandoverArrays)))


@dataclass(frozen=True)
class PinnedBuffers:
    """Pinned memory that GPU and CPU copy from and to."""

    token: torch.Tensor
    """int64: token, position."""
    handover_to_host: Handover
    handover_to_device: Handover
    sum_to_host: torch.Tensor
    sum_to_device: torch.Tensor
    x_to_host: torch.Tensor
    x_to_device: torch.Tensor
    logits: torch.Tensor
    rows_L2: torch.Tensor

    @classmethod
    def allocate(cls, d: Decoder, device: Device) -> "PinnedBuffers":
        t = allocate_pinned(pinned_buffers(d), device)
        to_host, to_device = (
            Handover(t.pop(f"handover_to_{to}"), d.d_model, handover_slots(d)) for to in ("host", "device")
        )
        return cls(handover_to_host=to_host, handover_to_device=to_device, **t)
