"""What `pi-compile plan` would say of a made model on a machine: the compiler's own model of time."""

from dataclasses import replace

import numpy as np

from pi_compile.cost_model import Workload, costs_of, token_time
from pi_compile.machine import Machine
from pi_compile.results import MILLION, LayerWork
from pi_runtime.artifact.schema import SIDES, Manifest, Plan
from support.gpu_bench.model import Curve


def planned_seconds(manifest: Manifest, mode: str, plan: Plan, curve: Curve, position: int, machine: Machine) -> float:
    """Seconds of the token at a position, in a mode, with a predictor that names just the neurons that fire."""
    d = manifest.decoder
    stored = LayerWork(rung=manifest.layers[0].rung, rank=manifest.layers[0].rank)
    work = Workload(
        decoder=d,
        formats=manifest.formats,
        tokens=MILLION,
        counts=np.tile((curve.frequencies(d.d_ff) * MILLION).round().astype(np.int64), (d.n_layers, 1)),
        layers=(stored if mode == "auto" else replace(stored, rung=mode, rank=None),) * d.n_layers,
        context=2 * position,  # half full, as the model of time takes a cache
    )
    sides = [SIDES.index(side) for side in plan.attention]
    ends = [SIDES.index(side) for side in (plan.embedding, plan.head)]
    return token_time(costs_of(work, machine), sides, plan.cuts, *ends).total / 1e12
