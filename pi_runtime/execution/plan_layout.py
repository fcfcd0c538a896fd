"""The arrays and rows of an artifact that a plan puts on the GPU.

Shape letters: X experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.gpu_buffers import is_neuron_array
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.artifact.sizes import without_scales

CPU, GPU = "cpu", "gpu"


@dataclass(frozen=True)
class Cuts:
    """One layer's cuts: neurons [0, cut_X[e]) of expert e are on the GPU, one expert after the other in its memory."""

    cut_X: tuple[int, ...]
    base_X: tuple[int, ...]
    """First row of each expert among those on the GPU."""
    hot: int
    """Most neurons on the GPU that one token's experts can have; 0 if the layer has none there."""
    cold: int
    """Most neurons on the CPU that one token's experts can have."""

    @classmethod
    def of(cls, cut_X: Sequence[int], d_ff: int, experts_per_token: int) -> "Cuts":
        by_size = sorted(cut_X)
        return cls(
            cut_X=tuple(cut_X),
            base_X=tuple(accumulate(cut_X, initial=0))[:-1],
            hot=sum(by_size[-experts_per_token:]),
            cold=experts_per_token * d_ff - sum(by_size[:experts_per_token]),
        )


def cuts_of(plan: Plan, d: Decoder) -> tuple[Cuts, ...]:
    """The cuts of each layer."""
    starts = range(0, len(plan.cuts), d.n_experts)
    return tuple(Cuts.of(plan.cuts[n : n + d.n_experts], d.d_ff, d.most_experts) for n in starts)


@dataclass(frozen=True)
class PlacedArray:
    """Rows of an array that are on the GPU, one after the other; scales are arrays of their own."""

    name: str
    spans: tuple[tuple[int, int], ...]
    """Ranges [low, high) of rows; with experts one for each expert."""
    nbytes: int


def placed_arrays(manifest: Manifest, plan: Plan) -> Iterator[PlacedArray]:
    """Every array that the plan puts on the GPU, in the order of the file."""
    d = manifest.decoder
    for name, entry in manifest.arrays.items():
        local, rows = without_scales(name), entry.shape[0]
        if is_neuron_array(name):
            first = int(local.split("/")[1]) * d.n_experts
            cuts = enumerate(plan.cuts[first : first + d.n_experts])
            spans = tuple((n * d.d_ff, n * d.d_ff + cut) for n, cut in cuts if cut)
        else:
            spans = ((0, rows),) if _on_gpu(local, plan, tied=d.tied_head) else ()
        if spans:
            yield PlacedArray(name, spans, entry.nbytes * sum(high - low for low, high in spans) // rows)


def _on_gpu(name: str, plan: Plan, *, tied: bool) -> bool:
    """Whether an array that no cut divides is on the GPU."""
    if name.startswith(PREFIX):  # a guess head drafts on the CPU alone
        return False
    if not name.startswith("layers/"):
        with_embedding = name.startswith(("embedding", "positions")) and name != "embedding_out"
        shared = tied and name == "embedding"
        return GPU in (plan.embedding if with_embedding else plan.head, plan.head if shared else None)
    return not name.endswith(("/ffn/order", "/ffn/counts")) and plan.attention[int(name.split("/")[1])] == GPU
