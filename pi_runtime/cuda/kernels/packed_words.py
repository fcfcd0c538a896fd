"""Rows of q8 and q4 in groups of eight blocks (see `artifact.formats`), read as words of 32 bits.

A word has four columns of a block in q8, eight in q4, and words 8 k + b of a group belong to block b. A thread takes
four neighbouring words of some rows: 16 bytes, four neighbouring scales, and of the vector runs of four numbers, which
it keeps for all its rows.

q8: a byte is converted. q4: one mask and one "or" make two numbers. With u, u' the integers of nibbles 16 bits apart,

    v = (word, shifted) & 0x00780078 | 0x41804180         as float32:  v = 16 + u + c + u' / 2¹⁶,  c = 0x4180 / 2¹⁹
    v << 16                                               as float32:  16 + u'

    Σ (u − 8) x + (u' − 8) x'  =  Σ v x + (v << 16) (x' − x / 2¹⁶) − (24 + c − 2⁻¹²) x − 24 x'

where the last two terms do not depend on the row. Sums of so few numbers lose nothing that counts to the 24.

Legend: R rows, W words, Q = W / 4 threads' worth of words.
"""

import triton
import triton.language as tl

from pi_runtime.artifact.formats import FORMATS

_Q4 = tl.constexpr(FORMATS["q4"].code)
_OWN = tl.constexpr(24.0)
_BEYOND = tl.constexpr(24.0 + 0x4180 / 2**19 - 2**-12)
_PART = tl.constexpr(2.0**-16)


@triton.jit
def groups_of(columns):
    """Whole groups of eight blocks in a row."""
    return (columns + 31) // 32 // 8


@triton.jit
def words_of(columns, FMT: tl.constexpr):
    """Words in them."""
    return groups_of(columns) * (32 if FMT == _Q4 else 64)


@triton.jit
def word_column(word, FMT: tl.constexpr):
    """The first column of a word; in q4 four more start 16 further on."""
    PER: tl.constexpr = 32 if FMT == _Q4 else 64
    return word // PER * 256 + word % 8 * 32 + word % PER // 8 * 4


@triton.jit
def word_tile(values, stride, row_R, word_W, mask_RW):
    """[R, W] words of these rows; `stride` in bytes."""
    words = values.to(tl.pointer_type(tl.int32))
    at_R1 = (row_R.to(tl.int64) * (stride // 4))[:, None]
    return tl.load(words + at_R1 + word_W[None, :], mask=mask_RW, other=0)


@triton.jit
def word_scales(scales, stride, row_R, word_W, mask_RW, FMT: tl.constexpr):
    """[R, W] scales of the words' blocks."""
    PER: tl.constexpr = 32 if FMT == _Q4 else 64
    block_W = tl.max_contiguous(word_W // PER * 8 + word_W % 8, 4)
    at_R1 = (row_R.to(tl.int64) * stride)[:, None]
    return tl.load(scales + at_R1 + block_W[None, :], mask=mask_RW, other=0.0).to(tl.float32)


@triton.jit
def byte(word, J: tl.constexpr):
    """Byte J of q8 as a number."""
    return ((word << (24 - 8 * J)) >> 24).to(tl.float32)


@triton.jit
def nibble(word, BIT: tl.constexpr):
    """The number u − 8 of the nibble at bit BIT of q4, by itself."""
    return (((word >> BIT) & 15) - 8).to(tl.float32)


@triton.jit
def mask_of(values):
    """0x00780078, from an address, which is below 2⁶³: a constant that the compiler knew it would make anew each time,
    because an instruction has room for one, and the exponents are that one."""
    return 0x00780078 | (values.to(tl.int64) >> 63).to(tl.int32)


@triton.jit
def pair(word, BIT: tl.constexpr, mask):
    """(v << 16, v) of the nibbles at bits BIT and BIT + 16, as float32."""
    v = word << 3 - BIT if BIT < 3 else word >> BIT - 3
    v = (v & mask) | 0x41804180
    return (v << 16).to(tl.float32, bitcast=True), v.to(tl.float32, bitcast=True)


@triton.jit
def sums_of_pair(low, high, h):
    """(Σ h (u − 8), Σ h (u' − 8)) from Σ h (v << 16), Σ h v and Σ h."""
    return high - low * _PART - h * _BEYOND, low - h * _OWN


@triton.jit
def _runs(x, first_Q, limit, W: tl.constexpr):
    """Four [W]: numbers 0 to 3 of the run of each word; run i of a thread's four starts 32 i after its first."""
    # In this shape a thread loads the runs of the very words that it has: nothing goes from one thread to another.
    at = 32 * tl.arange(0, 4)[:, None, None] + first_Q[None, :, None] + tl.arange(0, 4)[None, None, :]
    x_4Q4 = tl.load(x + at, mask=at < limit, other=0.0)
    even, odd = tl.split(tl.reshape(tl.permute(x_4Q4, (1, 0, 2)), [W, 2, 2]))
    x0_W, x2_W = tl.split(even)
    x1_W, x3_W = tl.split(odd)
    return x0_W, x1_W, x2_W, x3_W


@triton.jit
def word_dots(
    values, scales, stride, scales_stride, columns, row_R, mask_R, x,
    FMT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """[R] row · x over whole groups; 0 where `mask_R` is false, and such a row is not read."""
    sums_RW = tl.zeros([R, W], tl.float32)
    words = words_of(columns, FMT)
    mask = mask_of(values)
    limit = tl.minimum(columns, groups_of(columns) * 256)
    for start in range(0, words, W):
        word_W = start + tl.arange(0, W)
        mask_RW = mask_R[:, None] & (word_W < words)[None, :]
        w_RW = word_tile(values, stride, row_R, word_W, mask_RW)
        scale_RW = word_scales(scales, scales_stride, row_R, word_W, mask_RW, FMT)
        first_Q = word_column(start + 4 * tl.arange(0, W // 4), FMT)
        x0_W, x1_W, x2_W, x3_W = _runs(x, first_Q, limit, W)
        if FMT == _Q4:
            x4_W, x5_W, x6_W, x7_W = _runs(x, first_Q + 16, limit, W)
            beyond_W = (x2_W + x3_W) + (x6_W + x7_W)
            sum_RW = -(((x0_W + x1_W) + (x4_W + x5_W)) * _OWN + beyond_W * _BEYOND)[None, :]
            low_RW, high_RW = pair(w_RW, 0, mask)
            sum_RW += low_RW * (x0_W - x2_W * _PART)[None, :]
            sum_RW += high_RW * x2_W[None, :]
            low_RW, high_RW = pair(w_RW, 8, mask)
            sum_RW += low_RW * (x1_W - x3_W * _PART)[None, :]
            sum_RW += high_RW * x3_W[None, :]
            low_RW, high_RW = pair(w_RW, 4, mask)
            sum_RW += low_RW * (x4_W - x6_W * _PART)[None, :]
            sum_RW += high_RW * x6_W[None, :]
            low_RW, high_RW = pair(w_RW, 12, mask)
            sum_RW += low_RW * (x5_W - x7_W * _PART)[None, :]
            sum_RW += high_RW * x7_W[None, :]
        else:
            sum_RW = byte(w_RW, 0) * x0_W[None, :]
            sum_RW += byte(w_RW, 1) * x1_W[None, :]
            sum_RW += byte(w_RW, 2) * x2_W[None, :]
            sum_RW += byte(w_RW, 3) * x3_W[None, :]
        sums_RW += sum_RW * scale_RW
    return tl.sum(sums_RW, 1)
