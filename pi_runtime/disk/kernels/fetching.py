"""A layer's rows in one call: slots for those that are missing, and the reads that fill them."""

from pi_runtime.disk.kernels.neuron_cache import Rows, obtain
from pi_runtime.disk.kernels.reading import Shared, add_rows
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Ints


@public
def fetch(
    rows: Rows, s: Shared, batch: int, base: int, neuron_I: Ints, begin: int, end: int, keep: bool, staging: int,
    row_I: Ints, slot_I: Ints, offset: int, nbytes: int, target: int,
) -> int:  # fmt: skip
    """Append the reads of the absent rows base + neuron of the chunks [begin, end) to a batch.

    Arguments as of `obtain` and `add_rows`; `row_I` and `slot_I` have room for all. Returns how many slots from
    `staging` on these take.
    """
    count, staged = obtain(rows, base, neuron_I, begin, end, keep, staging, row_I, slot_I)
    if count > 0:
        add_rows(s, batch, row_I[:count], slot_I[:count], offset, nbytes, target)
    return staged
