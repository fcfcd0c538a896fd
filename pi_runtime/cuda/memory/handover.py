"""What GPU and CPU hand each other while a token is decoded, and the pinned memory that it goes through.

Shape letters: D model width, K experts of a token (0 without experts), F neurons of these together, L layers.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.memory.devices import Device


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

    @classmethod
    def words_of(cls, d: Decoder) -> int:
        """Words of a handover of this decoder."""
        return d.d_model + 2 * slots_of(d) + 1 + d.experts_per_token * d.d_ff

    @classmethod
    def pinned(cls, d: Decoder, device: Device) -> "Handover":
        return cls(device.pinned(cls.words_of(d), torch.int32), d.d_model, slots_of(d))

    def first(self, rows: int | None) -> torch.Tensor:
        """The words that carry at most `rows` rows; with None, neither rows nor their number."""
        return self.words[: self._end if rows is None else self._end + 1 + rows]

    def arrays(self) -> HandoverArrays:
        return HandoverArrays(*(getattr(self, field.name).numpy() for field in fields(HandoverArrays)))


def slots_of(d: Decoder) -> int:
    """Experts that a handover names."""
    return d.experts_per_token if d.n_experts > 1 else 0


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
        def floats(count: int) -> torch.Tensor:
            return device.pinned(count, torch.float32)

        return cls(
            token=device.pinned(2, torch.int64),
            handover_to_host=Handover.pinned(d, device),
            handover_to_device=Handover.pinned(d, device),
            sum_to_host=floats(d.d_model),
            sum_to_device=floats(d.d_model),
            x_to_host=floats(d.d_model),
            x_to_device=floats(d.d_model),
            logits=floats(d.vocab_size),
            rows_L2=device.pinned(2 * d.n_layers, torch.int32).view(d.n_layers, 2),
        )
