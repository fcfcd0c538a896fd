"""Choosing one of the stored plans for a run, and what the run takes of the GPU's memory.

One rule holds for the GPU and for its stand-in. A plan fits if its weights, its cache and the buffers for one token are
within the budget. Of the plans that fit, the one that uses most is taken. The rest of the budget goes to larger blocks
of prompts, then to more tokens that are decoded together.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pi_runtime.artifact.buffers import kv_bytes, table_bytes
from pi_runtime.artifact.gpu_buffers import (
    decoded_together,
    gpu_products,
    gpu_prompt_block,
    gpu_workspace,
    gpu_workspace_bytes,
    prompt_block,
    streamed_bytes,
    weight_padding,
)
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.errors import DoesNotFitError, Setting
from pi_runtime.execution.plan_layout import GPU, placed_arrays


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The bytes of GPU memory that a run by one plan takes, by what they are for."""

    plan: Plan
    context: int
    """Positions of the key-value cache."""
    budget: int
    weights: int
    """Arrays and rows that the plan puts on the GPU, and the padding between them."""
    cache: int
    """Keys and values of the layers whose attention is on the GPU."""
    workspace: int
    """Buffers for decoding."""
    batch_tokens: int
    """Most tokens, each of its own sequence, that are decoded together."""
    block_tokens: int
    """Most tokens of a prompt that are read at once."""
    block: int
    """Buffers for these tokens."""
    products: int
    """What dense products of such a block take while they run, at most."""
    streamed: int
    """Buffers for cold weights that long prompts bring to the GPU; 0 where there are none, or no room for them."""

    @property
    def total(self) -> int:
        """Bytes of all these."""
        return self.weights + self.cache + self.workspace + self.block + self.products + self.streamed


def allocation(manifest: Manifest, plan: Plan, context: int, budget: int) -> Allocation:
    """The bytes that a run by this plan takes, with a cache of `context` positions.

    They are more than the budget where even blocks of one token exceed it.
    """
    d = manifest.decoder
    rank = max((layer.rank or 0 for layer in manifest.layers), default=0)
    weights = sum(array.nbytes for array in placed_arrays(manifest, plan)) + weight_padding(manifest.arrays)
    cache = plan.attention.count(GPU) * kv_bytes(d, manifest.formats["attention"], context)
    pieces = streamed_bytes(manifest.arrays, d) if any(cut < d.d_ff for cut in plan.cuts) else 0
    room = budget - weights - cache

    def needs(batch: int, tokens: int) -> int:
        return gpu_workspace_bytes(d, rank, context, batch, tokens)

    tokens, streamed = prompt_block(partial(needs, 1), pieces, room)
    batch = decoded_together(lambda batch: needs(batch, tokens) + streamed, room)
    return Allocation(
        plan=plan,
        context=context,
        budget=budget,
        weights=weights,
        cache=cache,
        workspace=table_bytes(gpu_workspace(d, rank, context, batch)),
        batch_tokens=batch,
        block_tokens=tokens,
        block=table_bytes(gpu_prompt_block(d, tokens)),
        products=table_bytes(gpu_products(d, tokens)),
        streamed=streamed,
    )


def needed_bytes(manifest: Manifest, plan: Plan, context: int) -> int:
    """The smallest budget that a plan fits, with a cache of `context` positions."""
    return allocation(manifest, plan, context, budget=0).total


def choose_plan(artifact: Artifact, context: int, budget: int, free: int = sys.maxsize) -> Allocation:
    """The stored plan that uses most of the budget with a cache of `context` positions, and what its run takes.

    `free` is the memory that the GPU has left, where there is one. Raises DoesNotFitError naming the smallest budget
    that a plan fits.
    """
    manifest, plans, where = artifact.manifest, artifact.manifest.plans, artifact.path
    if not plans:
        raise _no_placement(manifest, where)
    budget = min(budget, free)
    needed = [needed_bytes(manifest, plan, context) for plan in plans]
    fitting = [n for n, nbytes in enumerate(needed) if nbytes <= budget]
    if not fitting:
        least, shorter = min(needed), min(plan.context for plan in plans)
        fits = shorter < context and min(needed_bytes(manifest, plan, shorter) for plan in plans) <= budget
        raise DoesNotFitError(
            f"{where}: no stored placement fits the GPU budget with a context of {context} tokens",
            expected=f"at least {least} bytes",
            found=f"{budget} bytes" + (", all that the GPU has free" if budget == free else ""),
            remedy=(
                *((Setting("vram_budget", least), ", ") if least <= free else ()),
                *((Setting("context", shorter), ", ") if fits else ()),
                *(Setting("device", "cpu"), " (without ", Setting("vram_budget"), ")"),
                ", or add the budget to [place] vram_gib and build again",
            ),
        )
    best = max(fitting, key=lambda n: (needed[n], plans[n].vram_bytes))
    return allocation(manifest, plans[best], context, budget)


def _no_placement(manifest: Manifest, where: Path) -> DoesNotFitError:
    """The error for an artifact without plans; the recipe that it holds says for which machine it was built."""
    on_cpu = ("run it on the CPU (", Setting("device", "cpu"), ", no ", Setting("vram_budget"), ")")
    if not manifest.profiled_tokens and manifest.decoder.sparse:
        return DoesNotFitError(
            f"{where}: holds no placement: it was packed without profile and placements (pi-compile pack --plain)",
            remedy=(on_cpu, ", or build it: pi-compile build RECIPE"),
        )
    section = manifest.recipe.get("place")
    machine = section.get("machine") if isinstance(section, dict) else None
    built_for = "a machine" if machine is None else f"{str(machine)!r}"
    plain = "" if manifest.profiled_tokens else "it was packed plainly (pi-compile pack --plain); or "
    return DoesNotFitError(
        f"{where}: holds no placement: {plain}it was built for {built_for}, which has no GPU, or whose GPU would not "
        "make this model faster",
        remedy=(
            *(on_cpu, "; or write another machine into the recipe and build it again: one that has a GPU "),
            '(pi-compile machine measures yours), or [place] machine = "stand-in", whose GPU always pays',
        ),
    )
