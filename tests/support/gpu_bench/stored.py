"""Numbers as an artifact stores them, made on their device: rows of f16, q8 or q4 (see `artifact.formats`).

A block's scale is its largest magnitude ÷ 127, or ÷ 7. `pi-compile` chooses better ones, which takes longer and runs as
fast.
"""

import math

import torch

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.cuda.kernels.dequantise import dequantise_rows
from pi_runtime.cuda.kernels.matrix import DTYPES, DeviceMatrix


def store(fmt: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stored array and its scales, padded with zeros."""
    leading, columns = w.shape[:-1], w.shape[-1]
    if fmt == "f16":
        return _padded(w.to(torch.float16), FORMATS[fmt].stored_shape(w.shape)), None
    most, blocks = 127 if fmt == "q8" else 7, -(-columns // BLOCK)
    w_NBJ = torch.nn.functional.pad(w, (0, blocks * BLOCK - columns)).reshape(-1, blocks, BLOCK)
    scales_NB = (w_NBJ.abs().amax(-1) / most).to(torch.float16)
    q_NBJ = (w_NBJ / scales_NB[..., None].float().clamp_min(2.0**-24)).round().clamp(-most, most).to(torch.int8)
    q_NC = _in_places(q_NBJ)
    if fmt == "q4":
        q_NC = _in_pairs(q_NC + 8, blocks // 8 * 8 * BLOCK)
    stored = _padded(q_NC.reshape(*leading, -1), FORMATS[fmt].stored_shape(w.shape))
    return stored, _padded(scales_NB.reshape(*leading, blocks), FORMATS["scale"].stored_shape((*leading, blocks)))


def dequantised(fmt: str, stored: torch.Tensor, scales: torch.Tensor | None, columns: int) -> torch.Tensor:
    """The numbers that a stored array stands for, as float32."""
    rows = math.prod(stored.shape[:-1])
    flat = None if scales is None else scales.reshape(rows, -1)
    w_ND = torch.empty(rows, columns, device=stored.device)
    dequantise_rows(DeviceMatrix(fmt, stored.view(DTYPES[fmt]).reshape(rows, -1), flat, columns), None, 0, w_ND)
    return w_ND.reshape(*stored.shape[:-1], columns)


def _in_places(q_NBJ: torch.Tensor) -> torch.Tensor:
    """Interleave fours of columns of every eight blocks."""
    rows, grouped = len(q_NBJ), q_NBJ.shape[1] // 8 * 8
    groups = q_NBJ[:, :grouped].reshape(rows, -1, 8, 8, 4).transpose(2, 3)
    return torch.cat([groups.reshape(rows, -1), q_NBJ[:, grouped:].reshape(rows, -1)], 1)


def _in_pairs(u_NC: torch.Tensor, grouped: int) -> torch.Tensor:
    """Put two numbers into a byte: places 128 apart in groups, 32 apart behind them; 0 where there is no second."""

    def joined(part: torch.Tensor, apart: int) -> torch.Tensor:
        whole = torch.nn.functional.pad(part, (0, -part.shape[1] % (2 * apart))).reshape(len(part), -1, 2, apart)
        return (whole[:, :, 0] | whole[:, :, 1] << 4).reshape(len(part), -1)

    u_NC = u_NC.to(torch.uint8)
    return torch.cat([joined(u_NC[:, :grouped], 128), joined(u_NC[:, grouped:], 32)], 1)


def _padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, shape[-1] - x.shape[-1])).contiguous()
