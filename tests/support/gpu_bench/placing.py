"""Placements without a solver.

`attention_first` places the head, then attention with cache and predictor from the last layer back, then the embedding.
What is left goes to the hottest neurons of the layers whose attention is on the GPU, because these hand over anyway:
the same number in each, and no more than make a token faster. A byte of attention saves its time at every token, a
neuron's byte only when the neuron fires.

`whole_layers` places the last layers and the head, as many as fit (llama.cpp's split).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pi_runtime.artifact.buffers import table_bytes
from pi_runtime.artifact.gpu_buffers import gpu_products, gpu_prompt_block, streamed_bytes
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.execution.plan_choice import allocation

GROUP, CUT_STEPS = 64, 32
"""A cut is a multiple of this many neurons; fractions of the largest cut that are tried."""
TOKENS = 256
"""Tokens of a prompt's block that buffers are counted for."""


@dataclass(frozen=True)
class Case:
    """One budget of one model."""

    name: str
    budget: int


def budgets(manifest: Manifest, context: int) -> list[Case]:
    """Fractions of the model, and attention, cache and head with fractions of the FFN; the most interesting first."""
    every = all_on_gpu(manifest, context)
    whole = bytes_with_blocks(manifest, every, context, TOKENS) + streamed_bytes(manifest.arrays, manifest.decoder)
    bare = whole - sum(every.cuts) * neuron_bytes(manifest)
    shares = [Case(f"{n} % of the model", whole * n // 100) for n in (25, 50, 10)]
    beside = [Case(f"attention, KV, head, {n} % of FFN", bare + (whole - bare) * n // 100) for n in (10, 25, 50)]
    return [Case("100 % of the model", whole), shares[0], beside[0], *shares[1:], *beside[1:]]


def nothing(manifest: Manifest, context: int) -> Case:
    """Buffers for a prompt's block alone: no weight fits."""
    return Case("nothing on the GPU", bytes_with_blocks(manifest, all_on_cpu(manifest, context), context, TOKENS))


def bytes_with_blocks(manifest: Manifest, plan: Plan, context: int, tokens: int) -> int:
    """GPU bytes of a run that reads prompts in blocks of so many tokens, without streamed weights."""
    d, a = manifest.decoder, allocation(manifest, plan, context, budget=0)
    return a.weights + a.cache + a.workspace + table_bytes(gpu_prompt_block(d, tokens), gpu_products(d, tokens))


def neuron_bytes(manifest: Manifest) -> int:
    starts = tuple(f"layers/0/ffn/{name}" for name in ("first", "rest", "up_bias"))
    return sum(e.nbytes for name, e in manifest.arrays.items() if name.startswith(starts)) // manifest.decoder.d_ff


def all_on_cpu(manifest: Manifest, context: int) -> Plan:
    """The plan with nothing on the GPU."""
    layers = manifest.decoder.n_layers
    return Plan(
        objective="time", vram_bytes=0, used_bytes=0, ram_bytes=0, context=context, attention=("cpu",) * layers,
        cuts=(0,) * layers, embedding="cpu", head="cpu", predicted_ns=0, digest="",
    )  # fmt: skip


def all_on_gpu(manifest: Manifest, context: int) -> Plan:
    layers, cut = manifest.decoder.n_layers, manifest.decoder.d_ff
    return replace(
        all_on_cpu(manifest, context),
        attention=("gpu",) * layers,
        cuts=(cut,) * layers,
        embedding="gpu",
        head="gpu",
    )


def attention_first(manifest: Manifest, budget: int, context: int, seconds: Callable[[Plan], float]) -> Plan:
    """A plan with attention first; `seconds` is one token of a plan by the model of time."""
    d, plan = manifest.decoder, all_on_cpu(manifest, context)

    def fits(tried: Plan) -> bool:
        # With memory for cold weights that are streamed for a prompt.
        return bytes_with_blocks(manifest, tried, context, TOKENS) + streamed_bytes(manifest.arrays, d) <= budget

    def first_that_fits(*tries: Plan) -> Plan:
        return next(p for p in (*tries, plan) if p is plan or fits(p))

    plan = first_that_fits(replace(plan, head="gpu"))
    count = d.n_layers
    while count and not fits(replace(plan, attention=("cpu",) * (d.n_layers - count) + ("gpu",) * count)):
        count -= 1
    plan = replace(plan, attention=("cpu",) * (d.n_layers - count) + ("gpu",) * count)
    plan = first_that_fits(replace(plan, embedding="gpu"))
    low, high = 0, -(-d.d_ff // GROUP)
    while low < high:  # the largest cut that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(_cut(plan, middle * GROUP, d.d_ff)) else (low, middle - 1)
    cuts = sorted({min(low, max(1, low * part // CUT_STEPS)) * GROUP for part in range(1, CUT_STEPS + 1)}, reverse=True)
    return min((_cut(plan, cut, d.d_ff) for cut in cuts), key=seconds)


def whole_layers(manifest: Manifest, budget: int, context: int) -> Plan:
    d, plan = manifest.decoder, all_on_cpu(manifest, context)
    for count in range(d.n_layers, 0, -1):
        sides = ("cpu",) * (d.n_layers - count) + ("gpu",) * count
        tried = _cut(replace(plan, attention=sides, head="gpu"), d.d_ff, d.d_ff)
        if bytes_with_blocks(manifest, tried, context, TOKENS) <= budget:
            return tried
    return plan


def _cut(plan: Plan, cut: int, neurons: int) -> Plan:
    return replace(plan, cuts=tuple(min(cut, neurons) if side == "gpu" else 0 for side in plan.attention))
