"""Models that keep a chosen share of their FFNs' rows in memory, and read the others from disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pi_runtime import Model
from pi_runtime.artifact.footprint import chunk_places
from pi_runtime.artifact.reader import Artifact
from pi_runtime.disk.ram_plan import ROW_ARRAYS, batch_rows, plan_for, slot_nbytes
from pi_runtime.disk.reader import Reader
from pi_runtime.execution.disk import DiskExecutor


def from_disk(
    path: Path, share: float, mode: str = "auto", *, threads: int = 2, context: int | None = None,
    reader: dict[str, Any] | None = None, **plan_fields: Any,
) -> Model:  # fmt: skip
    """The model with memory for this share of the rows, of which a sixteenth is for rows in transit.

    `reader` has settings of the reader; `plan_fields` replace what the rule would choose.
    """
    found = Artifact.open(path)
    m = found.manifest
    row = sum(slot_nbytes(m, name) for name in ROW_ARRAYS)
    least, whole = 5 * chunk_places(m.decoder.d_ff) * row, row * m.decoder.neurons * len(m.layers)
    plan = replace(plan_for(found, mode, max(least, int(share * whole)), fixed=0), **plan_fields)
    context = m.decoder.context_length if context is None else context
    rows = Reader(path, batch_rows(plan.transit), **(reader or {}))
    return Model(found, mode, DiskExecutor(found, mode, context, threads, "auto", plan, rows))
