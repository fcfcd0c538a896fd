"""Which rows are in memory, and in which slots: compiled lookups, one call for a layer.

A row is in slot `slot_N[row]`, or absent where that is 0: slot 0 holds zeros, which a kernel may read in place of a
row whose factor is 0. A layer's slots are *pinned* ones, which keep their rows, and a ring of *cached* ones. A row that
is found gets a reference; the clock's hand takes away one at a time, and a row without any makes room (GCLOCK). With at
most one reference this is close to the least recently used; with more, to the least frequently used.
Rows for which there is no room, or that are not worth any, are *staged*: they go to slots that all layers share, until
`clear_staged`.

Shape letters: N rows of a layer (all experts), S slots, I rows that are asked for, C chunks.
"""

from typing import NamedTuple

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS, GROUP
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Ints
from pi_runtime.kernels.ffn.memory import bit_reversed

BEGIN, END, CLOCK_HAND, TURN, MOST_REFERENCES = range(5)
"""What `LayerRows.clock_5` holds: the cached slots, the hand's place, the number of the layer's current turn, and the
most references that a row gets."""
HITS, MISSES = range(2)


class LayerRows(NamedTuple):
    """One layer's rows of one array (`first` or `rest`)."""

    slot_N: Ints
    clock_5: Ints
    owner_S: Ints
    """The row in each slot, of whichever layer has the slot; −1 for none."""
    references_S: Ints
    turn_S: Ints
    """The turn in which a slot's row was last asked for: it must stay until the turn is over."""
    counts_2: Ints
    """Rows that were found, and that were not."""


def rows_of(
    neurons: int, begin: int, end: int, most_references: int, owner_S: Ints, references_S: Ints, turn_S: Ints
) -> LayerRows:
    """A layer's rows, none of them there, with the cached slots [begin, end)."""
    clock_5 = np.array([begin, end, begin, 0, most_references], np.int64)
    return LayerRows(np.zeros(neurons, np.int64), clock_5, owner_S, references_S, turn_S, np.zeros(2, np.int64))


def place(rows: LayerRows, row_I: Ints, slot: int) -> None:
    """Say that these rows are in the slots from this one on."""
    rows.owner_S[slot : slot + len(row_I)] = row_I
    rows.slot_N[row_I] = np.arange(slot, slot + len(row_I))


@public
def begin_turn(rows: LayerRows, base: int, neuron_I: Ints, goes_on: bool) -> int:
    """Begin a layer's turn, in which the rows base + neuron are needed: returns how many are absent.

    Those that are there stay until the next turn. `goes_on`: rows of the turn before stay too.
    """
    if not goes_on:
        rows.clock_5[TURN] += 1
    turn, absent = rows.clock_5[TURN], 0
    for neuron in neuron_I:
        slot = rows.slot_N[base + neuron]
        rows.turn_S[slot] = turn
        absent += slot == 0
    return absent


@public
def absent_of_chunks(rows: LayerRows, base: int, neuron_I: Ints, absent_C: Ints) -> None:
    """Count the absent rows of each chunk."""
    absent_C[:] = 0
    for neuron in neuron_I:
        absent_C[bit_reversed(neuron // GROUP % CHUNKS)] += rows.slot_N[base + neuron] == 0


@public
def obtain(
    rows: LayerRows,
    base: int,
    neuron_I: Ints,
    begin: int,
    end: int,
    keep: bool,
    staging: int,
    row_I: Ints,
    slot_I: Ints,
) -> tuple[int, int]:
    """Give slots to the absent rows base + neuron of the chunks [begin, end), and list them with their slots.

    Returns how many these are, and how many slots from `staging` on they take. `keep`: they may take cached slots.
    """
    turn, every = rows.clock_5[TURN], begin == 0 and end == CHUNKS
    count = 0
    for neuron in neuron_I:
        if not (every or begin <= bit_reversed(neuron // GROUP % CHUNKS) < end):
            continue
        slot = rows.slot_N[base + neuron]
        if slot == 0:
            row_I[count] = base + neuron
            count += 1
        else:
            rows.counts_2[HITS] += 1
            if rows.references_S[slot] < rows.clock_5[MOST_REFERENCES]:
                rows.references_S[slot] += 1
    rows.counts_2[MISSES] += count
    staged, tries = 0, (rows.clock_5[MOST_REFERENCES] + 1) * (rows.clock_5[END] - rows.clock_5[BEGIN]) if keep else 0
    for k in range(count):
        slot = 0
        while tries > 0 and slot == 0:
            tries -= 1
            hand = rows.clock_5[CLOCK_HAND]
            rows.clock_5[CLOCK_HAND] = hand + 1 if hand + 1 < rows.clock_5[END] else rows.clock_5[BEGIN]
            if rows.turn_S[hand] == turn and rows.owner_S[hand] >= 0:
                continue
            if rows.references_S[hand] > 0:
                rows.references_S[hand] -= 1
            else:
                slot = hand
        if slot == 0:
            slot = staging + staged
            staged += 1
        elif rows.owner_S[slot] >= 0:
            rows.slot_N[rows.owner_S[slot]] = 0
        rows.owner_S[slot], rows.slot_N[row_I[k]], rows.turn_S[slot] = row_I[k], slot, turn
        rows.references_S[slot], slot_I[k] = 0, slot
    return count, staged


@public
def clear_staged(rows: LayerRows, staging: int, count: int) -> None:
    """Forget the rows in some slots for staged ones."""
    for slot in range(staging, staging + count):
        if rows.owner_S[slot] >= 0:
            rows.slot_N[rows.owner_S[slot]] = 0
            rows.owner_S[slot] = -1


@public
def forget(rows: LayerRows) -> None:
    """Forget all rows in cached slots, for what they hold is not certain."""
    for slot in range(rows.clock_5[BEGIN], rows.clock_5[END]):
        if rows.owner_S[slot] >= 0:
            rows.slot_N[rows.owner_S[slot]] = 0
        rows.owner_S[slot] = -1
        rows.references_S[slot] = 0
