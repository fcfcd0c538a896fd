"""How kernels read stored rows of every format (see `artifact.formats`): whole groups of blocks as words.

A word of 32 bits has four columns of a block in q8, eight in the others, and words 8 k + b of a group belong to block
b. The upper bits of q5 and q6 come with a word of their own. A thread takes four neighbouring words of some rows: 16
bytes, four neighbouring scales, and of the vector runs of four numbers, which it keeps for all its rows. What lies
behind the last whole group, up to seven blocks, is read element by element, and so are float formats. A stored byte is
one element there, upper bits not counted.

Integers of q8, q5 and q6 are converted. Of q4 one mask and one "or" make two numbers. With u and u' the integers of
two nibbles that are 16 bits apart,

    v = (word, shifted) & 0x00780078 | 0x41804180         as float32:  v = 16 + u + c + u' / 2¹⁶,  c = 0x4180 / 2¹⁹
    v << 16                                               as float32:  16 + u'

    Σ (u − 8) x + (u' − 8) x'  =  Σ v x + (v << 16) (x' − x / 2¹⁶) − (24 + c − 2⁻¹²) x − 24 x'

where the last two terms do not depend on the row. Sums of so few numbers lose nothing that counts to the 24.

Only this module knows how values lie in a block format; a format of four lower bits and some upper ones needs no branch
here. `m` is a matrix as kernels take it (`matrix.StoredRows`).

Shape letters: R rows, W words, Q = W / 4 threads' worth of words, C stored elements.
"""

import triton
import triton.language as tl

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.cuda.kernels.matrix import VALUES_PER_ELEMENT, WORDS_PER_GROUP

_RAISED = {fmt.code: fmt.block_bits == 4 and not fmt.offset for fmt in FORMATS.values()}
_WORDS_PER_GROUP = {FORMATS[name].code: words for name, words in WORDS_PER_GROUP.items()}
_UPPER_BITS = {fmt.code: max(fmt.block_bits - 4, 0) if fmt.block_bits < 8 else 0 for fmt in FORMATS.values()}
_ZEROS = {fmt.code: fmt.zero for fmt in FORMATS.values()}
_OFFSETS = {fmt.code: fmt.offset for fmt in FORMATS.values()}
_OWN = tl.constexpr(24.0)
_BEYOND = tl.constexpr(24.0 + 0x4180 / 2**19 - 2**-12)
_PART = tl.constexpr(2.0**-16)


@triton.constexpr_function
def in_blocks(fmt):
    """Whether a format's values are integers in blocks that share a scale."""
    return fmt in _WORDS_PER_GROUP


@triton.constexpr_function
def is_raised(fmt):
    """Whether two nibbles are made numbers at once, which are raised by a constant, as in q4."""
    return _RAISED[fmt]


@triton.constexpr_function
def upper_bits(fmt):
    """Bits of an integer that do not lie with its lower four."""
    return _UPPER_BITS[fmt]


@triton.constexpr_function
def zero_of(fmt):
    """The stored integer that stands for 0, where blocks have no offsets of their own."""
    return _ZEROS[fmt]


@triton.constexpr_function
def has_offsets(fmt):
    """Whether blocks have minima or zeros of their own."""
    return _OFFSETS[fmt] != ""


@triton.constexpr_function
def has_zeros(fmt):
    """Whether blocks have zeros of their own."""
    return _OFFSETS[fmt] == "zero"


@triton.constexpr_function
def words_per_group(fmt):
    """Words of 32 bits in a group of eight blocks."""
    return _WORDS_PER_GROUP[fmt]


@triton.constexpr_function
def runs_per_word(fmt):
    """Runs of four neighbouring columns in a word; each starts 16 columns behind the one before it."""
    return 64 // _WORDS_PER_GROUP[fmt]


@triton.jit
def groups_of(columns):
    """Whole groups of eight blocks in a row."""
    return (columns + 31) // 32 // 8


@triton.jit
def words_of(m):
    """Words in a row's whole groups."""
    return groups_of(m.columns) * words_per_group(m.fmt)


@triton.jit
def word_column(m, word):
    """The first column of a word's first run."""
    PER: tl.constexpr = words_per_group(m.fmt)
    return word // PER * 256 + word % 8 * 32 + word % PER // 8 * 4


@triton.jit
def _words_at(m, row_R, at_W, mask_RW):
    """[R, W] words of these rows at places of a row."""
    words = m.elements.to(tl.pointer_type(tl.int32))
    at_R1 = (row_R.to(tl.int64) * (m.stride // 4))[:, None]
    return tl.load(words + at_R1 + at_W[None, :], mask=mask_RW, other=0)


@triton.jit
def word_tile(m, row_R, word_W, mask_RW):
    """[R, W] words of these rows."""
    if upper_bits(m.fmt):
        word_W = tl.max_contiguous(tl.multiple_of(word_W + word_W // 32 * 8 * upper_bits(m.fmt), 4), 4)
    return _words_at(m, row_R, word_W, mask_RW)


@triton.jit
def upper_tile(m, row_R, word_W, mask_RW):
    """[R, W] words with the upper bits of these words' integers, each in the byte and half that the lower ones have.

    Beside them are bits of other integers. 0 where the format has none.
    """
    BITS: tl.constexpr = upper_bits(m.fmt)
    upper_RW = 0
    if BITS:
        at_W = word_W // 32 * (32 + 8 * BITS) + 32 + word_W % (8 * BITS)
        upper_RW = _words_at(m, row_R, tl.max_contiguous(tl.multiple_of(at_W, 4), 4), mask_RW)
        upper_RW >>= (word_W % 32 // (8 * BITS) * BITS)[None, :]
    return upper_RW


@triton.jit
def word_scales(m, row_R, word_W, mask_RW):
    """[R, W] scales of the words' blocks."""
    PER: tl.constexpr = words_per_group(m.fmt)
    block_W = tl.max_contiguous(word_W // PER * 8 + word_W % 8, 4)
    at_R1 = (row_R.to(tl.int64) * m.scales_stride)[:, None]
    return tl.load(m.scales + at_R1 + block_W[None, :], mask=mask_RW, other=0.0).to(tl.float32)


@triton.jit
def word_minima(m, row_R, word_W, mask_RW, scale_RW):
    """[R, W] what the words' blocks have added to scale · integer; 0 where the format adds nothing."""
    minima_RW = 0.0
    if has_offsets(m.fmt):
        PER: tl.constexpr = words_per_group(m.fmt)
        block_W = tl.max_contiguous(word_W // PER * 8 + word_W % 8, 4)
        at_R1 = (row_R.to(tl.int64) * m.scales_stride + m.offsets)[:, None]
        minima_RW = tl.load(m.scales + at_R1 + block_W[None, :], mask=mask_RW, other=0.0).to(tl.float32)
        if has_zeros(m.fmt):
            minima_RW *= -scale_RW  # exact
    return minima_RW


@triton.jit
def _byte(word, J: tl.constexpr):
    """Byte J of a word of q8 as a number."""
    return ((word << (24 - 8 * J)) >> 24).to(tl.float32)


@triton.jit
def _integer(m, word, upper, BIT: tl.constexpr):
    """The number u − z whose lower bits are the nibble at bit BIT of a word; u where blocks have offsets."""
    BITS: tl.constexpr = upper_bits(m.fmt)
    u = (word >> BIT) & 15
    if BITS:
        u += ((upper >> BIT) & (1 << BITS) - 1) << 4
    return (u - zero_of(m.fmt)).to(tl.float32)


@triton.jit
def word_run(m, word, upper, RUN: tl.constexpr):
    """The four numbers of run RUN of each word, without their scale."""
    if runs_per_word(m.fmt) == 2:
        q0, q1 = _integer(m, word, upper, 4 * RUN), _integer(m, word, upper, 8 + 4 * RUN)
        q2, q3 = _integer(m, word, upper, 16 + 4 * RUN), _integer(m, word, upper, 24 + 4 * RUN)
    else:
        q0, q1, q2, q3 = _byte(word, 0), _byte(word, 1), _byte(word, 2), _byte(word, 3)
    return q0, q1, q2, q3


@triton.jit
def nibble_mask_of(m):
    """0x00780078, computed from an address, which is below 2⁶³.

    An instruction has room for one constant, which is the exponents': the compiler would load a mask that it knows
    anew each time.
    """
    return 0x00780078 | (m.elements.to(tl.int64) >> 63).to(tl.int32)


@triton.jit
def _nibble_pair(word, BIT: tl.constexpr, nibble_mask):
    """(v << 16, v) of the nibbles at bits BIT and BIT + 16, as float32."""
    v = word << 3 - BIT if BIT < 3 else word >> BIT - 3
    v = (v & nibble_mask) | 0x41804180
    return (v << 16).to(tl.float32, bitcast=True), v.to(tl.float32, bitcast=True)


@triton.jit
def _add_pair(low_sum_RW, high_sum_RW, h_RW, w_RW, BIT: tl.constexpr, nibble_mask):
    """Running sums of h times the pair of nibbles at bits BIT and BIT + 16."""
    low_RW, high_RW = _nibble_pair(w_RW, BIT, nibble_mask)
    return low_sum_RW + h_RW * low_RW, high_sum_RW + h_RW * high_RW


@triton.jit
def add_words(m, w_RW, upper_RW, h_RW, added_RW, nibble_mask, h_sum_RW, sums_RW):
    """Running sums of h times each number of a word: four for its first run, and four for its second.

    `h_RW` includes the scales, and `added_RW` is h times the minima. The sums of q4 include what its numbers are raised
    by, and the others lack the minima, until `added_words` makes up for it.
    """
    s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW = sums_RW
    if is_raised(m.fmt):
        h_sum_RW += h_RW
        s0_RW, s2_RW = _add_pair(s0_RW, s2_RW, h_RW, w_RW, 0, nibble_mask)
        s1_RW, s3_RW = _add_pair(s1_RW, s3_RW, h_RW, w_RW, 8, nibble_mask)
        s4_RW, s6_RW = _add_pair(s4_RW, s6_RW, h_RW, w_RW, 4, nibble_mask)
        s5_RW, s7_RW = _add_pair(s5_RW, s7_RW, h_RW, w_RW, 12, nibble_mask)
    else:
        if has_offsets(m.fmt):
            h_sum_RW += added_RW
        q0_RW, q1_RW, q2_RW, q3_RW = word_run(m, w_RW, upper_RW, 0)
        s0_RW += h_RW * q0_RW
        s1_RW += h_RW * q1_RW
        s2_RW += h_RW * q2_RW
        s3_RW += h_RW * q3_RW
        if runs_per_word(m.fmt) == 2:
            q4_RW, q5_RW, q6_RW, q7_RW = word_run(m, w_RW, upper_RW, 1)
            s4_RW += h_RW * q4_RW
            s5_RW += h_RW * q5_RW
            s6_RW += h_RW * q6_RW
            s7_RW += h_RW * q7_RW
    return h_sum_RW, (s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW)


@triton.jit
def _pair_sums(low, high, h):
    """(Σ h (u − 8), Σ h (u' − 8)) from Σ h (v << 16), Σ h v and Σ h."""
    return high - low * _PART - h * _BEYOND, low - h * _OWN


@triton.jit
def added_words(m, h_sum_RW, sums_RW):
    """The sums of `add_words`, less what q4's numbers are raised by, and with the minima of others."""
    s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW = sums_RW
    if is_raised(m.fmt):
        s2_RW, s0_RW = _pair_sums(s0_RW, s2_RW, h_sum_RW)
        s3_RW, s1_RW = _pair_sums(s1_RW, s3_RW, h_sum_RW)
        s6_RW, s4_RW = _pair_sums(s4_RW, s6_RW, h_sum_RW)
        s7_RW, s5_RW = _pair_sums(s5_RW, s7_RW, h_sum_RW)
    if has_offsets(m.fmt):
        s0_RW, s1_RW, s2_RW, s3_RW = s0_RW + h_sum_RW, s1_RW + h_sum_RW, s2_RW + h_sum_RW, s3_RW + h_sum_RW
        s4_RW, s5_RW, s6_RW, s7_RW = s4_RW + h_sum_RW, s5_RW + h_sum_RW, s6_RW + h_sum_RW, s7_RW + h_sum_RW
    return (s0_RW, s1_RW, s2_RW, s3_RW), (s4_RW, s5_RW, s6_RW, s7_RW)


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
def _add_pair_dots(sum_RW, w_RW, BIT: tl.constexpr, nibble_mask, low_W, high_W):
    """Running sums of the pair of nibbles at bits BIT and BIT + 16 times their two numbers of x."""
    low_RW, high_RW = _nibble_pair(w_RW, BIT, nibble_mask)
    sum_RW += low_RW * (low_W - high_W * _PART)[None, :]
    return sum_RW + high_RW * high_W[None, :]


@triton.jit
def _run_dots(m, w_RW, upper_RW, RUN: tl.constexpr, x0_W, x1_W, x2_W, x3_W):
    """Sums of run RUN of each word times its four numbers of x."""
    q0_RW, q1_RW, q2_RW, q3_RW = word_run(m, w_RW, upper_RW, RUN)
    sum_RW = q0_RW * x0_W[None, :]
    sum_RW += q1_RW * x1_W[None, :]
    sum_RW += q2_RW * x2_W[None, :]
    return sum_RW + q3_RW * x3_W[None, :]


@triton.jit
def word_dots(m, row_R, mask_R, x, R: tl.constexpr, W: tl.constexpr):
    """[R] row · x over whole groups. Where `mask_R` is false, the row is not read and the result is 0."""
    sums_RW = tl.zeros([R, W], tl.float32)
    words = words_of(m)
    nibble_mask = nibble_mask_of(m)
    limit = tl.minimum(m.columns, groups_of(m.columns) * 256)
    for start in range(0, words, W):
        word_W = start + tl.arange(0, W)
        mask_RW = mask_R[:, None] & (word_W < words)[None, :]
        w_RW = word_tile(m, row_R, word_W, mask_RW)
        scale_RW = word_scales(m, row_R, word_W, mask_RW)
        first_Q = word_column(m, start + 4 * tl.arange(0, W // 4))
        x0_W, x1_W, x2_W, x3_W = _runs(x, first_Q, limit, W)
        if is_raised(m.fmt):
            x4_W, x5_W, x6_W, x7_W = _runs(x, first_Q + 16, limit, W)
            beyond_W = (x2_W + x3_W) + (x6_W + x7_W)
            sum_RW = -(((x0_W + x1_W) + (x4_W + x5_W)) * _OWN + beyond_W * _BEYOND)[None, :]
            sum_RW = _add_pair_dots(sum_RW, w_RW, 0, nibble_mask, x0_W, x2_W)
            sum_RW = _add_pair_dots(sum_RW, w_RW, 8, nibble_mask, x1_W, x3_W)
            sum_RW = _add_pair_dots(sum_RW, w_RW, 4, nibble_mask, x4_W, x6_W)
            sum_RW = _add_pair_dots(sum_RW, w_RW, 12, nibble_mask, x5_W, x7_W)
        else:
            upper_RW = upper_tile(m, row_R, word_W, mask_RW)
            sum_RW = _run_dots(m, w_RW, upper_RW, 0, x0_W, x1_W, x2_W, x3_W)
            if runs_per_word(m.fmt) == 2:
                x4_W, x5_W, x6_W, x7_W = _runs(x, first_Q + 16, limit, W)
                sum_RW += _run_dots(m, w_RW, upper_RW, 1, x4_W, x5_W, x6_W, x7_W)
        sums_RW += sum_RW * scale_RW
        if has_offsets(m.fmt):
            x_W = ((x0_W + x1_W) + (x2_W + x3_W)) + ((x4_W + x5_W) + (x6_W + x7_W))
            sums_RW += word_minima(m, row_R, word_W, mask_RW, scale_RW) * x_W[None, :]
    return tl.sum(sums_RW, 1)


_VALUES_PER_ELEMENT = {FORMATS[name].code: values for name, values in VALUES_PER_ELEMENT.items()}


@triton.constexpr_function
def values_per_element(fmt):
    """Values in one stored element."""
    return _VALUES_PER_ELEMENT[fmt]


@triton.jit
def first_left_element(m):
    """The first stored element behind the last whole group."""
    return groups_of(m.columns) * (4 * words_per_group(m.fmt))


@triton.jit
def stored_tile(m, row_R, mask_R, element_C):
    """[R, C] stored elements."""
    at_R1 = (row_R.to(tl.int64) * m.stride)[:, None]
    mask_RC = mask_R[:, None] & (element_C < m.width)[None, :]
    if upper_bits(m.fmt):
        element_C += _upper_bytes_before(m, element_C)
    return tl.load(m.elements + at_R1 + element_C[None, :], mask=mask_RC, other=0)


@triton.jit
def _upper_bytes_before(m, element):
    """Bytes with upper bits that a row has before an element."""
    grouped = groups_of(m.columns) * 128
    left = tl.maximum(element - grouped, 0)
    return (tl.minimum(element, grouped) // 128 * 32 + left // 32 * 8) * upper_bits(m.fmt)


@triton.jit
def _upper_tile(m, row_R, mask_R, element_C, VALUE: tl.constexpr):
    """[R, C] the upper bits of value VALUE of elements behind the last whole group, above four bits that are 0."""
    BITS: tl.constexpr = upper_bits(m.fmt)
    inside_C = (element_C - first_left_element(m)) % 32
    index_C = inside_C + 32 * VALUE
    at_C = element_C - inside_C + 32 + _upper_bytes_before(m, element_C) + index_C % (8 * BITS)
    at_R1 = (row_R.to(tl.int64) * m.stride)[:, None]
    mask_RC = mask_R[:, None] & (element_C < m.width)[None, :]
    stored_RC = tl.load(m.elements + at_R1 + at_C[None, :], mask=mask_RC, other=0).to(tl.int32)
    return (stored_RC >> (index_C // (8 * BITS) * BITS)[None, :] & (1 << BITS) - 1) << 4


@triton.jit
def _column_at(place, columns):
    """The column at a place of a row: in groups of eight blocks fours of columns are interleaved."""
    grouped = groups_of(columns) * 256
    inside = place % 256
    column = place - inside + inside % 32 // 4 * 32 + inside // 32 * 4 + inside % 4
    return tl.where(place < grouped, column, place)


@triton.jit
def _nibble_place(byte, columns, UPPER: tl.constexpr):
    """The place in the lower or the upper four bits of a row's byte of lower bits."""
    grouped = groups_of(columns) * 128
    left = byte - grouped
    place = tl.where(byte < grouped, byte // 128 * 256 + byte % 128, 2 * grouped + left // 32 * 64 + left % 32)
    if UPPER:
        place += tl.where(byte < grouped, 128, 32)
    return place


@triton.jit
def element_column(m, element, VALUE: tl.constexpr):
    """The column of value VALUE of a stored element of a row, in any format."""
    column = element
    if values_per_element(m.fmt) == 2:
        column = _column_at(_nibble_place(element, m.columns, VALUE == 1), m.columns)
    elif in_blocks(m.fmt):
        column = _column_at(element, m.columns)
    return column


@triton.jit
def element_weights(m, stored_RC, row_R, mask_R, element_C, column_C, VALUE: tl.constexpr):
    """[R, C] value VALUE of stored elements as float32, times its scale where the format has one.

    Elements of block formats are behind the last whole group.
    """
    if values_per_element(m.fmt) == 2:
        integer_RC = (stored_RC & 15).to(tl.int32) if VALUE == 0 else (stored_RC >> 4).to(tl.int32)
        if upper_bits(m.fmt):
            integer_RC += _upper_tile(m, row_R, mask_R, element_C, VALUE)
        weight_RC = (integer_RC - zero_of(m.fmt)).to(tl.float32)
    else:
        weight_RC = stored_RC.to(tl.float32)
    if in_blocks(m.fmt):
        at_R1 = (row_R.to(tl.int64) * m.scales_stride)[:, None]
        mask_RC = mask_R[:, None] & (column_C < m.columns)[None, :]
        at_RC = m.scales + at_R1 + (column_C // 32)[None, :]
        if has_offsets(m.fmt):
            offset_RC = tl.load(at_RC + m.offsets, mask=mask_RC, other=0.0).to(tl.float32)
        if has_zeros(m.fmt):
            weight_RC -= offset_RC
        weight_RC *= tl.load(at_RC, mask=mask_RC, other=0.0).to(tl.float32)
        if has_offsets(m.fmt) and not has_zeros(m.fmt):
            weight_RC += offset_RC
    return weight_RC
