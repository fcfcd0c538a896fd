"""How the memory of a run is divided: what is resident, which rows are pinned, and how many slots caches have.

Shape letters: L layers, N rows of a layer (all experts).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pi_runtime.artifact.buffers import cache_format
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.layer_classes import layer_classes, sequence_nbytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import (
    EMBEDDING_ARRAYS,
    PROCESS_NBYTES,
    PROMPT_TOKENS,
    ROW_ARRAYS,
    all_rows,
    disk_workspace_bytes,
    embedding_on_disk_nbytes,
    embedding_rows,
    least_row_buffers,
    row_buffers,
    slot_nbytes,
)
from pi_runtime.artifact.rungs import rung_in_mode
from pi_runtime.artifact.schema import Manifest, RowPlan
from pi_runtime.console import size
from pi_runtime.errors import DoesNotFitError, Setting
from pi_runtime.kernels.data.matrix_view import Ints

_NOT_RESIDENT = (*(f"/ffn/{array}" for array in ROW_ARRAYS), "/ffn/order", "/ffn/counts")
PINNED_SHARE = 0.5
"""Share of the slots that keep the rows that fire most often; the others are a cache."""
_EXPONENT = 0.83
"""Exponent of the power law that frequencies are taken to follow without counts. The hottest neuron comes first."""
_ALIGN = 64


@dataclass(frozen=True)
class Slots:
    """The slots of one layer's rows of one array."""

    pinned: int
    """Rows that stay: of each expert, equally many of those that are stored first. Of whole experts all or none."""
    cached: int
    """Rows of the layer's cache, or its part of what layers share whose experts are read as a whole."""


@dataclass(frozen=True, kw_only=True)
class RamPlan:
    """The division of a budget."""

    budget: int
    fixed: int
    """Bytes of all that is resident whatever the division: weights other than rows, buffers, keys and values, and the
    process itself."""
    first_L: tuple[Slots, ...]
    rest_L: tuple[Slots, ...]
    staged: int
    """Rows of each array that stay for one step only, in each of two regions."""
    ahead: int
    """The same for rows that are read before their layer's turn."""
    block_tokens: int
    """Most tokens of a prompt that go through a layer before the next one is read."""
    two_phases_L: tuple[bool, ...]
    """Whether a layer's `rest` is read only for neurons that turned out to fire."""
    by_expert_L: tuple[bool, ...]
    """Whether a layer's experts come and go as a whole: all of their rows are needed."""
    whole_embedding: bool
    """Whether all of the embedding is in memory."""
    stored: RowPlan | None = None
    """The stored division that this one follows; None where it goes by the rule."""
    cuts_LX: tuple[tuple[int, ...], ...] = ()
    """Rows of each expert that are the GPU's, those that are stored first; () without one (see `behind_cuts`)."""
    pinned_LX: tuple[tuple[int, ...], ...] = ()
    """Rows behind each of these cuts that are pinned."""
    away: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Of each array the ranges of rows that a GPU has; none where this memory stands in for it, and they are here."""

    def cut(self, layer: int, expert: int) -> int:
        """The first neuron of an expert that is not the GPU's."""
        return self.cuts_LX[layer][expert] if self.cuts_LX else 0

    def slots(self, name: str) -> int:
        """Slots of all layers for one of `ROW_ARRAYS`: an empty one, pinned and cached ones, and staged ones."""
        layers = self.first_L if name == "first" else self.rest_L
        return 1 + sum(one.pinned + one.cached for one in layers) + 2 * (self.staged + self.ahead)


def resident_nbytes(manifest: Manifest, whole_embedding: bool) -> dict[str, int]:
    """Bytes of what is in memory of each array that a run reads, rows of FFNs apart: all of it, but of an untied
    embedding some rows, unless it is `whole_embedding`."""
    d = manifest.decoder
    found = {name: entry.nbytes for name, entry in manifest.arrays.items() if _is_resident(name)}
    if whole_embedding:
        return found
    return found | {name: found[name] // d.vocab_size * embedding_rows(d) for name in EMBEDDING_ARRAYS if name in found}


def _is_resident(name: str) -> bool:
    """A guess head is not run here: a block of drafted tokens would read more rows than it saves."""
    return not name.endswith(_NOT_RESIDENT) and not name.startswith(PREFIX)


def places_of(nbytes_of: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each array begins in their common memory, and the bytes of that."""
    places, at = {}, 0
    for name, nbytes in nbytes_of.items():
        places[name] = at
        at += -(-nbytes // _ALIGN) * _ALIGN
    return places, at


def batch_rows(staged: int) -> int:
    """Most rows that one batch of reads has: of each array as many as are staged at once."""
    return 2 * staged + 64


def sequence_kv_bytes(manifest: Manifest, context: int, cache: str) -> int:
    """Bytes of one sequence's keys and values for the whole context."""
    classes = layer_classes(manifest.decoder, cache_format(manifest.formats["attention"], cache))
    return sequence_nbytes(classes, context, max(PROMPT_TOKENS))


def fixed_bytes(manifest: Manifest, context: int, cache: str, kv_nbytes: int) -> int:
    """Bytes of a run that no division changes, with so many for keys and values."""
    rank = max((layer.rank or 0 for layer in manifest.layers), default=0)
    workspace = disk_workspace_bytes(manifest.decoder, rank, BLOCK_TOKENS, context, cache)
    return PROCESS_NBYTES + sum(resident_nbytes(manifest, whole_embedding=False).values()) + workspace + kv_nbytes


def useful_budgets(manifest: Manifest, fixed: int) -> tuple[int, int]:
    """The smallest budget with which a model runs, and the one from which on nothing is read any more."""
    d, both = manifest.decoder, sum(slot_nbytes(manifest.decoder, manifest.formats["ffn"]).values())
    least = fixed + least_row_buffers(d, both)
    return least, least + all_rows(d, both) + embedding_on_disk_nbytes(d, manifest.formats["embedding"])


def plan_for(artifact: Artifact, mode: str, budget: int, fixed: int) -> RamPlan:
    """Divide a budget: by the largest stored division that it holds, with what is left as further slots of caches.

    Where none fits, or where the mode is not the one that they were solved for, a rule divides it: rows that fire often
    are pinned, the others share caches by how often they fire. Raises DoesNotFitError naming the smallest budget that
    fits.
    """
    m = artifact.manifest
    nbytes = slot_nbytes(m.decoder, m.formats["ffn"])
    least, most = useful_budgets(m, fixed)
    refuse_below(artifact, budget, least, _parts(m, least))
    buffers = row_buffers(m.decoder, sum(nbytes.values()), budget - fixed)
    room = buffers.left
    gate_L, packed_L = ([rung_in_mode(layer.rung, how).needs_all_first for layer in m.layers] for how in (mode, "auto"))
    holds_rows = budget >= most - embedding_on_disk_nbytes(m.decoder, m.formats["embedding"])
    stored = None if gate_L != packed_L or holds_rows else _largest(m, room)
    whole_L = [rung_in_mode(layer.rung, mode).dense and m.decoder.n_experts > 1 for layer in m.layers]
    slots = (
        _by_rule(artifact, nbytes, gate_L, whole_L, room)
        if stored is None
        else _as_stored(m, stored, nbytes, gate_L, whole_L, room)
    )
    return RamPlan(
        budget=budget,
        fixed=fixed,
        first_L=tuple(slots["first"]),
        rest_L=tuple(slots["rest"]),
        staged=buffers.staged,
        ahead=buffers.staged // 2,
        block_tokens=buffers.tokens or BLOCK_TOKENS,
        two_phases_L=tuple(gate_L),
        by_expert_L=tuple(whole_L),
        whole_embedding=budget >= most,
        stored=stored,
    )


def _parts(m: Manifest, least: int) -> str:
    """What the smallest budget is for, in words."""
    weights = sum(resident_nbytes(m, whole_embedding=False).values())
    parts = {"the process": PROCESS_NBYTES, "weights that are not read from disk": weights}
    parts["keys, values and buffers"] = least - sum(parts.values())
    return ", ".join(f"{size(nbytes)} for {part}" for part, nbytes in parts.items())


def refuse_below(artifact: Artifact, budget: int, least: int, parts: str = "") -> None:
    """Raise DoesNotFitError for a budget below the smallest one with which the artifact runs, and what has `parts`."""
    if budget < least:
        raise DoesNotFitError(
            (f"{artifact.path}: ", Setting("ram_budget"), " is too small to run it, however slowly"),
            expected=f"at least {least} bytes" + (f": {parts}" if parts else ""),
            found=f"{budget} bytes",
            remedy=(
                Setting("ram_budget", -(-least // 2**20) << 20),
                ", or a smaller ",
                Setting("context"),
                ", which keys and values follow",
            ),
        )


def _largest(m: Manifest, room: int) -> RowPlan | None:
    """The stored division with most rows that `room` holds; None where none fits."""
    return max((p for p in m.row_plans if p.slot_bytes <= room), key=lambda p: p.slot_bytes, default=None)


def _as_stored(
    m: Manifest, plan: RowPlan, nbytes: Mapping[str, int], gate_L: Sequence[bool], whole_L: Sequence[bool], room: int
) -> dict[str, list[Slots]]:
    """The slots of a stored division; every layer's cache gets equally many of those that are left."""
    neurons = m.decoder.neurons
    more = (room - plan.slot_bytes) // int(cost_of_each(nbytes, gate_L).sum())
    rest = [
        _slots(m.decoder, pinned, min(neurons - pinned, cached + more), whole)
        for pinned, cached, whole in zip(plan.pinned, plan.cached, whole_L, strict=True)
    ]
    whole = [Slots(neurons if resident else 0, 0) for resident in plan.first]
    first = [whole[n] if gate else rest[n] for n, gate in enumerate(gate_L)]
    return {"first": first, "rest": rest}


def _slots(d: Decoder, pinned: int, cached: int, whole: bool) -> Slots:
    """So many slots; where experts come and go as a whole all are cached, in whole experts, unless all rows stay."""
    if not whole or pinned == d.neurons:
        return Slots(pinned, cached)
    return Slots(0, (pinned + cached) // d.d_ff * d.d_ff)


def _by_rule(
    artifact: Artifact, nbytes: dict[str, int], gate_L: Sequence[bool], whole_L: Sequence[bool], room: int
) -> dict[str, list[Slots]]:
    """The slots of a division by rule."""
    d, layers = artifact.manifest.decoder, len(gate_L)
    slots: dict[str, list[Slots]] = {name: [Slots(0, 0)] * layers for name in ROW_ARRAYS}
    for n in np.flatnonzero(gate_L).tolist():  # asked for whole with every token: all of it, or none
        if room >= d.neurons * nbytes["first"]:
            slots["first"][n] = Slots(d.neurons, 0)
            room -= d.neurons * nbytes["first"]
    often_LF = np.array([np.sort(_often(artifact, n).reshape(d.n_experts, -1).sum(0))[::-1] for n in range(layers)])
    divided = _divided(d, often_LF, cost_of_each(nbytes, gate_L), np.array(whole_L), room)
    for n, found in enumerate(divided):
        slots["rest"][n] = found
        if not gate_L[n]:
            slots["first"][n] = found
    return slots


def cost_of_each(nbytes: Mapping[str, int], gate_L: Sequence[bool]) -> Ints:
    """(L,) bytes that a neuron takes in a cache of each layer, by the bytes of a slot of each array."""
    return np.array([nbytes["rest"] + (0 if gate else nbytes["first"]) for gate in gate_L])


def _counts(artifact: Artifact, layer: int) -> np.ndarray | None:
    """How often each neuron of a layer fires, by the profile's counts, if there are any."""
    name = f"layers/{layer}/ffn/counts"
    return artifact.values(name).astype(np.float64) if name in artifact.manifest.arrays else None


def _often(artifact: Artifact, layer: int) -> np.ndarray:
    """How often each neuron of a layer fires, by the profile's counts; without one, by a law of stored order."""
    d, found = artifact.manifest.decoder, _counts(artifact, layer)
    return np.tile(np.arange(1.0, d.d_ff + 1) ** -_EXPONENT, d.n_experts) if found is None else found


def expert_counts(artifact: Artifact, layer: int) -> np.ndarray:
    """How often neurons of each expert of a layer fire, by the profile's counts; all 0 without one."""
    d, found = artifact.manifest.decoder, _counts(artifact, layer)
    return np.zeros(d.n_experts) if found is None else found.reshape(d.n_experts, -1).sum(1)


def _divided(d: Decoder, often_LF: np.ndarray, cost_L: np.ndarray, whole_L: np.ndarray, room: int) -> list[Slots]:
    """Slots of each layer: a share of the room pins the rows that fire most often, the rest goes by what is left.

    Rows are pinned in groups, equally many of each expert; `often_LF` has the groups of each layer, those that fire
    most often first. Layers whose experts come and go as a whole pin none, and share one cache.
    """
    if room >= int(cost_L.sum()) * d.neurons:
        return [Slots(d.neurons, 0)] * len(often_LF)
    step_L = d.n_experts * cost_L
    order = np.argsort(-(often_LF / step_L[:, None]).ravel(), kind="stable")
    layer_G = order // d.d_ff
    layer_G = layer_G[~whole_L[layer_G]]
    taken_G = layer_G[np.cumsum(step_L[layer_G]) <= room * PINNED_SHARE]
    pinned_L = np.bincount(taken_G, minlength=len(often_LF))
    room -= int((pinned_L * step_L).sum())
    left_L = np.array([often_F[p:].sum() for often_F, p in zip(often_LF, pinned_L, strict=True)])
    if whole_L.any() or not left_L.sum():
        left_L = np.ones(len(left_L))
    found, spare = [], 0
    for n, share in enumerate(left_L / left_L.sum()):
        pinned, own, cost = int(pinned_L[n]) * d.n_experts, int(room * share) + spare, int(cost_L[n])
        found.append(_slots(d, pinned, min(d.neurons - pinned, own // cost), bool(whole_L[n])))
        spare = own - found[n].cached * cost if whole_L[n] else 0
    return found
