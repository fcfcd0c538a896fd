"""Device memory that decoding works in, allocated once: captured graphs hold its addresses.

Shape letters: D model width, W width of the embedding, X experts of which a token goes to K, F neurons of these
together, H heads, E head width, Q = (H + 2 G) E with G key-value heads, O = H E, R largest rank of a predictor, V
vocabulary, L layers, S splits of a sum, or positions in the tables of angles, J pairs of columns that are rotated.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.kernels.attention import AttentionPartials
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.handover import Handover, slots_of
from pi_runtime.kernels.reference import rotary_table


@dataclass(frozen=True)
class Workspace:
    """Tensors in device memory, zero at first; float32 unless said otherwise."""

    token: torch.Tensor
    """int64, one number."""
    position: torch.Tensor
    """int64, one number: the token's position, or that of a block's first token."""
    x_D: torch.Tensor
    narrow_W: torch.Tensor
    """A row of an embedding that is not as wide as the model."""
    handover: Handover
    qkv_Q: torch.Tensor
    attn_out_O: torch.Tensor
    partials: AttentionPartials
    r_R: torch.Tensor
    """down · x of a low-rank predictor; in a mixture R numbers for each of the token's experts."""
    router_X: torch.Tensor
    marks_F: torch.Tensor
    counts_F: torch.Tensor
    """int32, one number for each tile."""
    hot: NeuronList
    """Selected rows on the GPU."""
    expert_hot: NeuronList
    """Rows on the GPU of the token's experts."""
    expert_hot_rows_F: torch.Tensor
    """int32: the same neurons by their rows in the whole layer."""
    expert_cold: NeuronList
    """Neurons of the token's experts that are not on the GPU, by their rows in the whole layer."""
    h_F: torch.Tensor
    kept: NeuronList
    """Neurons that fire."""
    kept_h_F: torch.Tensor
    sums_SD: torch.Tensor
    host_sum_D: torch.Tensor
    """The CPU's sum on its way in, or this side's sum on its way out."""
    rows_L2: torch.Tensor
    """int32: rows of `first` read on the GPU and neurons kept there, for each layer."""
    logits_V: torch.Tensor
    cos_SJ: torch.Tensor | None
    sin_SJ: torch.Tensor | None

    @classmethod
    def allocate(cls, d: Decoder, rank: int, context: int, device: Device) -> "Workspace":
        """A workspace for predictors up to this rank and positions up to this context."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.device)

        def integers(*shape: int) -> torch.Tensor:
            return zeros(*shape, dtype=torch.int32)

        def neurons(room: int) -> NeuronList:
            return NeuronList(integers(room), integers(1))

        parts, rotated, e = device.tiling.parts, d.positions == "rope", d.head_dim
        listed = d.experts_per_token * d.d_ff
        routed = listed if d.n_experts > 1 else 0
        angles = [torch.from_numpy(table).to(device.device) for table in rotary_table(d, context)]
        return cls(
            token=zeros(1, dtype=torch.int64),
            position=zeros(1, dtype=torch.int64),
            x_D=zeros(d.d_model),
            narrow_W=zeros(narrow_width(d)),
            handover=Handover(integers(Handover.words_of(d)), d.d_model, slots_of(d)),
            qkv_Q=zeros((d.n_heads + 2 * d.n_kv_heads) * e),
            attn_out_O=zeros(d.n_heads * e),
            partials=AttentionPartials(zeros(d.n_heads, parts, e), zeros(d.n_heads, parts), zeros(d.n_heads, parts)),
            r_R=zeros(d.experts_per_token * max(rank, 1)),
            router_X=zeros(d.n_experts if routed else 0),
            marks_F=zeros(listed),
            counts_F=integers(listed),
            hot=neurons(listed),
            expert_hot=neurons(routed),
            expert_hot_rows_F=integers(routed),
            expert_cold=neurons(routed),
            h_F=zeros(listed),
            kept=neurons(listed),
            kept_h_F=zeros(listed),
            sums_SD=zeros(device.tiling.splits, d.d_model),
            host_sum_D=zeros(d.d_model),
            rows_L2=integers(d.n_layers, 2),
            logits_V=zeros(d.vocab_size),
            cos_SJ=angles[0] if rotated else None,
            sin_SJ=angles[1] if rotated else None,
        )

    @property
    def nbytes(self) -> int:
        return _nbytes(self)


def narrow_width(d: Decoder) -> int:
    """Width of an embedding that is not as wide as the model, else 0."""
    return d.d_embedding if d.d_embedding != d.d_model else 0


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in a dataclass."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_nbytes(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0
