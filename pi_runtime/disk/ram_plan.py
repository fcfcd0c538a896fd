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
    MAPPED,
    PROCESS_NBYTES,
    PROMPT_SHARE,
    PROMPT_TOKENS,
    ROW_ARRAYS,
    UNITS,
    disk_workspace_bytes,
    embedding_on_disk_nbytes,
    embedding_rows,
    least_row_buffers,
    row_buffers,
    slot_nbytes,
    token_nbytes,
    unit_nbytes,
    units,
    useful_budgets,
)
from pi_runtime.artifact.rungs import rung_in_mode
from pi_runtime.artifact.schema import SIDES, Manifest, Plan, RowPlan
from pi_runtime.errors import DoesNotFitError, Setting, size
from pi_runtime.kernels.data.matrix_view import Ints

_NOT_RESIDENT = tuple(f"/ffn/{name}" for name in (*ROW_ARRAYS, "up", "down", "order", "counts"))
_, GPU = SIDES
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
    cut_LX: Ints
    """Rows of each expert that are the GPU's, those that are stored first; 0 without one."""
    pinned_LX: Ints
    """Rows behind each of these cuts that are pinned, on rungs that need `first` of every neuron those of `rest`."""
    away: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Of each array the ranges of rows that a GPU has; none where this memory stands in for it, and they are here."""

    def cut(self, layer: int, expert: int) -> int:
        """The first neuron of an expert that is not the GPU's."""
        return int(self.cut_LX[layer, expert])

    def slots(self, name: str) -> int:
        """Slots of all layers for one of `ROW_ARRAYS`: an empty one, pinned and cached ones, and staged ones."""
        layers = self.first_L if name == "first" else self.rest_L
        return 1 + sum(one.pinned + one.cached for one in layers) + 2 * (self.staged + self.ahead)


def resident_nbytes(manifest: Manifest, whole_embedding: bool) -> dict[str, int]:
    """Bytes of what is in memory of each array that a run reads, rows of FFNs apart: all of it, but of an untied
    embedding some rows, unless it is `whole_embedding`."""
    d = manifest.decoder
    stay = tuple(f"layers/{n}/ffn/" for n in d.uncut_layers)
    found = {name: entry.nbytes for name, entry in manifest.arrays.items() if _is_resident(name, stay)}
    if whole_embedding:
        return found
    return found | {name: found[name] // d.vocab_size * embedding_rows(d) for name in EMBEDDING_ARRAYS if name in found}


def _is_resident(name: str, stay: tuple[str, ...]) -> bool:
    """A guess head is not run here: a block of drafted tokens would read more rows than it saves."""
    return name.startswith(stay) or not (name.endswith(_NOT_RESIDENT) or name.startswith(PREFIX) or name in MAPPED)


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
    workspace = disk_workspace_bytes(manifest.decoder, rank, BLOCK_TOKENS, context, cache, manifest.ffn_layout)
    return PROCESS_NBYTES + sum(resident_nbytes(manifest, whole_embedding=False).values()) + workspace + kv_nbytes


def plan_for(
    artifact: Artifact, mode: str, budget: int, fixed: int, gpu: Plan | None = None,
    away: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> RamPlan:  # fmt: skip
    """Divide a budget: by a stored division where one suits, else by a rule; `fixed` bytes are taken whatever it is.

    Rows that fire often are pinned, the others share caches by how often they fire. `gpu`: the placement by which rows
    before each expert's cut are elsewhere. `away`: rows of arrays that a GPU has alone (see `RamPlan`), which then also
    reads prompts; None where this memory stands in for it. Raises DoesNotFitError naming the smallest budget that fits.
    """
    m = artifact.manifest
    d, nbytes = m.decoder, slot_nbytes(m.decoder, m.formats["ffn"])
    both, whole_embedding = sum(nbytes.values()), gpu is not None and gpu.embedding == GPU
    cut_LX = np.array((0,) * d.n_layers * d.n_experts if gpu is None else gpu.cuts, np.int64).reshape(d.n_layers, -1)
    least = fixed + least_row_buffers(d, both)
    cold_LX = d.d_ff - cut_LX
    cold_LX[list(d.mixer_only_layers)] = 0
    every_row = least + int(cold_LX.sum()) * both
    most = every_row + (0 if whole_embedding else embedding_on_disk_nbytes(d, m.formats["embedding"]))
    refuse_below(artifact, budget, least, divided=gpu is not None)
    buffers = row_buffers(d, both, budget - fixed)
    gate_L, packed_L = ([rung_in_mode(layer.rung, how).needs_all_first for layer in m.layers] for how in (mode, "auto"))
    whole_L = [
        gpu is None and rung_in_mode(layer.rung, mode).dense and d.n_experts > 1 and cold_LX[n].any()
        for n, layer in enumerate(m.layers)
    ]
    cost_L = np.array([nbytes["rest"] + (0 if gate else nbytes["first"]) for gate in gate_L])
    room = Room(d, cold_LX, cost_L, nbytes["first"], gate_L, whole_L, buffers.left)
    stored = None if gate_L != packed_L or budget >= every_row else _stored(m, gpu, room)
    pinned_LX, cached_L, resident_L = _by_rule(artifact, room) if stored is None else _as_stored(stored, room)
    rest = [Slots(*of) for of in zip(pinned_LX.sum(1).tolist(), cached_L.tolist(), strict=True)]
    cold_L = cold_LX.sum(1).tolist()
    whole = [Slots(cold if resident else 0, 0) for cold, resident in zip(cold_L, resident_L, strict=True)]
    return RamPlan(
        budget=budget,
        fixed=fixed,
        first_L=tuple(whole[n] if gate else rest[n] for n, gate in enumerate(gate_L)),
        rest_L=tuple(rest),
        staged=buffers.staged,
        ahead=buffers.staged // 2,
        block_tokens=BLOCK_TOKENS if away is not None else buffers.tokens or BLOCK_TOKENS,
        two_phases_L=tuple(gate_L),
        by_expert_L=tuple(whole_L),
        whole_embedding=budget >= most or whole_embedding,
        stored=stored,
        cut_LX=cut_LX,
        pinned_LX=pinned_LX,
        away=away or {},
    )


@dataclass(frozen=True, kw_only=True)
class MatrixPlan:
    """The division of a budget among units, prompts and all else."""

    budget: int
    fixed: int
    """Bytes of all that is resident whatever the division."""
    slots: int
    block_tokens: int
    """Most tokens of a prompt that go through a layer before the next one is read."""
    whole_embedding: bool
    """Whether all of the embedding is in memory."""
    away: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Nothing is on a GPU."""


def matrix_plan(artifact: Artifact, budget: int, fixed: int) -> MatrixPlan:
    """Divide a budget, of which `fixed` bytes are taken. Raises DoesNotFitError naming the smallest one that fits."""
    m = artifact.manifest
    least, most = useful_budgets(m, fixed)
    refuse_below(artifact, budget, least)
    d, unit, room = m.decoder, unit_nbytes(m), budget - fixed
    count, left = len(units(m)), room - UNITS * unit
    fitting = (t for t in PROMPT_TOKENS if t * token_nbytes(d) <= min(left, room * PROMPT_SHARE))
    tokens = 0 if room // unit >= count else next(fitting, 0)
    slots = min(count, (room - tokens * token_nbytes(d)) // unit)
    return MatrixPlan(
        budget=budget, fixed=fixed, slots=slots, block_tokens=tokens or BLOCK_TOKENS, whole_embedding=budget >= most
    )


def _parts(m: Manifest, least: int) -> str:
    """What the smallest budget is for, in words."""
    weights = sum(resident_nbytes(m, whole_embedding=False).values())
    parts = {"the process": PROCESS_NBYTES, "weights that are not read from disk": weights}
    parts["keys, values and buffers"] = least - sum(parts.values())
    return ", ".join(f"{size(nbytes)} for {part}" for part, nbytes in parts.items())


def refuse_below(artifact: Artifact, budget: int, least: int, *, divided: bool = False) -> None:
    """Raise DoesNotFitError for a budget below the smallest one with which the artifact runs, and say what that is for
    unless it is `divided` with a GPU."""
    if budget < least:
        parts = "" if divided else _parts(artifact.manifest, least)
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


@dataclass(frozen=True)
class Room:
    """What is divided, and among which rows."""

    decoder: Decoder
    cold_LX: Ints
    """The neurons of each expert that are not a GPU's: the last ones."""
    cost_L: Ints
    """Bytes that a neuron takes in a cache of each layer."""
    first_nbytes: int
    """Bytes of a slot of `first`."""
    gate_L: Sequence[bool]
    """Layers that ask for all of `first` with every token: all of it is resident, or none."""
    whole_L: Sequence[bool]
    """Layers whose experts come and go as a whole."""
    nbytes: int


Division = tuple[Ints, Ints, Sequence[bool]]
"""(L, X) pinned rows behind the cuts, (L,) cached rows of each layer, and whether a layer's `first` is resident."""


def _stored(m: Manifest, gpu: Plan | None, room: Room) -> RowPlan | None:
    """The stored division with most rows that there is room for; None where none fits.

    A placement's own one may have its caches shortened: a GPU's driver and staging memory are not the placement's.
    """
    if gpu is None:
        fitting = (plan for plan in m.row_plans if plan.slot_bytes <= room.nbytes)
        return max(fitting, key=lambda plan: plan.slot_bytes, default=None)
    found = gpu.rows
    fits = found is not None and int(np.array(found.cached) @ room.cost_L) + room.nbytes >= found.slot_bytes
    return found if fits else None


def _as_stored(plan: RowPlan, room: Room) -> Division:
    """A stored division: every layer's cache gets equally many of the slots that are left, or loses its part of what
    lacks."""
    cached_L, left, experts = np.array(plan.cached, np.int64), room.nbytes - plan.slot_bytes, room.decoder.n_experts
    pinned_LX = np.array(plan.pinned, np.int64).reshape(len(cached_L), -1)
    if pinned_LX.shape[1] < experts:
        pinned_LX = np.repeat(pinned_LX // experts, experts, axis=1)
    if left >= 0:
        cached_L = cached_L + left // int(room.cost_L.sum())
    else:
        nbytes = int(cached_L @ room.cost_L)
        cached_L = cached_L * (nbytes + left) // nbytes
    cold_L, pinned_L = room.cold_LX.sum(1), pinned_LX.sum(1)
    cached_L = np.minimum(cached_L, cold_L - pinned_L)
    # Where experts come and go as a whole all are cached, in whole experts, unless all rows stay.
    moves_L = np.array(room.whole_L) & (pinned_L < cold_L)
    cached_L[moves_L] = (pinned_L + cached_L)[moves_L] // room.decoder.d_ff * room.decoder.d_ff
    pinned_LX[moves_L] = 0
    return pinned_LX, cached_L, plan.first


def _by_rule(artifact: Artifact, room: Room) -> Division:
    """A division by how often rows fire: a share of the room pins those that fire most often, the rest goes by what is
    left.

    Rows are pinned in groups, one of each expert, of those that are stored first behind their cuts. Layers whose
    experts come and go as a whole pin none, and share one cache.
    """
    cold_LX, nbytes, resident_L = room.cold_LX, room.nbytes, [False] * len(room.gate_L)
    for n in np.flatnonzero(room.gate_L).tolist():
        if (needed := int(cold_LX[n].sum()) * room.first_nbytes) <= nbytes:
            resident_L[n] = True
            nbytes -= needed
    if nbytes >= int(cold_LX.sum(1) @ room.cost_L):
        return cold_LX, np.zeros(len(cold_LX), np.int64), resident_L
    often_LF = np.array([_often_in_groups(artifact, n, cold_X) for n, cold_X in enumerate(cold_LX)])
    step_LF = (cold_LX[:, :, None] > np.arange(room.decoder.d_ff)).sum(1) * room.cost_L[:, None]
    order = np.argsort(-(often_LF / np.maximum(step_LF, 1)).ravel(), kind="stable")
    layer_G, step_G = order // room.decoder.d_ff, step_LF.ravel()[order]
    may_be_pinned = (step_G > 0) & ~np.array(room.whole_L)[layer_G]
    layer_G, step_G = layer_G[may_be_pinned], step_G[may_be_pinned]
    groups_L = np.bincount(layer_G[np.cumsum(step_G) <= nbytes * PINNED_SHARE], minlength=len(cold_LX))
    pinned_LX = np.minimum(groups_L[:, None], cold_LX)
    nbytes -= int(pinned_LX.sum(1) @ room.cost_L)
    left_L = np.array([often_F[groups:].sum() for often_F, groups in zip(often_LF, groups_L, strict=True)])
    if any(room.whole_L) or not left_L.sum():
        left_L = np.ones(len(left_L))
    return pinned_LX, _caches(room, pinned_LX, left_L / left_L.sum(), nbytes), resident_L


def _caches(room: Room, pinned_LX: Ints, share_L: np.ndarray, nbytes: int) -> Ints:
    """(L,) cached rows by shares of so many bytes; what is less than a whole expert goes to the next layer."""
    left_L, found, spare = (room.cold_LX - pinned_LX).sum(1).tolist(), [], 0
    for n, (share, cost) in enumerate(zip(share_L, room.cost_L.tolist(), strict=True)):
        own = int(nbytes * share) + spare
        cached = min(left_L[n], own // cost)
        if room.whole_L[n]:
            cached -= cached % room.decoder.d_ff
        found.append(cached)
        spare = own - cached * cost if room.whole_L[n] else 0
    return np.array(found, np.int64)


def _often_in_groups(artifact: Artifact, layer: int, cold_X: Ints) -> np.ndarray:
    """(F,) how often the neurons fire that are stored first behind their expert's cut, then those behind them, and so
    on; 0 where no expert has more."""
    often_XF = _often(artifact, layer).reshape(len(cold_X), -1)
    behind_XF = np.zeros_like(often_XF)
    for often_F, behind_F, cold in zip(often_XF, behind_XF, cold_X.tolist(), strict=True):
        behind_F[:cold] = often_F[len(often_F) - cold :]
    return np.sort(behind_XF.sum(0))[::-1]


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
