"""Which rows are in memory, and in which slots: compiled lookups, one call for a layer.

A row is in slot `slot_N[row]`, or absent where that is 0: slot 0 holds zeros, which a kernel may read in place of a
row whose factor is 0. A layer's slots are *pinned* ones, which keep their rows, and a ring of *cached* ones. A row that
is found gets a reference; the clock's hand takes away one at a time, and a row without any makes room (GCLOCK). With at
most one reference this is close to the least recently used; with more, to the least frequently used.
Rows for which there is no room, or that are not worth any, are *staged*: they go to slots that all layers share, until
`clear_staged`.

Where an expert's rows are always needed together they come and go together, as a *unit*, in slots that follow each
other. Layers of such experts share one ring. The unit with the least *heat* makes room there (`whole_experts.Heat`).

Shape letters: N rows of a layer (all experts), S slots, I rows that are asked for, C chunks, U units of all layers that
share a ring.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import CHUNKS, GROUP
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Ints
from pi_runtime.kernels.ffn.memory import bit_reversed

BEGIN, END, CLOCK_HAND, TURN, MOST_REFERENCES, UNIT, TURNS = range(7)
"""What `LayerRows.clock_7` holds: the cached slots, the hand's place, the number of the current turn, the most
references that a row gets, the rows of a unit, and for how many turns a row that was asked for stays."""
HITS, MISSES = range(2)


class LayerRows(NamedTuple):
    """One layer's rows of one array (`first` or `rest`)."""

    slot_N: Ints
    clock_7: Ints
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
    heat_U: npt.NDArray[np.float64]
    """How often each unit was used lately, of all of these."""


def rows_of(
    neurons: int, begin: int, end: int, most_references: int, owner_S: Ints, references_S: Ints, turn_S: Ints
) -> LayerRows:
    """A layer's rows, none of them there, with a ring of its own: the cached slots [begin, end)."""
    clock_7 = np.array([begin, end, begin, 0, most_references, 1, 1], np.int64)
    slot_N, counts_2 = np.zeros(neurons, np.int64), np.zeros(2, np.int64)
    return LayerRows(slot_N, clock_7, owner_S, references_S, turn_S, counts_2, slot_N, 0, np.zeros(0))


def in_one_ring(rows: LayerRows, layers: int, unit: int, heat_U: npt.NDArray[np.float64]) -> list[LayerRows]:
    """The rows of some layers that share the ring of `rows`, by units; a unit stays for two turns, because those of the
    next layer may come while this one's are used."""
    rows.clock_7[[UNIT, TURNS]] = unit, 2
    slot_LN = np.zeros((layers, len(rows.slot_N)), np.int64)
    slot_A = slot_LN.reshape(-1)
    return [rows._replace(slot_N=slot_LN[n], slot_A=slot_A, layer=n, heat_U=heat_U) for n in range(layers)]


def place(rows: LayerRows, row_I: Ints, slot: int) -> None:
    """Say that these rows are in the slots from this one on."""
    rows.owner_S[slot : slot + len(row_I)] = rows.layer * len(rows.slot_N) + row_I
    rows.slot_N[row_I] = np.arange(slot, slot + len(row_I))


def end_unit(rows: LayerRows, row: int) -> None:
    """Say that the unit with this first row may go before the turn is over."""
    rows.turn_S[rows.slot_N[row]] = -1


@public
def begin_turn(rows: LayerRows, base: int, neuron_I: Ints, goes_on: bool) -> int:
    """Begin a layer's turn, in which the rows base + neuron are needed: returns how many are absent.

    Those that are there stay until the next turn. `goes_on`: rows of the turn before stay too.
    """
    if not goes_on:
        rows.clock_7[TURN] += 1
    turn, absent = rows.clock_7[TURN], 0
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
def _free_row(rows: LayerRows, tries: int) -> tuple[int, int]:
    """Move the hand to a row of the ring that may go, at most so many tries; returns its slot, or 0, and what is left
    of the tries."""
    clock_7, slot = rows.clock_7, 0
    while tries > 0 and slot == 0:
        tries -= 1
        hand = clock_7[CLOCK_HAND]
        clock_7[CLOCK_HAND] = hand + 1 if hand + 1 < clock_7[END] else clock_7[BEGIN]
        if rows.owner_S[hand] >= 0 and rows.turn_S[hand] == clock_7[TURN]:
            continue
        if rows.references_S[hand] > 0:
            rows.references_S[hand] -= 1
        else:
            slot = hand
    return slot, tries


@device
def _coldest_unit(rows: LayerRows) -> int:
    """The first slot of the ring's unit with least heat of those that may go, an empty one before others; or 0."""
    clock_7, coldest, least = rows.clock_7, 0, np.inf
    for slot in range(clock_7[BEGIN], clock_7[END], clock_7[UNIT]):
        owner = rows.owner_S[slot]
        if owner < 0:
            return slot
        heat = rows.heat_U[owner // clock_7[UNIT]]
        if heat < least and rows.turn_S[slot] <= clock_7[TURN] - clock_7[TURNS]:
            coldest, least = slot, heat
    return coldest


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
    clock_7, every = rows.clock_7, begin == 0 and end == CHUNKS
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
            if rows.references_S[slot] < clock_7[MOST_REFERENCES]:
                rows.references_S[slot] += 1
    rows.counts_2[MISSES] += count
    unit, first = clock_7[UNIT], rows.layer * rows.slot_N.shape[0]
    listed, staged, k = 0, 0, 0
    tries = (clock_7[MOST_REFERENCES] + 1) * (clock_7[END] - clock_7[BEGIN]) if keep else 0
    while k < count:
        is_unit = row_I[k] % unit == 0 and k + unit <= count and row_I[k + unit - 1] == row_I[k] + unit - 1
        length, slot = (unit if is_unit else 1), 0
        if unit == 1:
            slot, tries = _free_row(rows, tries)
        elif is_unit and keep:
            slot = _coldest_unit(rows)
        is_cached = slot != 0
        if not is_cached:
            slot = staging + staged
            staged += length if staging >= 0 else 0
        for i in range(length if is_cached or staging >= 0 else 0):
            if is_cached and rows.owner_S[slot + i] >= 0:
                rows.slot_A[rows.owner_S[slot + i]] = 0
            row = row_I[k + i]
            rows.owner_S[slot + i], rows.slot_N[row], rows.turn_S[slot + i] = first + row, slot + i, clock_7[TURN]
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
    for slot in range(rows.clock_7[BEGIN], rows.clock_7[END]):
        if rows.owner_S[slot] >= 0:
            rows.slot_A[rows.owner_S[slot]] = 0
        rows.owner_S[slot] = -1
        rows.references_S[slot] = 0
