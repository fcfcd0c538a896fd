"""The host and its rows within a budget of RAM: what is divided, and beside what.

    budget = the process, weights other than rows, buffers, keys and values    (fixed)
           + slots for rows                                                    (divided by `ram_plan`)

By a plan for a GPU some neurons are elsewhere. Where this memory stands in for the GPU what is there counts as the
GPU's, so that both budgets are kept; beside a GPU what is there has no place here.
"""

import sys
from collections.abc import Sequence

from pi_runtime.artifact.buffers import cache_format
from pi_runtime.artifact.layer_classes import layer_nbytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import EMBEDDING_ARRAYS, PROMPT_TOKENS, read_nbytes, unit_nbytes
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.artifact.sizes import WHOLE
from pi_runtime.disk.arena import ResidentArrays
from pi_runtime.disk.matrix_store import MatrixStore
from pi_runtime.disk.ram_plan import (
    RamPlan,
    batch_rows,
    fixed_bytes,
    matrix_plan,
    plan_for,
    resident_nbytes,
    sequence_kv_bytes,
)
from pi_runtime.disk.reader import Reader
from pi_runtime.disk.row_store import RowStore
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution.disk_matrices import DiskMatrices
from pi_runtime.execution.disk_rows import DiskRows
from pi_runtime.execution.host import CpuModel
from pi_runtime.execution.pages import Allowance
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.execution.plan_layout import CPU, placed_arrays


def rows_within(
    artifact: Artifact, mode: str, context: int, threads: int, cache: str, budget: int, kv_budget: int | None,
    taken: Allocation | None = None, beside: int | None = None,
) -> DiskRows | DiskMatrices:  # fmt: skip
    """A host and its rows within `budget` bytes of RAM, of which `kv_budget` are for keys and values of all sequences.

    `kv_budget`: None is as many as one sequence takes. `taken`: what a GPU has by its plan. `beside`: bytes of RAM that
    the GPU's executor takes for itself; None where this memory stands in for a GPU. Raises DoesNotFitError naming the
    smallest budget that fits.
    """
    if sys.platform != "linux":
        raise DoesNotFitError("rows come from disk on Linux alone", remedy="leave the budget out: the file is mapped")
    m = artifact.manifest
    if taken is None or beside is not None:  # keys and values on a GPU are copied here where sequences take turns
        kv = sequence_kv_bytes(m, context, cache) if kv_budget is None else kv_budget
        more_kv = 0
    else:
        kv, more_kv = own_kv_bytes(m, taken, cache) if kv_budget is None else kv_budget, taken.cache
    fixed = fixed_bytes(m, context, cache, kv) if taken is None else ram_fixed_bytes(m, taken, cache, kv)
    gpu = None if taken is None else taken.plan
    away = None if gpu is None or beside is None else _away(m, gpu)
    if m.ffn_layout == WHOLE:
        return matrices_within(artifact, mode, context, threads, cache, budget, fixed, kv)
    plan = plan_for(artifact, mode, budget, fixed + (beside or 0), gpu, away)
    reader = Reader(artifact.path, batch_rows(plan.staged), piece=read_nbytes(m.decoder))
    try:
        return divided_rows(artifact, mode, context, threads, cache, plan, reader, kv + more_kv)
    except BaseException:
        reader.close()
        raise


def divided_rows(
    artifact: Artifact, mode: str, context: int, threads: int, cache: str, plan: RamPlan, reader: Reader,
    kv_nbytes: int,
) -> DiskRows:  # fmt: skip
    """A host and its rows by a division of RAM; keys and values may take so many bytes.

    `reader` reads the artifact's file, with room for `ram_plan.batch_rows` rows; it is closed with the host.
    """
    arrays, store, kv = ResidentArrays(artifact, plan, reader), RowStore(artifact, plan, reader), Allowance(kv_nbytes)

    def rows_at(layer: int, name: str) -> Sequence[tuple[int, int]] | None:
        return store.places(layer, name) or arrays.places(f"layers/{layer}/{name}")

    host = CpuModel(arrays, mode, context, threads, cache, kv, rows_at)
    return DiskRows(host, arrays, store, kv)


def matrices_within(
    artifact: Artifact, mode: str, context: int, threads: int, cache: str, budget: int, fixed: int, kv_nbytes: int
) -> DiskMatrices:
    """A host and its whole matrices within a budget of which `fixed` bytes are taken."""
    m, plan = artifact.manifest, matrix_plan(artifact, budget, fixed)
    reader = Reader(artifact.path, unit_nbytes(m) // read_nbytes(m.decoder) + 8, piece=read_nbytes(m.decoder))
    try:
        arrays, store = ResidentArrays(artifact, plan, reader), MatrixStore(artifact, plan, reader)
        kv = Allowance(kv_nbytes)
        host = CpuModel(arrays, mode, context, threads, cache, kv, store.places)
        return DiskMatrices(host, arrays, store, kv)
    except BaseException:
        reader.close()
        raise


def own_kv_bytes(m: Manifest, taken: Allocation, cache: str) -> int:
    """Bytes of one sequence's keys and values for the whole context, in layers whose attention is the CPU's."""
    fmt = cache_format(m.formats["attention"], cache)
    kv_L = layer_nbytes(m.decoder, fmt, taken.context, max(PROMPT_TOKENS))
    return sum(nbytes for nbytes, side in zip(kv_L, taken.plan.attention, strict=True) if side == CPU)


def ram_fixed_bytes(m: Manifest, taken: Allocation, cache: str, kv_nbytes: int) -> int:
    """Bytes of RAM of a run by a plan that no division changes: what the GPU has is not among them."""
    resident, away = resident_nbytes(m, whole_embedding=False), _away(m, taken.plan)
    on_gpu = {array.name: array.nbytes for array in placed_arrays(m, taken.plan) if array.name in away}
    of_gpu = sum(min(nbytes, on_gpu.get(name, 0)) for name, nbytes in resident.items())
    return fixed_bytes(m, taken.context, cache, kv_nbytes) - of_gpu


def _away(m: Manifest, plan: Plan) -> dict[str, Sequence[tuple[int, int]]]:
    """The rows of arrays that the GPU alone has."""
    # The CPU may need the embedding too: for tokens, or as a tied head.
    here = EMBEDDING_ARRAYS if CPU in (plan.embedding, plan.head if m.decoder.tied_head else None) else ()
    return {array.name: array.spans for array in placed_arrays(m, plan) if array.name not in here}
