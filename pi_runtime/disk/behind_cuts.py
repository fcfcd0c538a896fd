"""How a budget of RAM is divided beside a GPU: of each expert the rows before its cut are the GPU's.

The rows behind the cuts are pinned, cached or on disk, as those of a run without a GPU are (`ram_plan`). Each layer has
a cache of its own, whatever its rung.

Shape letters: L layers, X experts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import embedding_on_disk_nbytes, least_row_buffers, row_buffers, slot_nbytes
from pi_runtime.artifact.rungs import rung_in_mode
from pi_runtime.artifact.schema import SIDES, Plan
from pi_runtime.disk.ram_plan import PINNED_SHARE, RamPlan, Slots, cost_of_each, refuse_below
from pi_runtime.kernels.data.matrix_view import Ints

_, GPU = SIDES


def plan_behind_cuts(
    artifact: Artifact, mode: str, budget: int, fixed: int, gpu: Plan,
    away: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> RamPlan:  # fmt: skip
    """Divide a budget of RAM for a run with this placement; `fixed` bytes are taken whatever the division.

    `away`: rows of arrays that a GPU has (see `RamPlan`), which then also reads prompts; None where this memory stands
    in for it.

    The placement's own division is taken where it was solved for this mode, with caches longer by what is left, or
    shorter by what lacks: a GPU's driver and staging memory are not the placement's. Where they cannot be as short as
    that, a rule divides. Raises DoesNotFitError naming the smallest budget that fits.
    """
    m = artifact.manifest
    d, nbytes = m.decoder, slot_nbytes(m.decoder, m.formats["ffn"])
    both = sum(nbytes.values())
    least = fixed + least_row_buffers(d, both)
    refuse_below(artifact, budget, least)
    buffers = row_buffers(d, both, budget - fixed)
    gate_L, packed_L = ([rung_in_mode(layer.rung, how).needs_all_first for layer in m.layers] for how in (mode, "auto"))
    cut_LX = np.array(gpu.cuts, np.int64).reshape(d.n_layers, d.n_experts)
    cold_LX = d.d_ff - cut_LX
    everything = int(cold_LX.sum()) * both
    stored, cost_L = gpu.rows if gate_L == packed_L else None, cost_of_each(nbytes, gate_L)
    kept = None if stored is None else np.array(stored.cached, np.int64) @ cost_L + buffers.left - stored.slot_bytes
    if stored is not None and kept is not None and kept >= 0 and buffers.left < everything:
        pinned_LX = np.array(stored.pinned, np.int64).reshape(cut_LX.shape)
        cached_L = np.array(stored.cached, np.int64)
        if buffers.left >= stored.slot_bytes:
            cached_L = cached_L + (buffers.left - stored.slot_bytes) // cost_L.sum()
        else:
            cached_L = cached_L * kept // (cached_L @ cost_L)
        resident_L: Sequence[bool] = stored.first
    else:
        stored, (pinned_LX, cached_L, resident_L) = None, _by_rule(d, cold_LX, nbytes, gate_L, buffers.left)
    cold_L = cold_LX.sum(1)
    rest = [_slots(*of) for of in zip(pinned_LX.sum(1), np.minimum(cached_L, cold_L - pinned_LX.sum(1)), strict=True)]
    whole = [Slots(int(cold) if resident else 0, 0) for cold, resident in zip(cold_L, resident_L, strict=True)]
    on_disk = 0 if gpu.embedding == GPU else embedding_on_disk_nbytes(d, m.formats["embedding"])
    return RamPlan(
        budget=budget,
        fixed=fixed,
        first_L=tuple(whole[n] if gate else rest[n] for n, gate in enumerate(gate_L)),
        rest_L=tuple(rest),
        staged=buffers.staged,
        ahead=buffers.staged // 2,
        block_tokens=BLOCK_TOKENS if away is not None else buffers.tokens or BLOCK_TOKENS,
        two_phases_L=tuple(gate_L),
        by_expert_L=(False,) * d.n_layers,
        whole_embedding=budget - least >= everything + on_disk or gpu.embedding == GPU,
        stored=stored,
        cuts_LX=tuple(map(tuple, cut_LX.tolist())),
        pinned_LX=tuple(map(tuple, pinned_LX.tolist())),
        away=away or {},
    )


def _slots(pinned: int, cached: int) -> Slots:
    return Slots(int(pinned), int(cached))


def _by_rule(
    d: Decoder, cold_LX: Ints, nbytes: Mapping[str, int], gate_L: Sequence[bool], room: int
) -> tuple[Ints, Ints, list[bool]]:
    """Rows that are pinned behind each cut, and cached in each layer: every layer's equal share, half of it pinned.

    Of layers that ask for all of `first` it is resident where there is room for it.
    """
    resident_L = [False] * d.n_layers
    cold_L = cold_LX.sum(1)
    for n in np.flatnonzero(gate_L).tolist():
        if room >= cold_L[n] * nbytes["first"]:
            resident_L[n] = True
            room -= int(cold_L[n]) * nbytes["first"]
    cost = int(cold_L @ cost_of_each(nbytes, gate_L))
    if room >= cost:
        return cold_LX, np.zeros_like(cold_L), resident_L
    pinned_LX = (cold_LX * (room / cost * PINNED_SHARE)).astype(np.int64)
    cached_L = (cold_L * (room / cost)).astype(np.int64) - pinned_LX.sum(1)
    return pinned_LX, cached_L, resident_L
