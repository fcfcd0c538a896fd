"""Dense products of a block of tokens by torch, whose matrix products reach the limit of the hardware.

Float formats are used as they are stored; block formats are dequantised to float16, some rows at a time. A 16-bit
product rounds its inputs to 16 bits and sums in float32. An `exact` product takes all weights as float32, some rows at
a time.

Shape letters: T tokens, D columns (model width), N rows of a matrix, F neurons.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import dense_rows
from pi_runtime.cuda.kernels.dequantise import dequantise_rows
from pi_runtime.cuda.kernels.ffn_neurons import Neurons
from pi_runtime.cuda.kernels.matrix import DeviceMatrix

_GELU = torch.nn.functional.gelu
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "drelu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": _GELU,
    "gelu_tanh": lambda z: _GELU(z, approximate="tanh"),
}
_TINY = 2.0**-100


@contextmanager
def float32_accumulation() -> Iterator[None]:
    """Within it, products of 16-bit numbers are summed in float32; else torch lets cuBLAS sum parts in 16 bits."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = before


def float_rows(m: DeviceMatrix, low: int, high: int, *, exact: bool = False) -> torch.Tensor:
    """Rows [low, high) as floats that torch can multiply with."""
    if m.scales is None:
        stored_ND = m.values[low:high, : m.columns]
        return stored_ND.float() if exact else stored_ND
    dtype = torch.float32 if exact else torch.float16
    w_ND = torch.empty(high - low, m.columns, dtype=dtype, device=m.values.device)
    dequantise_rows(m, None, low, w_ND)
    return w_ND


def linear(m: DeviceMatrix, bias_N: torch.Tensor | None, x_TD: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """x Wᵀ + bias (T, N), float32."""
    step = m.rows if m.scales is None and not exact else dense_rows(len(x_TD))
    y_TN = torch.empty(len(x_TD), m.rows, device=x_TD.device)
    for low in range(0, m.rows, step):
        w_ND = float_rows(m, low, min(m.rows, low + step), exact=exact)
        y_TN[:, low : low + step] = x_TD.to(w_ND.dtype) @ w_ND.T
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def add_neurons(n: Neurons, d: Decoder, x_TD: torch.Tensor, y_TD: torch.Tensor) -> None:
    """y ← y + Σ h_i down_i over all neurons."""
    step = dense_rows(len(x_TD))
    for low in range(0, n.count, step):
        high = min(n.count, low + step)
        h_TN = _activations(n, d, low, high, x_TD)
        w_ND = float_rows(n.down, low, high)
        if w_ND.dtype == torch.float32:
            y_TD += h_TN @ w_ND
        else:
            # Activations can exceed what 16 bits hold: they are scaled to at most 1, and the sum is scaled back.
            scale_T1 = h_TN.abs().amax(1, keepdim=True).clamp_min(_TINY)
            y_TD += (h_TN / scale_T1).to(w_ND.dtype).mm(w_ND).float() * scale_T1


def _activations(
    n: Neurons, d: Decoder, low: int, high: int, x_TD: torch.Tensor, *, exact: bool = False
) -> torch.Tensor:
    """h (T, high − low) of the neurons [low, high)."""

    def part(m: DeviceMatrix, bias_F: torch.Tensor | None) -> torch.Tensor:
        return linear(m[low:high], None if bias_F is None else bias_F[low:high], x_TD, exact=exact)

    h_TN = ACTIVATIONS[d.activation](part(n.first, n.first_bias))
    if d.threshold:
        h_TN = torch.where(h_TN <= d.threshold, 0.0, h_TN)
    if n.rows_per_neuron == 2:
        up_TN = part(n.rest[::2], n.up_bias)
        h_TN *= up_TN.relu_() if d.activation == "drelu" else up_TN
    return h_TN
