"""A decoder described by data: everything the forward pass must know beside the weights.

One block is  x ← x + attention(norm(x));  x ← x + ffn(norm(x)).  The FFN is, per neuron i with activation a,

    plain   h_i = a(fc1_i · x + b_i)                       y = Σ h_i fc2_i + b
    gated   h_i = a(gate_i · x + b_i) (up_i · x + c_i)     y = Σ h_i down_i + b
"""

from dataclasses import dataclass

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
FFNS = ("plain", "gated")
ACTIVATIONS = ("relu", "silu")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape and function of a decoder-only transformer."""

    family: str
    """Name of the adapter that read it; for display, no behaviour depends on it."""
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    """Heads of keys and values; a divisor of `n_heads` (grouped-query attention)."""
    head_dim: int
    d_ff: int
    """Neurons of one FFN."""
    context_length: int
    """Positions the model was made for."""
    norm: str
    """`rms`: x / √(mean x² + eps) · w;  `layer`: (x − mean) / √(var + eps) · w + b."""
    norm_eps: float
    positions: str
    """`rope`: halves of each head rotated by angles pos · theta^(−2j/head_dim);  `learned`: a table is added."""
    rope_theta: float
    """Base of the rotary angles; 0 where positions are learned."""
    position_offset: int
    """Row of the learned table that holds position 0; 0 with rope."""
    ffn: str
    activation: str
    tied_head: bool
    """Whether the output head is the embedding table."""
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool

    @property
    def sparse(self) -> bool:
        """Whether the activation is exactly zero for inactive neurons, so that skipping them is exact."""
        return self.activation == "relu"
