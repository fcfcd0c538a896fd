"""A quick placement, not an optimal one: a second opinion beside the exact solver, and what can be had at all.

Takes one step after another: of all larger cuts, blocks (a layer's attention with its cache, norms and predictor), head
and embedding, the one that saves most time a byte and still fits. Steps of nearly the best worth are taken as long as
they can be. Starts once with everything on the CPU, and once with head, embedding and, from the last layer back, all
blocks that fit on the GPU, because no single step pays for the crossings that both together save.
"""

from dataclasses import dataclass

import numpy as np

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import Costs, token_time
from pi_compile.placement.formulation import Choice, Sizes

_NEARLY = 0.98


@dataclass
class _State:
    costs: Costs
    sizes: Sizes
    sides: list[int]
    places: list[int]
    embedding: int
    head: int

    def choice(self) -> Choice:
        cuts = tuple(int(self.costs.cuts[j]) for j in self.places)
        return Choice(sides=tuple(self.sides), cuts=cuts, embedding=self.embedding, head=self.head)

    def neighbours(self, layer: int) -> tuple[int, int]:
        """Sides of the residual before and behind a layer."""
        before = self.sides[layer - 1] if layer else self.embedding
        behind = self.sides[layer + 1] if layer + 1 < len(self.sides) else self.head
        return before, behind


def greedy(costs: Costs, sizes: Sizes, capacity: int, limit: int | None = None) -> Choice:
    """The better of two placements of at most `capacity` bytes of GPU memory, scratch included.

    Goes on past the point where time is saved while RAM holds more than `limit`. It may end above it: then nothing
    larger fitted.
    """
    layers, left = len(costs.layers), capacity - sizes.scratch[GPU]
    found = [_filled(_State(costs, sizes, [CPU] * layers, [0] * layers, CPU, CPU), max(left, 0), limit)]
    ends = sizes.parts.embedding + sizes.parts.positions + sizes.parts.head + sizes.parts.final_norm
    if len(costs.units) > 1 and ends <= left:
        left -= ends
        sides = [CPU] * layers
        for n in reversed(range(layers)):
            if sizes.block(n) > left:
                break
            sides[n], left = GPU, left - sizes.block(n)
        found.append(_filled(_State(costs, sizes, sides, [0] * layers, GPU, GPU), left, limit))

    def worth(choice: Choice) -> tuple[bool, int]:
        over = limit is not None and sum(sizes.used(choice)[CPU].values()) > limit
        return over, token_time(costs, choice.sides, choice.cuts, choice.embedding, choice.head).total

    return min(found, key=worth)


def _filled(state: _State, left: int, limit: int | None) -> Choice:
    """Step after step from a start, `left` bytes being free."""
    costs, sizes, layers = state.costs, state.sizes, len(state.sides)
    if len(costs.units) < 2 or not left:
        return state.choice()
    steps = [_step(state, n, left) for n in range(layers + 2)]
    while True:
        n = int(np.argmax([worth for worth, *_ in steps]))
        worth, nbytes, side, place = steps[n]
        if nbytes > left:
            steps[n] = _step(state, n, left)
            continue
        if nbytes == 0 or (worth <= 0 and (limit is None or sum(sizes.used(state.choice())[CPU].values()) <= limit)):
            return state.choice()
        left -= nbytes
        changed = {n}
        if n >= layers or side != state.sides[n]:
            # A tied head's bytes depend on the embedding's side, and either's time on its neighbour.
            changed |= {max(0, n - 1), min(layers - 1, n + 1), 0, layers - 1, layers, layers + 1}
        if n < layers:
            state.sides[n], state.places[n] = side, place
        elif n == layers:
            state.embedding = side
        else:
            state.head = side
        for k in changed:
            steps[k] = _step(state, k, left)


_NO_STEP = (-np.inf, 0, GPU, 0)


def _step(state: _State, n: int, left: int) -> tuple[float, int, int, int]:
    """(picoseconds saved a byte, bytes, side, place) of the best step of one layer, the embedding or the head."""
    if n >= len(state.sides):
        return _end_step(state, n - len(state.sides), left)
    costs, sizes, side, place = state.costs, state.sizes, state.sides[n], state.places[n]
    before, behind = state.neighbours(n)
    best, now = _NO_STEP, _layer_time(costs, n, side, before, behind)[place]
    for to in (side, GPU) if side == CPU else (side,):
        nbytes = (costs.cuts - costs.cuts[place]) * sizes.parts.neuron + (sizes.block(n) if to != side else 0)
        places = np.nonzero((nbytes > 0) & (nbytes <= left) & (costs.cuts >= costs.cuts[place]))[0]
        if not len(places):
            continue
        worth = (now - _layer_time(costs, n, to, before, behind)[places]) / nbytes[places]
        good = worth.max()
        j = int(np.nonzero(worth >= (good * _NEARLY if good > 0 else good))[0][-1])
        best = max(best, (float(worth[j]), int(nbytes[places[j]]), to, int(places[j])))
    return best


def _layer_time(
    costs: Costs, n: int, side: int, before: int, behind: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return costs.layer_ps(n, side) + costs.crossing * ((side != before) + (side != behind))


def _end_step(state: _State, end: int, left: int) -> tuple[float, int, int, int]:
    """Of the embedding (0) or the head (1)."""
    costs, sizes, here = state.costs, state.sizes, state.head if end else state.embedding
    if here == GPU:
        return _NO_STEP
    choice = state.choice()
    moved = Choice(
        sides=choice.sides,
        cuts=choice.cuts,
        embedding=choice.embedding if end else GPU,
        head=GPU if end else choice.head,
    )
    there, was = (sum(sizes.used(c)[GPU].values()) - sizes.scratch[GPU] * c.uses_gpu for c in (moved, choice))
    nbytes = there - was
    next_to = state.sides[-1] if end else state.sides[0]
    times = costs.head if end else costs.embedding
    saved = times[CPU] - times[GPU] + costs.crossing * ((next_to != CPU) - (next_to != GPU))
    if nbytes > left:
        return _NO_STEP
    return (saved / max(nbytes, 1), nbytes, GPU, 0) if nbytes or saved > 0 else _NO_STEP
