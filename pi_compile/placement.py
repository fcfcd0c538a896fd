"""Place: which neurons belong on the GPU.

PowerInfer's program (SOSP'24, section 6.3): maximise the activations that happen on the GPU,

    max Σ_l Σ_{i on GPU in l} count_{l,i}     s.t.  Σ bytes ≤ budget,     per layer: none, or at least C_l neurons.

Neurons are stored hottest group first and every neuron of a layer has the same bytes. So among all sets of g groups of
a layer the first g have the most activations, and only *cuts* need to be considered: in layer l the neurons before the
cut go to the GPU. That leaves one choice a layer, a multiple-choice knapsack, solved exactly (see `knapsack`). Where
the profile's order trades hot mass between near-equal groups (at most 1 %), the cuts are part of the definition.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from pi_compile.activations import GROUP, ActivationProfile
from pi_compile.cost import least_neurons, neuron_bytes
from pi_compile.knapsack import Choice, solve
from pi_compile.machine_file import Machine
from pi_runtime.artifact.schema import Plan
from pi_runtime.errors import DoesNotFitError

Ints = npt.NDArray[np.int64]
OBJECTIVE = "hot-mass"
LADDER = (10, 25, 50, 75, 100)
"""Budgets that every artifact has a plan for, in percent of all neurons' bytes."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The optimum for one budget. Neurons before `cuts[l]` are the GPU's."""

    budget: int
    """GPU bytes there are for neurons."""
    cuts: tuple[int, ...]
    used_bytes: int
    hot_mass: int
    """Activations, over the profiled text, of the neurons on the GPU."""
    total_mass: int
    bound: int
    """Hot mass that no placement can exceed, from the linear relaxation."""

    @property
    def plan(self) -> Plan:
        """What an artifact stores."""
        return Plan(objective=OBJECTIVE, vram_bytes=self.budget, used_bytes=self.used_bytes, cuts=self.cuts)

    def digest(self) -> str:
        """sha256 of the content."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer may be cut at: `cuts[j]` neurons hold `masses[j]` activations in `nbytes[j]` bytes."""

    cuts: Ints
    masses: Ints
    nbytes: Ints


def layers_of(
    profile: ActivationProfile, formats: Mapping[str, str], ranks: Sequence[int | None], machine: Machine
) -> list[Layer]:
    """The allowed cuts of every layer: 0, and every whole number of groups of at least C_l neurons."""
    d = profile.decoder
    layers = []
    for counts, rank in zip(profile.ordered_counts(), ranks, strict=True):
        size = neuron_bytes(d, formats, rank)
        least = least_neurons(machine, size)
        cuts = np.array([*range(GROUP, d.d_ff, GROUP), d.d_ff], np.int64)
        cuts = np.concatenate([[0], cuts[cuts >= least] if least is not None else cuts[:0]])
        mass = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
        layers.append(Layer(cuts=cuts, masses=mass[cuts], nbytes=cuts * size))
    return layers


def place(layers: Sequence[Layer], budget: int, total_mass: int) -> Placement:
    """The cuts of greatest hot mass within `budget` bytes; of equal ones the least bytes, then the largest first
    layers."""
    found = solve([Choice(layer.nbytes, layer.masses) for layer in layers], budget)
    used = sum(int(layer.nbytes[j]) for layer, j in zip(layers, found.picks, strict=True))
    assert used <= budget
    return Placement(
        budget=budget,
        cuts=tuple(int(layer.cuts[j]) for layer, j in zip(layers, found.picks, strict=True)),
        used_bytes=used,
        hot_mass=sum(int(layer.masses[j]) for layer, j in zip(layers, found.picks, strict=True)),
        total_mass=total_mass,
        bound=min(found.relaxed, total_mass),
    )


def ladder(
    profile: ActivationProfile,
    formats: Mapping[str, str],
    ranks: Sequence[int | None],
    machine: Machine,
    extra_budgets: Sequence[int] = (),
) -> tuple[Plan, ...]:
    """Plans for a ladder of GPU budgets and any `extra_budgets` (bytes), by rising budget, without empty ones.

    () for a machine without a GPU, or where no layer is large enough for the hand-over to pay. Raises DoesNotFitError
    for an extra budget that no layer's least cut fits, or where none pays.
    """
    if machine.gpu is None:
        return ()
    layers = layers_of(profile, formats, ranks, machine)
    least = min((int(layer.nbytes[1]) for layer in layers if len(layer.nbytes) > 1), default=None)
    if least is None and extra_budgets:
        raise DoesNotFitError(
            "[place] vram_gib: on this machine no layer is large enough for a hand-over to the GPU to pay",
            remedy="vram_gib = [], or another [place] machine",
        )
    if least is None:
        return ()
    for budget in extra_budgets:
        if budget < least:
            raise DoesNotFitError(
                f"[place] vram_gib: {budget} bytes hold no layer's smallest cut",
                expected=f"at least {least} bytes ({least / 2**30:.6f} GiB)",
                remedy="raise the budget, or leave it out",
            )
    whole = sum(neuron_bytes(profile.decoder, formats, rank) * profile.decoder.d_ff for rank in ranks)
    budgets = sorted({whole * percent // 100 for percent in LADDER} | set(extra_budgets))
    total = int(profile.counts.sum())
    return tuple(place(layers, budget, total).plan for budget in budgets if budget >= least)
