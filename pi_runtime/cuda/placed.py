"""What a plan puts on the GPU: which arrays of an artifact, how many of their rows, and how many bytes that is."""

from collections.abc import Iterator
from dataclasses import dataclass

from pi_runtime.artifact.footprint import gpu_scratch_bytes, kv_bytes
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.artifact.sizes import without_scales

GPU = "gpu"


@dataclass(frozen=True)
class Piece:
    """The first `rows` rows of an array, scales being arrays of their own."""

    name: str
    rows: int
    nbytes: int


def pieces(manifest: Manifest, plan: Plan) -> Iterator[Piece]:
    """Every array that the plan puts on the GPU, in the order of the file."""
    tied = manifest.decoder.tied_head
    for name, entry in manifest.arrays.items():
        rows = _rows(without_scales(name), entry.shape[0], plan, tied=tied)
        if rows:
            yield Piece(name, rows, entry.nbytes * rows // entry.shape[0])


def _rows(name: str, rows: int, plan: Plan, *, tied: bool) -> int:
    if not name.startswith("layers/"):
        parts = {"embedding": plan.embedding, "embedding_in": plan.embedding, "positions": plan.embedding}
        shared = tied and name == "embedding"
        return rows if GPU in (parts.get(name, plan.head), plan.head if shared else None) else 0
    _, layer, local = name.split("/", 2)
    if local in ("ffn/order", "ffn/counts"):
        return 0
    if local in ("ffn/first", "ffn/rest", "ffn/first_bias", "ffn/up_bias"):
        return plan.cuts[int(layer)]
    return rows if plan.attention[int(layer)] == GPU else 0


def weight_bytes(manifest: Manifest, plan: Plan) -> int:
    """Bytes of weights on the GPU."""
    return sum(piece.nbytes for piece in pieces(manifest, plan))


def needed_bytes(manifest: Manifest, plan: Plan, context: int, tokens: int) -> int:
    """GPU bytes of a run: weights, cache of so many positions, and buffers for blocks of so many tokens."""
    decoder = manifest.decoder
    rank = max((layer.rank or 0 for layer in manifest.layers), default=0)
    cache = plan.attention.count(GPU) * kv_bytes(decoder, context)
    return weight_bytes(manifest, plan) + cache + gpu_scratch_bytes(decoder, rank, context, tokens)
