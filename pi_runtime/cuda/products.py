"""Products of a stored matrix with one vector."""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.matrices import Matrix
from pi_runtime.cuda.rows import row_dots
from pi_runtime.cuda.tiling import Tiling


def linear(
    m: Matrix, bias: torch.Tensor | None, x_D: torch.Tensor, y_N: torch.Tensor, tiling: Tiling, *, add: bool = False
) -> None:
    """y = W x + bias, or y ← y + W x + bias; float32 x (D) and y (N), N the rows of m."""
    assert x_D.shape == (m.columns,), (x_D.shape, m.columns)
    assert y_N.shape == (m.rows,), (y_N.shape, m.rows)
    assert x_D.dtype == y_N.dtype == torch.float32
    assert bias is None or bias.shape == y_N.shape
    rows, width = tiling.dots(m)
    _linear[(triton.cdiv(m.rows, rows),)](
        m.values, m.scales, bias, x_D, y_N, *m.strides, m.width, m.columns, m.rows,
        m.code, bias is not None, add, rows, width, **tiling.dot_options(m),
    )  # fmt: skip


@triton.jit
def _linear(
    values, scales, bias, x, y, stride, scales_stride, width, columns, rows,
    FMT: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    there_R = row_R < rows
    y_R = row_dots(values, scales, stride, scales_stride, width, columns, row_R, there_R, x, FMT, R, C)
    if BIASED:
        y_R += tl.load(bias + row_R, mask=there_R, other=0.0)
    if ADD:
        y_R += tl.load(y + row_R, mask=there_R, other=0.0)
    tl.store(y + row_R, y_R, mask=there_R)
