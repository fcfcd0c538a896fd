"""Rotary positions, keys and values into the cache, and attention over it: of single tokens, or of a block of tokens.

The cache is float16 or float32, in pages of which each sequence has a table; sums are float32. Positions and tables
come from device memory, so that one captured graph serves every token. For a single token the positions so far are
split into P parts. Each part keeps its largest score, its sum of exponentials and its weighted sum of values, and
`_combine` puts the parts together in order (flash decoding: Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

Shape letters: T tokens, R runs of consecutive tokens of a sequence, H query heads, G key-value heads, E head width,
Q = (H + 2 G) E, O = H E, N pages of S positions each, L pages of a sequence, P parts, B positions of a step, J pairs of
columns that are rotated.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.tiling import UNFUSED

POSITIONS = 64
"""Positions of one step of a program."""
QUERIES = 32
"""Tokens of a block whose attention a program computes."""
BLOCK_KEY_NUMBERS = 4096
"""Numbers of keys in one step of such a program.

With as many values, and the next step's on their way, it takes 53 KiB of shared memory for heads of 128 and 68 KiB for
256, where GPUs of PCs have 99.
"""


class Places(NamedTuple):
    """Where tokens stand, in device memory, int64: runs of equally many consecutive tokens of a sequence."""

    position_R: torch.Tensor
    """Position of each run's first token."""
    table_RL: torch.Tensor
    """Pages of its sequence."""
    pages: int
    """L."""

    @classmethod
    def of(cls, position_R: torch.Tensor, table_RL: torch.Tensor) -> "Places":
        """One run for each position."""
        assert position_R.dtype == table_RL.dtype == torch.int64
        assert table_RL.is_contiguous()
        assert len(position_R) == len(table_RL)
        return cls(position_R, table_RL, table_RL.shape[1])


class AttentionPartials(NamedTuple):
    """What the parts of each token's attention leave: weighted values, largest scores, and sums of exponentials."""

    out_THPE: torch.Tensor
    max_THP: torch.Tensor
    sum_THP: torch.Tensor


def store_kv(
    qkv_TQ: torch.Tensor,
    places: Places,
    cos_SJ: torch.Tensor | None,
    sin_SJ: torch.Tensor | None,
    cache_N2GSE: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Store keys and values of T tokens in the cache; queries are changed in place.

    `norms` are the weights of an rms norm of each query and of each key, which comes first. Where there are angles,
    (a, b) → (a cos − b sin, b cos + a sin) for the halves of the first 2 J columns of a head; other columns stay.
    """
    _, _, groups, positions, width = cache_N2GSE.shape
    tokens, heads = qkv_TQ.shape[0], qkv_TQ.shape[1] // width - 2 * groups
    assert qkv_TQ.is_contiguous()
    assert cache_N2GSE.is_contiguous()
    half = 0 if cos_SJ is None else cos_SJ.shape[1]
    angles = (cos_SJ, sin_SJ) if half else None
    assert 2 * half <= width
    run_tokens = tokens // len(places.position_R)
    _store_kv[(tokens, heads + 2 * groups)](
        qkv_TQ, places, run_tokens, angles, cache_N2GSE, norms, eps, heads, groups, half, width, positions,
        triton.next_power_of_2(width), **UNFUSED,
    )  # fmt: skip


def attend(
    qkv_TQ: torch.Tensor,
    places: Places,
    cache_N2GSE: torch.Tensor,
    partials: AttentionPartials,
    out_TO: torch.Tensor,
) -> None:
    """softmax(q kᵀ / √E) v over the positions up to the token's own, for single tokens of T sequences."""
    _, _, groups, positions, width = cache_N2GSE.shape
    tokens, heads, n_parts, _ = partials.out_THPE.shape
    assert len(qkv_TQ) == len(places.position_R) == tokens
    assert out_TO.shape == (tokens, heads * width)
    assert qkv_TQ.is_contiguous()
    assert out_TO.is_contiguous()
    padded = triton.next_power_of_2(width)
    _attend[(heads, n_parts, tokens)](
        qkv_TQ, places, cache_N2GSE, partials, heads, groups, width, width**-0.5, positions, n_parts, POSITIONS, padded,
        **UNFUSED,
    )  # fmt: skip
    parts = triton.next_power_of_2(n_parts)
    _combine[(heads, tokens)](partials, out_TO, heads, width, n_parts, parts, padded, **UNFUSED)


def attend_block(qkv_TQ: torch.Tensor, places: Places, cache_N2GSE: torch.Tensor, out_TO: torch.Tensor) -> None:
    """Attention of T consecutive tokens of one sequence, each over the positions up to its own; see `attend`."""
    _, _, groups, positions, width = cache_N2GSE.shape
    tokens, heads = out_TO.shape[0], out_TO.shape[1] // width
    assert qkv_TQ.shape == (tokens, (heads + 2 * groups) * width)
    assert len(places.position_R) == 1
    assert out_TO.is_contiguous()
    padded = max(16, triton.next_power_of_2(width))
    block_positions = max(16, min(POSITIONS, BLOCK_KEY_NUMBERS // padded))
    _attend_block[(triton.cdiv(tokens, QUERIES), heads)](
        qkv_TQ, places, cache_N2GSE, out_TO, tokens, heads, groups, width, width**-0.5,
        positions, QUERIES, block_positions, padded, num_warps=8, num_stages=2,
    )  # fmt: skip


@triton.jit
def _kv_rows(places, run, group, groups, s_B, mask_B, S: tl.constexpr):
    """[B] rows of the cache that hold a key-value head's keys of these positions; its values are groups · S further."""
    page_B = tl.load(places.table_RL + run * places.pages + s_B // S, mask=mask_B, other=0)
    return (page_B * (2 * groups) + group) * S + s_B % S


@triton.jit(do_not_specialize=["run_tokens"])
def _store_kv(
    qkv, places, run_tokens, angles, cache, norms, eps, heads, groups, half, width, S: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    run = token // run_tokens
    at = tl.load(places.position_R + run) + token % run_tokens
    column_E = tl.arange(0, E)
    row = qkv + (token.to(tl.int64) * (heads + 2 * groups) + head) * width
    x_E = tl.load(row + column_E, mask=column_E < width, other=0.0)
    # A rotated column needs its partner's number too.
    partner_E = tl.where(column_E < half, column_E + half, column_E - half)
    rotary_E = column_E < tl.where(head < heads + groups, 2 * half, 0)
    other_E = tl.load(row + partner_E, mask=rotary_E, other=0.0)
    if norms is not None:  # noqa: SIM102  this is decided when compiling, the next while running
        if head < heads + groups:
            weight = norms[0]
            if head >= heads:
                weight = norms[1]
            size = tl.sqrt(tl.sum(x_E * x_E, 0) / width + eps)
            x_E = x_E / size * tl.load(weight + column_E, mask=column_E < width, other=0.0)
            other_E = other_E / size * tl.load(weight + partner_E, mask=rotary_E, other=0.0)
    if angles is not None:
        angle_E = tl.where(column_E < half, column_E, column_E - half)
        cos_E = tl.load(angles[0] + at * half + angle_E, mask=rotary_E, other=1.0)
        sin_E = tl.load(angles[1] + at * half + angle_E, mask=rotary_E, other=0.0)
        x_E = tl.where(column_E < half, x_E * cos_E - other_E * sin_E, x_E * cos_E + other_E * sin_E)
    if head < heads:
        tl.debug_barrier()  # every thread has read before any writes
        tl.store(row + column_E, x_E, mask=column_E < width)
    else:
        page = tl.load(places.table_RL + run * places.pages + at // S)
        line = cache + ((page * (2 * groups) + head - heads) * S + at % S) * width
        if cache.dtype.element_ty == tl.float16:
            x_E = tl.minimum(tl.maximum(x_E, -65504.0), 65504.0)
        tl.store(line + column_E, x_E, mask=column_E < width)


@triton.jit
def _attend(
    qkv, places, cache, partials, heads, groups, width, scale,
    S: tl.constexpr, P: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.program_id(2)
    length = tl.load(places.position_R + token) + 1
    group = head * groups // heads
    column_E = tl.arange(0, E)
    mask_E = column_E < width
    q_E = tl.load(qkv + (token * (heads + 2 * groups) + head) * width + column_E, mask=mask_E, other=0.0) * scale
    values = cache + groups * S * width
    steps = (length + B - 1) // B
    end = tl.minimum(length, steps * (part + 1) // P * B)
    max_ = -float("inf")
    sum_ = 0.0
    out_E = tl.zeros([E], tl.float32)
    for start in range(steps * part // P * B, end, B):
        s_B = start + tl.arange(0, B)
        mask_BE = (s_B < end)[:, None] & mask_E[None, :]
        row_B = _kv_rows(places, token, group, groups, s_B, s_B < end, S)
        at_BE = (row_B * width)[:, None] + column_E[None, :]
        score_B = tl.sum(tl.load(cache + at_BE, mask=mask_BE, other=0.0).to(tl.float32) * q_E[None, :], 1)
        score_B = tl.where(s_B < end, score_B, -float("inf"))
        new_max = tl.maximum(max_, tl.max(score_B, 0))
        p_B = tl.exp(score_B - new_max)
        rescale = tl.exp(max_ - new_max)
        sum_ = sum_ * rescale + tl.sum(p_B, 0)
        v_BE = tl.load(values + at_BE, mask=mask_BE, other=0.0).to(tl.float32)
        out_E = out_E * rescale + tl.sum(p_B[:, None] * v_BE, 0)
        max_ = new_max
    place = (token * heads + head) * P + part
    tl.store(partials.out_THPE + place * width + column_E, out_E, mask=mask_E)
    tl.store(partials.max_THP + place, max_)
    tl.store(partials.sum_THP + place, sum_)


@triton.jit
def _combine(partials, out, heads, width, parts, P: tl.constexpr, E: tl.constexpr):
    head = tl.program_id(1) * heads + tl.program_id(0)
    part_P = tl.arange(0, P)
    mask_P = part_P < parts
    max_P = tl.load(partials.max_THP + head * parts + part_P, mask=mask_P, other=-float("inf"))
    weight_P = tl.exp(max_P - tl.max(max_P, 0))  # 0 for a part without positions
    sum_ = tl.sum(weight_P * tl.load(partials.sum_THP + head * parts + part_P, mask=mask_P, other=0.0), 0)
    column_E = tl.arange(0, E)
    at_PE = ((head * parts + part_P) * width)[:, None] + column_E[None, :]
    mask_PE = mask_P[:, None] & (column_E < width)[None, :]
    out_E = tl.sum(weight_P[:, None] * tl.load(partials.out_THPE + at_PE, mask=mask_PE, other=0.0), 0) / sum_
    tl.store(out + head * width + column_E, out_E, mask=column_E < width)


@triton.jit
def _attend_block(
    qkv, places, cache, out, tokens, heads, groups, width, scale,
    S: tl.constexpr, T: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * T
    head = tl.program_id(1)
    group = head * groups // heads
    token_T = first + tl.arange(0, T)
    column_E = tl.arange(0, E)
    mask_TE = (token_T < tokens)[:, None] & (column_E < width)[None, :]
    at_TE = (token_T.to(tl.int64) * (heads + 2 * groups) + head)[:, None] * width + column_E[None, :]
    q_TE = tl.load(qkv + at_TE, mask=mask_TE, other=0.0) * scale
    start = tl.load(places.position_R)
    values = cache + groups * S * width
    max_T = tl.full([T], -float("inf"), tl.float32)
    sum_T = tl.zeros([T], tl.float32)
    out_TE = tl.zeros([T, E], tl.float32)
    end = start + tl.minimum(first + T, tokens)
    for s in range(0, end, B):
        s_B = s + tl.arange(0, B)
        mask_BE = (s_B < end)[:, None] & (column_E < width)[None, :]
        row_B = _kv_rows(places, 0, group, groups, s_B, s_B < end, S)
        at_BE = (row_B * width)[:, None] + column_E[None, :]
        k_BE = tl.load(cache + at_BE, mask=mask_BE, other=0.0).to(tl.float32)
        score_TB = tl.dot(q_TE, tl.trans(k_BE), input_precision="ieee")
        score_TB = tl.where(s_B[None, :] <= (start + token_T)[:, None], score_TB, -float("inf"))
        new_max_T = tl.maximum(max_T, tl.max(score_TB, 1))
        p_TB = tl.exp(score_TB - new_max_T[:, None])
        rescale_T = tl.exp(max_T - new_max_T)
        v_BE = tl.load(values + at_BE, mask=mask_BE, other=0.0).to(tl.float32)
        sum_T = sum_T * rescale_T + tl.sum(p_TB, 1)
        out_TE = out_TE * rescale_T[:, None] + tl.dot(p_TB, v_BE, input_precision="ieee")
        max_T = new_max_T
    at_TE = (token_T.to(tl.int64) * heads + head)[:, None] * width + column_E[None, :]
    tl.store(out + at_TE, out_TE / sum_T[:, None], mask=mask_TE)
