"""Device memory that decoding works in, allocated once: captured graphs hold its addresses.

`buffers.gpu_workspace` has its sizes.

Shape letters: D model width, W width of the embedding, X experts of which a token goes to K, F neurons of these
together, H heads, E head width, Q = (H + 2 G) E with G key-value heads, O = H E, R largest rank of a predictor, V
vocabulary, L layers, S splits of a sum, or positions in the tables of angles, J pairs of columns that are rotated.
"""

from dataclasses import dataclass

import torch

from pi_runtime.artifact.buffers import gpu_workspace, handover_slots
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.cuda.kernels.attention import AttentionPartials
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.memory.devices import Device, allocate
from pi_runtime.cuda.memory.handover import Handover
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
    cuts_L2X: torch.Tensor
    """int32: how many neurons of each expert are on the GPU, and the first row of each among them (see `Cuts`)."""
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
    cos_SJ: torch.Tensor
    sin_SJ: torch.Tensor

    @classmethod
    def allocate(cls, d: Decoder, rank: int, context: int, device: Device) -> "Workspace":
        """A workspace for predictors up to this rank and positions up to this context."""

        t, parts, mixed = allocate(gpu_workspace(d, rank, context), device), device.tiling.parts, d.n_heads * d.head_dim

        def neurons(name: str) -> NeuronList:
            return NeuronList(t.pop(f"{name}_index_F"), t.pop(f"{name}_count"))

        for name, table in zip(("cos_SJ", "sin_SJ"), rotary_table(d, context), strict=True):
            t[name].copy_(torch.from_numpy(table))
        handover = Handover(t.pop("handover"), d.d_model, handover_slots(d))
        # The tiles of a device may take fewer parts and splits than there is room for.
        out, maxima, sums = (t.pop(f"partial_{name}") for name in ("out", "max", "sum"))
        t["sums_SD"] = t["sums_SD"][: device.tiling.splits]
        return cls(
            handover=handover,
            partials=AttentionPartials(
                out[: parts * mixed].view(d.n_heads, parts, d.head_dim),
                maxima[: parts * d.n_heads].view(d.n_heads, parts),
                sums[: parts * d.n_heads].view(d.n_heads, parts),
            ),
            hot=neurons("hot"),
            expert_hot=neurons("expert_hot"),
            expert_cold=neurons("expert_cold"),
            kept=neurons("kept"),
            **t,
        )
