"""Which rows are in memory, and in which slots: compiled lookups, one call for a layer.

A row is in slot `slot_N[row]`, or absent where that is 0: slot 0 holds zeros, which a kernel may read in place of a
row whose factor is 0. A layer's slots are *pinned* ones, which keep their rows, and a ring of *cached* ones. A row that
is found gets a reference; the clock's hand takes away one at a time, and a row without any makes room (GCLOCK). With at
most one reference this is close to the least recently used; with more, to the least frequently used.
Rows for which there is no room, or that are not worth any, are *staged*: they go to slots that all layers share, until
`clear_staged`.

Where an expert's rows are always needed together they come and go together, as a *unit*, in slots that follow each
other. Layers of such experts share one ring; a layer that holds no more units than the floor loses none to others.

Shape letters: N rows of a layer (all experts), S slots, I rows that are asked for, C chunks.
"""

from typing import NamedTuple

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS, GROUP
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Ints
from pi_runtime.kernels.ffn.memory import bit_reversed

BEGIN, END, CLOCK_HAND, TURN, MOST_REFERENCES, UNIT, TURNS, FLOOR = range(8)
"""What `LayerRows.clock_8` holds: the cached slots, the hand's place, the number of the current turn, the most
references that a row gets, the rows of a unit, for how many turns a row that was asked for stays, and the floor."""
HITS, MISSES = range(2)


class LayerRows(NamedTuple):
    """One layer's rows of one array (`first` or `rest`)."""

    slot_N: Ints
    clock_8: Ints
    owner_S: Ints
    """The row in each slot, of whichever layer has the slot; −1 for none."""
    references_S: Ints
    turn_S: Ints
    """The turn in which a slot's row was last asked for: it must stay until the turn is over."""
    counts_2: Ints
    """Rows that were found, and that were not."""
    slot_A: Ints
    """`slot_N` of all layers that share the ring, one after the other; an owner is a place here."""
    layer: int
    """Which of these this layer is."""
    held_L: Ints
    """Units that each of these has in the ring."""


def rows_of(
    neurons: int, begin: int, end: int, most_references: int, owner_S: Ints, references_S: Ints, turn_S: Ints
) -> LayerRows:
    """A layer's rows, none of them there, with a ring of its own: the cached slots [begin, end)."""
    clock_8 = np.array([begin, end, begin, 0, most_references, 1, 1, 0], np.int64)
    slot_N, counts_2 = np.zeros(neurons, np.int64), np.zeros(2, np.int64)
    return LayerRows(slot_N, clock_8, owner_S, references_S, turn_S, counts_2, slot_N, 0, np.zeros(1, np.int64))


def in_one_ring(rows: LayerRows, layers: int, unit: int, floor: int) -> list[LayerRows]:
    """The rows of some layers that share the ring of `rows`, by units; a unit stays for two turns, because those of the
    next layer may come while this one's are used."""
    rows.clock_8[[UNIT, TURNS, FLOOR]] = unit, 2, floor
    slot_LN, held_L = np.zeros((layers, len(rows.slot_N)), np.int64), np.zeros(layers, np.int64)
    return [rows._replace(slot_N=slot_LN[n], slot_A=slot_LN.reshape(-1), layer=n, held_L=held_L) for n in range(layers)]


def place(rows: LayerRows, row_I: Ints, slot: int) -> None:
    """Say that these rows are in the slots from this one on."""
    rows.owner_S[slot : slot + len(row_I)] = rows.layer * len(rows.slot_N) + row_I
    rows.slot_N[row_I] = np.arange(slot, slot + len(row_I))
    if rows.clock_8[BEGIN] <= slot < rows.clock_8[END]:
        rows.held_L[rows.layer] += len(row_I) // rows.clock_8[UNIT]


@public
def begin_turn(rows: LayerRows, base: int, neuron_I: Ints, goes_on: bool) -> int:
    """Begin a layer's turn, in which the rows base + neuron are needed: returns how many are absent.

    Those that are there stay until the next turn. `goes_on`: rows of the turn before stay too.
    """
    if not goes_on:
        rows.clock_8[TURN] += 1
    turn, absent = rows.clock_8[TURN], 0
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


@device
def _free_unit(rows: LayerRows, tries: int) -> tuple[int, int]:
    """Move the hand to a unit of the ring that may go, at most so many tries; returns its first slot, or 0, and what is
    left of the tries."""
    clock_8, neurons, slot = rows.clock_8, rows.slot_N.shape[0], 0
    while tries > 0 and slot == 0:
        tries -= 1
        hand = clock_8[CLOCK_HAND]
        behind = hand + clock_8[UNIT]
        clock_8[CLOCK_HAND] = behind if behind < clock_8[END] else clock_8[BEGIN]
        owner = rows.owner_S[hand]
        if owner >= 0:
            layer = owner // neurons
            if rows.turn_S[hand] > clock_8[TURN] - clock_8[TURNS]:
                continue
            if layer != rows.layer and rows.held_L[layer] <= clock_8[FLOOR]:
                continue
        if rows.references_S[hand] > 0:
            rows.references_S[hand] -= 1
        else:
            slot = hand
            if owner >= 0:
                rows.held_L[owner // neurons] -= 1
            rows.held_L[rows.layer] += 1
    return slot, tries


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

    Returns how many these are, and how many slots from `staging` on they take; rows that would take one are left out
    where `staging` is negative. `keep`: they may take cached slots.
    """
    clock_8, every = rows.clock_8, begin == 0 and end == CHUNKS
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
            if rows.references_S[slot] < clock_8[MOST_REFERENCES]:
                rows.references_S[slot] += 1
    rows.counts_2[MISSES] += count
    unit, first = clock_8[UNIT], rows.layer * rows.slot_N.shape[0]
    listed, staged, k = 0, 0, 0
    tries = (clock_8[MOST_REFERENCES] + 1) * (clock_8[END] - clock_8[BEGIN]) // unit if keep else 0
    while k < count:
        is_unit = row_I[k] % unit == 0 and k + unit <= count and row_I[k + unit - 1] == row_I[k] + unit - 1
        length, slot = (unit if is_unit else 1), 0
        if is_unit:
            slot, tries = _free_unit(rows, tries)
        is_cached = slot != 0
        if not is_cached:
            slot = staging + staged
            staged += length if staging >= 0 else 0
        for i in range(length if is_cached or staging >= 0 else 0):
            if is_cached and rows.owner_S[slot + i] >= 0:
                rows.slot_A[rows.owner_S[slot + i]] = 0
            row = row_I[k + i]
            rows.owner_S[slot + i], rows.slot_N[row], rows.turn_S[slot + i] = first + row, slot + i, clock_8[TURN]
            rows.references_S[slot + i], row_I[listed], slot_I[listed] = 0, row, slot + i
            listed += 1
        k += length
    return listed, staged


@public
def clear_staged(rows: LayerRows, staging: int, count: int) -> None:
    """Forget the rows in some slots for staged ones."""
    for slot in range(staging, staging + count):
        if rows.owner_S[slot] >= 0:
            rows.slot_A[rows.owner_S[slot]] = 0
            rows.owner_S[slot] = -1


@public
def forget(rows: LayerRows) -> None:
    """Forget all rows in cached slots, for what they hold is not certain."""
    rows.held_L[:] = 0
    for slot in range(rows.clock_8[BEGIN], rows.clock_8[END]):
        if rows.owner_S[slot] >= 0:
            rows.slot_A[rows.owner_S[slot]] = 0
        rows.owner_S[slot] = -1
        rows.references_S[slot] = 0
