"""Device memory that decoding works in, allocated once: captured graphs hold its addresses.

`buffers.gpu_workspace` has its sizes.

Shape letters: M tokens that are decoded together, D model width, W width of the embedding, X experts of which a token
goes to K, F neurons of these together, H heads, E head width, Q = (H + 2 G) E with G key-value heads, O = H E, R
largest rank of a predictor, V vocabulary, L layers, S splits of a sum, or positions in the tables of angles, J pairs of
columns that are rotated.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from pi_runtime.artifact.buffers import kv_pages, rotary_table
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.gpu_buffers import gpu_workspace, handover_slots
from pi_runtime.cuda.kernels.attention import AttentionPartials
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.memory.devices import Device, allocate
from pi_runtime.cuda.memory.handover import Handover, TokenWords, first_tokens


@dataclass(frozen=True)
class DeviceWorkspace:
    """Tensors in device memory, zero at first; float32 unless said otherwise."""

    token_words: TokenWords
    """For a prompt: the position of its block's first token, and the table of its sequence."""
    x_MD: torch.Tensor
    narrow_MW: torch.Tensor
    """Rows of an embedding that is not as wide as the model."""
    handover: Handover
    qkv_MQ: torch.Tensor
    attn_out_MO: torch.Tensor
    partials: AttentionPartials
    r_MR: torch.Tensor
    """down · x of a low-rank predictor; in a mixture R numbers for each of a token's experts."""
    router_MX: torch.Tensor
    cuts_L2X: torch.Tensor
    """int32: how many neurons of each expert are on the GPU, and the first row of each among them (see `Cuts`)."""
    marks_MF: torch.Tensor
    counts_MF: torch.Tensor
    """int32, one number for each tile."""
    hot: NeuronList
    """Selected rows on the GPU."""
    expert_hot: NeuronList
    """Rows on the GPU of a token's experts."""
    expert_hot_rows_MF: torch.Tensor
    """int32: the same neurons by their rows in the whole layer."""
    expert_cold: NeuronList
    """Neurons of a token's experts that are not on the GPU, by their rows in the whole layer."""
    h_MF: torch.Tensor
    kept: NeuronList
    """Neurons that fire."""
    kept_h_MF: torch.Tensor
    sums_MSD: torch.Tensor
    host_sum_MD: torch.Tensor
    """The CPU's sum on its way in, or this side's sum on its way out."""
    rows_ML2: torch.Tensor
    """int32: rows of `first` read on the GPU and neurons kept there, for each layer."""
    logits_MV: torch.Tensor
    cos_SJ: torch.Tensor
    sin_SJ: torch.Tensor

    @classmethod
    def allocate(cls, d: Decoder, rank: int, context: int, tokens: int, device: Device) -> "DeviceWorkspace":
        """A workspace for up to so many tokens, predictors up to this rank and positions up to this context."""
        t, tiling = allocate(gpu_workspace(d, rank, context, tokens), device), device.tiling

        def neurons(name: str) -> NeuronList:
            return NeuronList.of(t.pop(f"{name}_index_MF"), t.pop(f"{name}_length_M"))

        def parts(name: str, *shape: int) -> torch.Tensor:
            # The tiles of a device may take fewer parts and splits than there is room for.
            return t.pop(name)[: tokens * prod(shape)].view(tokens, *shape)

        for name, table in zip(("cos_SJ", "sin_SJ"), rotary_table(d, context), strict=True):
            t[name].copy_(torch.from_numpy(table))
        return cls(
            token_words=TokenWords(t.pop("token_words"), kv_pages(context), tokens),
            handover=Handover(t.pop("handover"), d.d_model, handover_slots(d), tokens),
            partials=AttentionPartials(
                parts("partial_out", d.n_heads, tiling.parts, d.head_dim),
                parts("partial_max", d.n_heads, tiling.parts),
                parts("partial_sum", d.n_heads, tiling.parts),
            ),
            sums_MSD=parts("sums_flat", tiling.splits, d.d_model),
            hot=neurons("hot"),
            expert_hot=neurons("expert_hot"),
            expert_cold=neurons("expert_cold"),
            kept=neurons("kept"),
            **t,
        )

    def first(self, tokens: int) -> "DeviceWorkspace":
        """The same memory for the first tokens alone."""

        def of(values: Any) -> Any:
            if isinstance(values, NeuronList):
                return NeuronList.of(values.index_MF[:tokens], values.length_M[:tokens])
            if isinstance(values, AttentionPartials):
                return AttentionPartials(*(part[:tokens] for part in values))
            return first_tokens(values, tokens)

        own = (field.name for field in fields(self) if field.name not in _OF_ALL)
        return replace(self, **{name: of(getattr(self, name)) for name in own})


_OF_ALL = ("cuts_L2X", "cos_SJ", "sin_SJ")
"""What is not a token's."""
