"""Every number format of a model on one machine: what it takes, whether it runs, and how fast.

A format runs in memory where a placement keeps the budgets with all weights in them, and from disk where rows of FFNs
are left there. Of those that run in memory the most exact is advised, up to `BITS` a weight; else the fastest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pi_compile.cost_model import PICO
from pi_compile.placement import all_cpu, place
from pi_compile.planning.forecast import (
    PlanSpec,
    activation_profile,
    firing,
    on_usable_machine,
    prefill_tokens_per_s,
    problem_of,
)
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.artifact.sizes import BY_NEURON, PARTS, WHOLE, array_specs, misfits, parameters
from pi_runtime.errors import DoesNotFitError

PROMPT = 2000
"""Tokens of the prompt whose first answered token is timed."""
BITS = 8
"""Most bits of a weight that are advised: more change next to nothing in what a model says."""
ALIKE = 1.05
"""What a file may take of a format's bytes to be of about that format."""


def every_format(spec: PlanSpec, files: Mapping[str, int]) -> dict[str, Any]:
    """What each format takes and gives, and which of the repository's `files` (bytes by name) to take.

    Raises UsageError or ProfileError where nothing is known of how the model's neurons fire.
    """
    rows = [row for fmt in WEIGHT_FORMATS if (row := _row(spec, fmt))]
    best, activation = _advised(rows), activation_profile(spec)
    return {
        **firing(activation, problem_of(spec, activation).work),
        "model": spec.model.name,
        "parameters": parameters(spec.model.decoder),
        "machine": spec.machine.name,
        "machine_source": spec.machine.source,
        "disk": None if spec.machine.disk is None else spec.machine.disk.name,
        "context": spec.context,
        "vram_bytes": spec.vram,
        "ram_bytes": spec.ram,
        "runs": best["runs"] if best else "no",
        "format": best["format"] if best else None,
        "file": _file(files, best["bytes"]) if best and files else None,
        "formats": rows,
    }


def _row(spec: PlanSpec, fmt: str) -> dict[str, Any] | None:
    """What a format takes and gives; None where the model cannot be stored in it."""
    spec = on_usable_machine(replace(spec, formats=dict.fromkeys(PARTS, fmt)))
    decoder = spec.model.decoder
    whole = not FORMATS[fmt].summed  # matrices that are not cut into neurons
    layout = WHOLE if whole else BY_NEURON
    specs = array_specs(decoder, spec.formats, [None] * decoder.n_layers, profiled=False, layout=layout)
    if misfits(specs) or (whole and (decoder.sparse or decoder.n_experts > 1)):
        return None
    problem = problem_of(spec, activation_profile(spec))
    _, in_memory = problem.used(all_cpu(decoder.n_layers))
    row = {
        "format": fmt,
        "bytes": sum(one.nbytes for one in specs.values()),
        "all_in_ram_bytes": in_memory + PROCESS_NBYTES,
        "runs": "no",
    }
    try:
        placement = place(problem, spec.vram, spec.ram)
    except DoesNotFitError:
        return row
    if whole and placement.rows:
        return row
    rate = PICO / placement.time.total
    first = PROMPT / prefill_tokens_per_s(problem, placement) + 1 / rate
    runs = "from disk" if placement.rows else "in memory"
    return {**row, "runs": runs, "decode_tokens_per_s": rate, "first_token_s": first}


def _advised(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    fitting = [row for row in rows if row["runs"] == "in memory"]
    few = [row for row in fitting if FORMATS[row["format"]].bits <= BITS]
    if fitting:
        return max(few or fitting, key=lambda row: (row["bytes"], row["decode_tokens_per_s"]))
    return max((row for row in rows if row["runs"] != "no"), key=lambda row: row["decode_tokens_per_s"], default=None)


def _file(files: Mapping[str, int], nbytes: int) -> str:
    """The largest file of about these bytes at most; the smallest where all are larger."""
    fitting = [name for name in files if files[name] <= ALIKE * nbytes]
    return max(fitting, key=files.__getitem__) if fitting else min(files, key=files.__getitem__)
