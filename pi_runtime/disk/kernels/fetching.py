"""A layer's rows in one call: slots for those that are missing, and the reads that fill them."""

from typing import NamedTuple

from pi_runtime.disk.kernels.neuron_cache import LayerRows, begin_turn, obtain
from pi_runtime.disk.kernels.reading import Shared, add_rows, submit
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Ints


class Wanted(NamedTuple):
    """Which rows of an array are wanted: base + neuron of the chunks [begin, end); arguments as of `obtain`."""

    base: int
    neuron_I: Ints
    begin: int
    end: int
    keep: bool
    staging: int


class Places(NamedTuple):
    """Where a layer's rows lie in the file, how long one is, and where slots are; arguments as of `add_rows`."""

    offset: int
    nbytes: int
    target: int
    slot_nbytes: int


@public
def fetch(rows: LayerRows, s: Shared, batch: int, w: Wanted, places: Places, row_I: Ints, slot_I: Ints) -> int:
    """Append the reads of the wanted rows that are absent to a batch.

    `row_I` and `slot_I` have room for all. Returns how many slots from `w.staging` on these take.
    """
    count, staged = obtain(rows, w.base, w.neuron_I, w.begin, w.end, w.keep, w.staging, row_I, slot_I)
    if count > 0:
        row_I, slot_I = row_I[:count], slot_I[:count]
        add_rows(s, batch, row_I, slot_I, places.offset, places.nbytes, places.target, places.slot_nbytes)
    return staged


@public
def fetch_turn(
    rows: LayerRows, s: Shared, batch: int, w: Wanted, places: Places, row_I: Ints, slot_I: Ints,
    goes_on: bool, room: int, workers: int,
) -> int:  # fmt: skip
    """Begin a turn, and begin to read what is absent of the wanted rows: `begin_turn`, `fetch` and `submit` in one.

    Returns how many slots from `w.staging` on are taken; where more than `room` rows are absent, none is read, and it
    returns −1.
    """
    if begin_turn(rows, w.base, w.neuron_I, goes_on) > room:
        return -1
    staged = fetch(rows, s, batch, w, places, row_I, slot_I)
    submit(s, batch, workers)
    return staged
