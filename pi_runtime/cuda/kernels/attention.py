"""Rotary positions, and attention of one token over the key-value cache.

H query heads, G key-value heads, E head width, S positions the cache holds, P its parts. The cache is float16 or
float32, sums are float32. The position comes from device memory, so that one captured graph serves every token. The
positions so far are cut into P parts; each part keeps its largest score, its sum of exponentials and its weighted sum
of values, and `_combine` puts the parts together in order (flash decoding: Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

POSITIONS = 64
"""Positions that a program looks at at once."""
QUERIES = 32
"""Tokens of a block whose attention a program computes."""
BLOCK_NUMBERS = 4096
"""Numbers of keys that such a program looks at at once: with as many values, and the next ones on their way, 53 KiB of
shared memory for heads of 128 and 68 for 256, where GPUs of PCs have 99."""


@dataclass(frozen=True)
class Parts:
    """What the parts of a token's attention leave: (H, P, E) and twice (H, P)."""

    mixed_HPE: torch.Tensor
    largest_HP: torch.Tensor
    total_HP: torch.Tensor


def remember(
    qkv_TQ: torch.Tensor,
    position: torch.Tensor,
    cos_SJ: torch.Tensor | None,
    sin_SJ: torch.Tensor | None,
    cache_2GSE: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries and keys of T tokens in place, the first at `position` (int64, one number), where there are
    angles; write keys and values into the cache. `norms`: weights of an rms norm of each query, and of each key, which
    comes first.

    (a, b) → (a cos − b sin, b cos + a sin) for the halves of the first 2 J columns of a head; others stay.
    """
    _, groups, positions, width = cache_2GSE.shape
    tokens, heads = qkv_TQ.shape[0], qkv_TQ.shape[1] // width - 2 * groups
    assert position.dtype == torch.int64
    assert qkv_TQ.is_contiguous()
    assert cache_2GSE.is_contiguous()
    half = 0 if cos_SJ is None else cos_SJ.shape[1]
    assert 2 * half <= width
    q_norm, k_norm = (None, None) if norms is None else norms
    _remember[(tokens, heads + 2 * groups)](
        qkv_TQ, position, cos_SJ, sin_SJ, cache_2GSE, q_norm, k_norm, eps, heads, groups, positions, half, width,
        half > 0, norms is not None, triton.next_power_of_2(width),
    )  # fmt: skip


def attend(
    qkv_Q: torch.Tensor, position: torch.Tensor, cache_2GSE: torch.Tensor, parts: Parts, out_Q: torch.Tensor
) -> None:
    """softmax(q kᵀ / √E) v over the positions up to the token's own."""
    _, groups, positions, width = cache_2GSE.shape
    heads, n_parts, _ = parts.mixed_HPE.shape
    assert out_Q.shape == (heads * width,)
    padded = triton.next_power_of_2(width)
    _attend[(heads, n_parts)](
        qkv_Q, position, cache_2GSE, parts.mixed_HPE, parts.largest_HP, parts.total_HP, heads, groups, positions, width,
        width**-0.5, n_parts, POSITIONS, padded,
    )  # fmt: skip
    _combine[(heads,)](
        parts.mixed_HPE, parts.largest_HP, parts.total_HP, out_Q, width, n_parts,
        triton.next_power_of_2(n_parts), padded,
    )  # fmt: skip


def attend_block(qkv_TQ: torch.Tensor, position: torch.Tensor, cache_2GSE: torch.Tensor, out_TQ: torch.Tensor) -> None:
    """The same for T tokens, the first at `position`, each over the positions up to its own."""
    _, groups, positions, width = cache_2GSE.shape
    tokens, heads = out_TQ.shape[0], out_TQ.shape[1] // width
    assert qkv_TQ.shape == (tokens, (heads + 2 * groups) * width)
    assert out_TQ.is_contiguous()
    padded = max(16, triton.next_power_of_2(width))
    at_once = max(16, min(POSITIONS, BLOCK_NUMBERS // padded))
    _attend_block[(triton.cdiv(tokens, QUERIES), heads)](
        qkv_TQ, position, cache_2GSE, out_TQ, tokens, heads, groups, positions, width, width**-0.5,
        QUERIES, at_once, padded, num_warps=8, num_stages=2,
    )  # fmt: skip


@triton.jit
def _remember(
    qkv, position, cos, sin, cache, q_norm, k_norm, eps, heads, groups, positions, half, width,
    TURNED: tl.constexpr, NORMED: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.load(position) + token
    column_E = tl.arange(0, E)
    row = qkv + (token.to(tl.int64) * (heads + 2 * groups) + head) * width
    x_E = tl.load(row + column_E, mask=column_E < width, other=0.0)
    # Each column of a pair needs the other one's number beside its own.
    partner_E = tl.where(column_E < half, column_E + half, column_E - half)
    turned_E = column_E < tl.where(head < heads + groups, 2 * half, 0)
    other_E = tl.load(row + partner_E, mask=turned_E, other=0.0)
    if NORMED:  # noqa: SIM102  this is decided when compiling, the next while running
        if head < heads + groups:
            weight = q_norm
            if head >= heads:
                weight = k_norm
            size = tl.sqrt(tl.sum(x_E * x_E, 0) / width + eps)
            x_E = x_E / size * tl.load(weight + column_E, mask=column_E < width, other=0.0)
            other_E = other_E / size * tl.load(weight + partner_E, mask=turned_E, other=0.0)
    if TURNED:
        angle_E = tl.where(column_E < half, column_E, column_E - half)
        cos_E = tl.load(cos + at * half + angle_E, mask=turned_E, other=1.0)
        sin_E = tl.load(sin + at * half + angle_E, mask=turned_E, other=0.0)
        x_E = tl.where(column_E < half, x_E * cos_E - other_E * sin_E, x_E * cos_E + other_E * sin_E)
    tl.debug_barrier()  # all have read before any writes
    tl.store(row + column_E, x_E, mask=column_E < width)
    if head >= heads:
        line = cache + ((head - heads).to(tl.int64) * positions + at) * width
        if cache.dtype.element_ty == tl.float16:
            x_E = tl.minimum(tl.maximum(x_E, -65504.0), 65504.0)
        tl.store(line + column_E, x_E, mask=column_E < width)


@triton.jit
def _attend(
    qkv, position, cache, mixed, largest, total, heads, groups, positions, width, scale,
    P: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(position) + 1
    group = (head * groups // heads).to(tl.int64)
    column_E = tl.arange(0, E)
    there_E = column_E < width
    q_E = tl.load(qkv + head * width + column_E, mask=there_E, other=0.0) * scale
    keys = cache + group * positions * width
    values = cache + (groups + group) * positions * width
    steps = (length + B - 1) // B
    end = tl.minimum(length, steps * (part + 1) // P * B)
    most = -float("inf")
    sum_ = 0.0
    mixed_E = tl.zeros([E], tl.float32)
    for start in range(steps * part // P * B, end, B):
        s_B = start + tl.arange(0, B)
        there_BE = (s_B < end)[:, None] & there_E[None, :]
        at_BE = (s_B * width)[:, None] + column_E[None, :]
        score_B = tl.sum(tl.load(keys + at_BE, mask=there_BE, other=0.0).to(tl.float32) * q_E[None, :], 1)
        score_B = tl.where(s_B < end, score_B, -float("inf"))
        larger = tl.maximum(most, tl.max(score_B, 0))
        p_B = tl.exp(score_B - larger)
        fade = tl.exp(most - larger)
        sum_ = sum_ * fade + tl.sum(p_B, 0)
        v_BE = tl.load(values + at_BE, mask=there_BE, other=0.0).to(tl.float32)
        mixed_E = mixed_E * fade + tl.sum(p_B[:, None] * v_BE, 0)
        most = larger
    place = head * P + part
    tl.store(mixed + place * width + column_E, mixed_E, mask=there_E)
    tl.store(largest + place, most)
    tl.store(total + place, sum_)


@triton.jit
def _combine(mixed, largest, total, out, width, parts, P: tl.constexpr, E: tl.constexpr):
    head = tl.program_id(0)
    part_P = tl.arange(0, P)
    there_P = part_P < parts
    most_P = tl.load(largest + head * parts + part_P, mask=there_P, other=-float("inf"))
    weight_P = tl.exp(most_P - tl.max(most_P, 0))  # 0 for a part without positions
    sum_ = tl.sum(weight_P * tl.load(total + head * parts + part_P, mask=there_P, other=0.0), 0)
    column_E = tl.arange(0, E)
    at_PE = ((head * parts + part_P) * width)[:, None] + column_E[None, :]
    there_PE = there_P[:, None] & (column_E < width)[None, :]
    mixed_E = tl.sum(weight_P[:, None] * tl.load(mixed + at_PE, mask=there_PE, other=0.0), 0) / sum_
    tl.store(out + head * width + column_E, mixed_E, mask=column_E < width)


@triton.jit
def _attend_block(
    qkv, position, cache, out, tokens, heads, groups, positions, width, scale,
    T: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * T
    head = tl.program_id(1)
    group = (head * groups // heads).to(tl.int64)
    token_T = first + tl.arange(0, T)
    column_E = tl.arange(0, E)
    there_TE = (token_T < tokens)[:, None] & (column_E < width)[None, :]
    at_TE = (token_T.to(tl.int64) * (heads + 2 * groups) + head)[:, None] * width + column_E[None, :]
    q_TE = tl.load(qkv + at_TE, mask=there_TE, other=0.0) * scale
    start = tl.load(position)
    keys = cache + group * positions * width
    values = cache + (groups + group) * positions * width
    most_T = tl.full([T], -float("inf"), tl.float32)
    sum_T = tl.zeros([T], tl.float32)
    mixed_TE = tl.zeros([T, E], tl.float32)
    end = start + tl.minimum(first + T, tokens)
    for s in range(0, end, B):
        s_B = s + tl.arange(0, B)
        there_BE = (s_B < end)[:, None] & (column_E < width)[None, :]
        at_BE = (s_B * width)[:, None] + column_E[None, :]
        k_BE = tl.load(keys + at_BE, mask=there_BE, other=0.0).to(tl.float32)
        score_TB = tl.dot(q_TE, tl.trans(k_BE), input_precision="ieee")
        score_TB = tl.where(s_B[None, :] <= (start + token_T)[:, None], score_TB, -float("inf"))
        larger_T = tl.maximum(most_T, tl.max(score_TB, 1))
        p_TB = tl.exp(score_TB - larger_T[:, None])
        fade_T = tl.exp(most_T - larger_T)
        v_BE = tl.load(values + at_BE, mask=there_BE, other=0.0).to(tl.float32)
        sum_T = sum_T * fade_T + tl.sum(p_TB, 1)
        mixed_TE = mixed_TE * fade_T[:, None] + tl.dot(p_TB, v_BE, input_precision="ieee")
        most_T = larger_T
    at_TE = (token_T.to(tl.int64) * heads + head)[:, None] * width + column_E[None, :]
    tl.store(out + at_TE, mixed_TE / sum_T[:, None], mask=there_TE)
