"""Placements without a solver.

`attention first`: the head, then attention with cache and predictor from the last layer back, the embedding, and what
is left to the hottest neurons of the layers whose attention is on the GPU, the same share of each, because these hand
over anyway. A byte of attention saves its time at every token, a neuron's only when it fires.

`whole layers`: the last layers and the head, as many as fit (llama.cpp's split).
"""

from dataclasses import replace

from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.cuda.placed import needed_bytes
from pi_runtime.cuda.streamed import streaming_bytes

GROUP = 64
TOKENS = 256
"""Of a prompt's blocks, for which buffers are counted in."""


def everything_here(manifest: Manifest, context: int) -> Plan:
    """Nothing on the GPU."""
    layers = manifest.decoder.n_layers
    return Plan(
        objective="time", vram_bytes=0, used_bytes=0, ram_bytes=0, context=context, attention=("cpu",) * layers,
        cuts=(0,) * layers, embedding="cpu", head="cpu", predicted_ns=0, digest="",
    )  # fmt: skip


def everything_there(manifest: Manifest, context: int) -> Plan:
    layers, cut = manifest.decoder.n_layers, manifest.decoder.d_ff
    return replace(
        everything_here(manifest, context),
        attention=("gpu",) * layers,
        cuts=(cut,) * layers,
        embedding="gpu",
        head="gpu",
    )


def attention_first(manifest: Manifest, budget: int, context: int) -> Plan:
    d, plan = manifest.decoder, everything_here(manifest, context)

    def fits(tried: Plan) -> bool:
        # With memory for cold weights that come up for a prompt.
        return needed_bytes(manifest, tried, context, TOKENS) + streaming_bytes(manifest) <= budget

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
    return _cut(plan, low * GROUP, d.d_ff)


def whole_layers(manifest: Manifest, budget: int, context: int) -> Plan:
    d, plan = manifest.decoder, everything_here(manifest, context)
    for count in range(d.n_layers, 0, -1):
        sides = ("cpu",) * (d.n_layers - count) + ("gpu",) * count
        tried = _cut(replace(plan, attention=sides, head="gpu"), d.d_ff, d.d_ff)
        if needed_bytes(manifest, tried, context, TOKENS) <= budget:
            return tried
    return plan


def _cut(plan: Plan, cut: int, neurons: int) -> Plan:
    return replace(plan, cuts=tuple(min(cut, neurons) if side == "gpu" else 0 for side in plan.attention))
