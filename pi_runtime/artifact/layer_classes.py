"""Classes of layers: those whose keys and values are kept alike have their pages in common.

A class is its layers, what a page of them takes, and how many positions a token sees: a page that no later token sees
is given back while its sequence goes on. A model whose layers are all alike has one class. Each class has pages of a
width of its own. A layer without attention, or that reads the keys of another, has none, and so stands in no class. The
states of layers with a recurrence are the page of a class that needs the last place alone, and there the very length
that they are of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pi_runtime.artifact.buffers import Buffer, kv_page, kv_pages, state_page
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import POSITIONS

ROLL_BACK = POSITIONS
"""Newest positions that a sequence can take back without losing what it sees from there."""


@dataclass(frozen=True)
class LayerClass:
    """Layers that share their pages. A page is known by its place: it holds positions from 32 × place on."""

    layers: tuple[int, ...]
    window: int
    """Positions that a token sees, its own included; 0 for all up to its own."""
    page: Buffer
    is_state: bool = False
    """Whether its page holds states, which are those of one length."""

    @property
    def comes_alone(self) -> bool:
        """Whether a place may have a page of it where places before have none: it is not needed later."""
        return self.window > 0 or self.is_state

    def first_page(self, length: int) -> int:
        """The place of the first page that a token at position `length`, or a later one, sees."""
        if self.is_state:
            return max(0, length - 1) // POSITIONS
        return max(0, length + 1 - self.window) // POSITIONS if self.window else 0

    def kept_from(self, length: int) -> int:
        """The place of the first page that a sequence of so many positions keeps."""
        return self.first_page(max(0, length - ROLL_BACK))

    def pages(self, length: int) -> range:
        """The places of the pages without which a sequence of so many positions cannot go on."""
        return range(self.first_page(length), kv_pages(length))

    def most_pages(self, positions: int, step: int) -> int:
        """Most pages that a sequence of so many positions holds at once, if a step brings at most `step` of them."""
        if self.is_state:
            return 1
        windowed = kv_pages(self.window + ROLL_BACK + step - 2) + 1
        return min(kv_pages(positions), windowed) if self.window else kv_pages(positions)


def layer_classes(d: Decoder, fmt: str) -> tuple[LayerClass, ...]:
    """The classes of a model with keys and values in this format, by their first layers; then that of states."""
    states = d.recurrent_layers
    without = {*states, *d.ffn_only_layers, *d.shared_key_layers}
    windows = {n: d.window if n in d.windowed_layers else 0 for n in range(d.n_layers) if n not in without}
    found = []
    for window in dict.fromkeys(windows.values()):
        layers = tuple(layer for layer, own in windows.items() if own == window)
        found.append(LayerClass(layers, window, kv_page(d.of_layer(layers[0]), fmt, len(layers))))
    if states:
        found.append(LayerClass(states, 0, state_page(d), is_state=True))
    return tuple(found)


def layer_nbytes(d: Decoder, fmt: str, positions: int, step: int) -> tuple[int, ...]:
    """Most bytes that a sequence of so many positions holds at once of each layer (see `LayerClass.most_pages`)."""
    found = [0] * d.n_layers
    for one in layer_classes(d, fmt):
        for layer in one.layers:
            found[layer] = one.most_pages(positions, step) * one.page.nbytes // len(one.layers)
    return tuple(found)


def sequence_nbytes(classes: Sequence[LayerClass], positions: int, step: int) -> int:
    """The same of all layers together, from their classes."""
    return sum(one.most_pages(positions, step) * one.page.nbytes for one in classes)
