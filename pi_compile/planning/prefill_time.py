"""The time of reading a prompt: dense, in blocks of tokens, each part on the processor that holds it.

For a block of T tokens a part takes the longer of reading its weights once and computing with them,

    max( bytes ÷ rate ,  2 T · weights ÷ operations a second )

and the two sides of an FFN overlap as in decoding. A processor without a rate of operations is taken to be bound by
memory. Rows on disk are read once for a block, in large reads, while others are computed; such a run has larger blocks
where its budget has room for them. Hand-overs carry T residuals. The head is left out, because it is computed for the
last token only. Keys and values are left out, because they are few.
"""

from collections.abc import Sequence
from math import prod

from pi_compile.cost_model import CPU, GPU, PICO, RowChoice, Workload, interconnect_of
from pi_compile.machine import to_units
from pi_compile.placement import Assignment, Placement, Problem
from pi_compile.placement.three_tiers import ThreeTiers
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.artifact.sizes import array_specs


def prefill_tokens_per_s(problem: Problem, p: Placement) -> float:
    """Tokens a second of a long prompt with this placement."""
    tokens = BLOCK_TOKENS
    if p.rows and problem.rows is not None:
        tokens = ThreeTiers(problem, problem.rows, p.vram).block_tokens(p.ram - PROCESS_NBYTES)
    return tokens / (block_ps(problem, p.assignment, tokens, p.rows) / PICO)


def block_ps(problem: Problem, a: Assignment, tokens: int, rows: Sequence[RowChoice] = ()) -> int:
    """Picoseconds of one block of tokens through all layers."""
    work, machine, processors = problem.work, problem.machine, problem.costs.processors
    interconnect, parts = interconnect_of(machine), work.parts
    sections = (machine.cpu, machine.gpu)
    operations = [to_units(s.products_gflop_per_s, 10**9) if s and s.products_gflop_per_s else None for s in sections]
    weights = _weights(work)

    def part_ps(side: int, nbytes: int, count: int, part: str) -> int:
        rate = operations[side]
        computing = -(-2 * tokens * count * PICO // rate) if rate else 0
        return processors[side].launch_ps + max(processors[side].ps(nbytes, work.formats[part]), computing)

    handover = interconnect.ps(4 * work.decoder.d_model * tokens) if interconnect else 0
    total, before = 0, a.embedding
    for n, (side, cut) in enumerate(zip(a.sides, a.cuts, strict=True)):
        cold = work.decoder.neurons - cut
        attention = part_ps(side, parts.attention, weights["attention"], "attention")
        hot_ps = part_ps(GPU, cut * parts.neuron, work.of_routed_experts(cut * weights["neuron"]), "ffn") if cut else 0
        cold_ps = (
            part_ps(CPU, cold * parts.neuron, work.of_routed_experts(cold * weights["neuron"]), "ffn") if cold else 0
        )
        if rows and problem.rows is not None:
            cold_ps = max(cold_ps, problem.rows.reads.range_ps(problem.rows.on_disk(n, cold, rows[n])))
        split = cut != (0 if side == CPU else work.decoder.neurons)
        total += attention + max(hot_ps, cold_ps) + (2 * handover if split else 0) + (handover if side != before else 0)
        before = side
    return total


def _weights(work: Workload) -> dict[str, int]:
    """Number of weights in one layer's attention, and in one neuron."""
    specs = array_specs(work.decoder, work.formats, [None], profiled=False)
    names = ("layers/0/attention/qkv", "layers/0/attention/out")
    neuron = sum(prod(specs[f"layers/0/ffn/{name}"].shape) for name in ("first", "rest")) // work.decoder.neurons
    return {"attention": sum(prod(specs[name].shape) for name in names), "neuron": neuron}
