"""The activation of a neuron, chosen when a kernel is compiled."""

import triton
import triton.language as tl

from pi_runtime.artifact.decoder import ACTIVATIONS

CODES = {name: code for code, name in enumerate(ACTIVATIONS) if name != "clamped_swiglu"}
"""The number of each activation that a GPU computes, which kernels branch on."""
_RELU2, _SILU = tl.constexpr(CODES["relu2"]), tl.constexpr(CODES["silu"])
_GELU, _GELU_TANH = tl.constexpr(CODES["gelu"]), tl.constexpr(CODES["gelu_tanh"])
DRELU = tl.constexpr(CODES["drelu"])


@triton.jit
def _sigmoid(z):
    """1 / (1 + e⁻ᶻ), without an exponential that overflows."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def activate(z, limit, KIND: tl.constexpr):
    """a(z) (see `artifact.decoder`), and 0 where its magnitude is at most `limit`."""
    if KIND == _SILU:
        h = z * _sigmoid(z)
    elif KIND == _GELU:
        h = z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        h = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))  # (1 + tanh y) / 2 = 1 / (1 + e⁻²ʸ)
    else:
        h = tl.where(z <= 0.0, 0.0, z)  # NaN stays
        if KIND == _RELU2:
            h = h * h
    return tl.where(tl.abs(h) <= limit, 0.0, h)
