"""Memory that a run on the GPU works in, allocated once: captured graphs hold its addresses.

D model width, X experts of which a token goes to K, F neurons of these together, H heads, E head width, Q = (H + 2G) E,
R largest rank, V vocabulary, S positions.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.kernels.attention import Parts
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.kernels.reference import rotary_table


@dataclass(frozen=True)
class Parcel:
    """What one hand-over carries in one copy: the FFN's input, of a mixture the experts taken and their shares, and the
    rows that were predicted, with their number.

    int32 [D + K + K + 1 + F], K = 0 without experts; the first D + K are float32 numbers.
    """

    words: torch.Tensor
    width: int
    slots: int
    """K."""

    @classmethod
    def words_of(cls, d: Decoder) -> int:
        """How many words it has."""
        return d.d_model + 2 * slots_of(d) + 1 + d.experts_per_token * d.d_ff

    @property
    def x_D(self) -> torch.Tensor:
        return self.words[: self.width].view(torch.float32)

    @property
    def share_K(self) -> torch.Tensor:
        return self.words[self.width : self.width + self.slots].view(torch.float32)

    @property
    def taken_K(self) -> torch.Tensor:
        return self.words[self.width + self.slots : self._end]

    @property
    def count(self) -> torch.Tensor:
        return self.words[self._end : self._end + 1]

    @property
    def index_F(self) -> torch.Tensor:
        return self.words[self._end + 1 :]

    @property
    def _end(self) -> int:
        """Words before the rows and their number."""
        return self.width + 2 * self.slots

    def first(self, rows: int | None) -> torch.Tensor:
        """As much of it as carries up to so many rows, or none and no number."""
        return self.words[: self._end if rows is None else self._end + 1 + rows]


def slots_of(d: Decoder) -> int:
    """Experts that a parcel names."""
    return d.experts_per_token if d.n_experts > 1 else 0


@dataclass(frozen=True)
class Buffers:
    """In GPU memory; float32 unless said otherwise. Zeros at first: no list is longer than it may be."""

    token: torch.Tensor
    """int64, one."""
    position: torch.Tensor
    """int64, one: of the token, or of a block's first."""
    x_D: torch.Tensor
    narrow_W: torch.Tensor
    """A row of the embedding where that is not as wide as the model."""
    parcel: Parcel
    qkv_Q: torch.Tensor
    mixed_E: torch.Tensor
    parts: Parts
    r_R: torch.Tensor
    """Of a mixture R for each expert taken."""
    router_X: torch.Tensor
    marks_F: torch.Tensor
    counts_F: torch.Tensor
    """int32, more than there are tiles."""
    hot_F: torch.Tensor
    """int32: predicted rows here, and how many."""
    hot_count: torch.Tensor
    members_F: torch.Tensor
    """int32, with experts: the neurons here of those taken; `rows_F` their rows in the whole layer, and `others_F` the
    rows of the neurons that are not here."""
    rows_F: torch.Tensor
    others_F: torch.Tensor
    members_count: torch.Tensor
    others_count: torch.Tensor
    h_F: torch.Tensor
    kept_F: torch.Tensor
    """int32: neurons that fire, how strongly, and how many."""
    kept_h_F: torch.Tensor
    kept_count: torch.Tensor
    sums_SD: torch.Tensor
    other_D: torch.Tensor
    """The partial sum of the other side."""
    rows_L2: torch.Tensor
    """int32: rows of `first` read here and neurons kept, of each layer."""
    logits_V: torch.Tensor
    cos_SJ: torch.Tensor | None
    sin_SJ: torch.Tensor | None


def buffers(decoder: Decoder, rank: int, context: int, device: Device) -> Buffers:
    d, e = decoder, decoder.head_dim

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device.device)

    def integers(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    parts, turned = device.tiling.parts, d.positions == "rope"
    listed = d.experts_per_token * d.d_ff
    routed = listed if d.n_experts > 1 else 0
    angles = [torch.from_numpy(table).to(device.device) for table in rotary_table(d, context)]
    return Buffers(
        token=zeros(1, dtype=torch.int64),
        position=zeros(1, dtype=torch.int64),
        x_D=zeros(d.d_model),
        narrow_W=zeros(d.d_embedding if d.d_embedding != d.d_model else 0),
        parcel=Parcel(integers(Parcel.words_of(d)), d.d_model, slots_of(d)),
        qkv_Q=zeros((d.n_heads + 2 * d.n_kv_heads) * e),
        mixed_E=zeros(d.n_heads * e),
        parts=Parts(zeros(d.n_heads, parts, e), zeros(d.n_heads, parts), zeros(d.n_heads, parts)),
        r_R=zeros(d.experts_per_token * max(rank, 1)),
        router_X=zeros(d.n_experts if routed else 0),
        marks_F=zeros(listed),
        counts_F=integers(listed),
        hot_F=integers(listed),
        hot_count=integers(1),
        members_F=integers(routed),
        rows_F=integers(routed),
        others_F=integers(routed),
        members_count=integers(1),
        others_count=integers(1),
        h_F=zeros(listed),
        kept_F=integers(listed),
        kept_h_F=zeros(listed),
        kept_count=integers(1),
        sums_SD=zeros(device.tiling.splits, d.d_model),
        other_D=zeros(d.d_model),
        rows_L2=integers(d.n_layers, 2),
        logits_V=zeros(d.vocab_size),
        cos_SJ=angles[0] if turned else None,
        sin_SJ=angles[1] if turned else None,
    )


def nbytes(b: Any) -> int:
    """Bytes of all tensors of a dataclass."""
    values = [getattr(b, field.name) for field in fields(b)]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return sum(t.nbytes for t in tensors) + sum(nbytes(v) for v in values if isinstance(v, Parcel | Parts))
