"""What kernels should compute, in float64, and how far float32 arithmetic may be from it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.artifact.quantisation import integers
from support.stored import StoredMatrix

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
# The unit roundoff, and the largest error of one operation whose result is denormal.
U, TINY = 2.0**-24, 2.0**-149


def bound(terms: int, magnitude: npt.ArrayLike) -> F64:
    """Largest error of a sum of products in any order (Higham, 2002, section 3.1), denormals included."""
    return (terms + 1) * U * 1.01 * np.asarray(magnitude, np.float64) + (terms + 1) * TINY


class Exact(NamedTuple):
    """A value, and how far from it a kernel may be."""

    value: F64
    error: F64

    def holds(self, found: npt.ArrayLike) -> bool:
        return bool(np.all(np.abs(np.asarray(found, np.float64) - self.value) <= self.error))


class InputBlocks(NamedTuple):
    """Inputs as bytes and scales: x ≈ t q. B blocks of J = 32 columns, the last one filled up with zeros."""

    q_TBJ: npt.NDArray[np.int64]
    t_TB: F32


def blocks_of(x_TD: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Columns in blocks of 32, filled up with zeros."""
    *rest, columns = x_TD.shape
    padded_columns = np.zeros((*rest, -(-columns // BLOCK) * BLOCK), x_TD.dtype)
    padded_columns[..., :columns] = x_TD
    return padded_columns.reshape(*rest, -1, BLOCK)


def input_blocks(x_TD: F32) -> InputBlocks:
    """t = max |x| / 127 in float32, q = round(x · (1 / t)) half to even; zeros where t is not a normal number."""
    x_TBJ = blocks_of(x_TD)
    t_TB = np.abs(x_TBJ).max(-1) / np.float32(127)
    t_TB[t_TB < np.float32(2.0**-126)] = 0
    inverse_TB = np.divide(np.float32(1), t_TB, out=np.zeros_like(t_TB), where=t_TB > 0)
    return InputBlocks(np.rint(x_TBJ * inverse_TB[..., None]).astype(np.int64), t_TB)


def product(m: StoredMatrix, x_TD: F32) -> Exact:
    """x Wᵀ (T, N). For block formats, with x as bytes: Σ_b s_b t_b Σ_j w_j q_j, and Σ_b m_b t_b Σ_j q_j for minima m.

    Kernels may keep the integer sums of four columns apart and add them as floats: each is one rounding of s t and one
    addition away from the total, through at most B + 20 additions.
    """
    if not m.quantised:
        x, w = x_TD.astype(np.float64), m.values.astype(np.float64)
        return Exact(x @ w.T, bound(w.shape[1], np.abs(x) @ np.abs(w).T))
    assert m.scales is not None
    q_TBJ, t_TB = input_blocks(x_TD)
    blocks = q_TBJ.shape[1]
    f = FORMATS[m.format]
    s_NB, offset_NB = m.beside(blocks)
    divisor = np.where(s_NB == 0, 1, s_NB)[..., None]
    w_NBJ = np.rint(blocks_of(m.values).astype(np.float64) / divisor).astype(np.int64)
    if f.offset:
        w_NBJ = blocks_of(integers(f, m.stored, m.values.shape[1])).astype(np.int64)
        w_NBJ -= offset_NB[..., None].astype(np.int64) * (f.offset == "zero")
    fours = np.einsum("tbki,nbki->tnbk", q_TBJ.reshape(*q_TBJ.shape[:2], -1, 4), w_NBJ.reshape(*w_NBJ.shape[:2], -1, 4))
    scale_TNB = t_TB[:, None].astype(np.float64) * s_NB
    value = (scale_TNB * fours.sum(-1)).sum(-1)
    whole = np.abs(fours).sum(-1)
    additions, magnitude = blocks + 20, (np.abs(scale_TNB) * whole).sum(-1)
    if f.offset == "minimum":
        sums_TBK = q_TBJ.reshape(*q_TBJ.shape[:2], -1, 4).sum(-1)
        minima_TNB = t_TB[:, None].astype(np.float64) * offset_NB
        value += (minima_TNB * sums_TBK.sum(-1)[:, None]).sum(-1)
        magnitude += (np.abs(minima_TNB) * np.abs(sums_TBK).sum(-1)[:, None]).sum(-1)
        additions += blocks + 20
    error = (additions + 2) * U * 1.01 * magnitude + TINY * (whole.sum(-1) + additions)
    return Exact(value, error)
