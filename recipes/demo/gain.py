"""What skipping neurons gains where memory decides: a made-up model of 0.6 GB, dense, gate and predicted side by side.

Its weights are random but for what makes one neuron in ten fire (`sparse_model`): its text means nothing, and its speed
is that of a trained model of this shape.
"""

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.bar import Bar
from rich.table import Table
from sparse_model import Decoding, Spec, build, decode

from pi_compile.machine.doctor import usable_cores
from pi_runtime import load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.errors import size
from pi_runtime.execution.devices import available_memory
from pi_runtime.kernels.benchmarks import most_threads, read_bandwidth

MODEL = Spec(
    decoder=Decoder(
        family="llama",
        vocab_size=2048,
        d_model=2048,
        d_embedding=2048,
        n_layers=9,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        d_ff=8192,
        context_length=128,
        norm="rms",
        norm_eps=1e-5,
        positions="rope",
        position_offset=0,
        rotary_frequencies=tuple((np.float32(10000) ** (-np.arange(32, dtype=np.float32) / 32)).tolist()),
        ffn="gated",
        activation="relu",
        tied_head=False,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
    ),
    formats={**dict.fromkeys(PARTS, "q8"), "predictor": "q4"},
    density=0.1,
    rank=512,
)
MODES = ("dense", "gate", "predicted")
ROUNDS, TOKENS = 7, 9
READ_BYTES = 1 << 29
"""RAM that is read to measure its bandwidth: far more than a cache holds."""
BUSY_SHARE = 0.5
"""Share of the bandwidth that dense decoding has at least where nothing else runs."""
MEMORY_FACTOR = 4
"""Memory that making and running the model takes, as a multiple of the file."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One mode: medians over the rounds."""

    mode: str
    tokens_per_s: float
    bytes_per_token: float
    share: float
    """Of the memory's bandwidth, as it was measured in the same round."""


def nbytes(spec: Spec) -> int:
    """Size of the model's file, but for its header."""
    ranks = [spec.rank] * spec.decoder.n_layers
    return sum(array.nbytes for array in array_specs(spec.decoder, spec.formats, ranks, profiled=False).values())


def shortage(spec: Spec, folder: Path) -> str | None:
    """What there is too little of to make and run the model; None where there is enough."""
    needs = {"disk space": (nbytes(spec), shutil.disk_usage(folder).free)}
    memory = available_memory()
    if memory is not None:
        needs["memory"] = (MEMORY_FACTOR * nbytes(spec), memory)
    short = {what: amounts for what, amounts in needs.items() if amounts[1] < amounts[0]}
    told = (f"{size(need)} of {what}, {size(free)} free" for what, (need, free) in short.items())
    return " and ".join(told) or None


def measure(spec: Spec, folder: Path, tokenizer: bytes, rounds: int = ROUNDS) -> tuple[float, list[Speed]]:
    """The memory's bandwidth in bytes per second, and each mode's speed. The model's file is deleted afterwards.

    A machine's speed changes from one minute to the next, so each round measures the bandwidth and all modes in turn.
    """
    threads = min(usable_cores(), most_threads())
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "made-up.pi"
        build(spec, {1.0: path}, tokenizer)
        models = [stack.enter_context(load(path, mode=mode, threads=threads, device="cpu")) for mode in MODES]
        for model in models:
            model.warm_up()
        tokens = [n * 37 % spec.decoder.vocab_size for n in range(TOKENS + 1)]
        bandwidths: list[float] = []
        found: list[list[Decoding]] = []
        for _ in range(rounds + 1):
            bandwidths.append(read_bandwidth(READ_BYTES, threads, repeats=2))
            found.append([decode(model, model.new_cache(), tokens) for model in models])
    # The first round brings the weights into memory.
    del bandwidths[0], found[0]
    return median(bandwidths), [_speed(mode, bandwidths, own) for mode, *own in zip(MODES, *found, strict=True)]


def _speed(mode: str, bandwidths: Sequence[float], rounds: Sequence[Decoding]) -> Speed:
    rates = [1 / median(found.seconds) for found in rounds]
    shares = [rate * d.bytes_per_token / limit for rate, d, limit in zip(rates, rounds, bandwidths, strict=True)]
    nbytes_each = [found.bytes_per_token for found in rounds]
    return Speed(mode=mode, tokens_per_s=median(rates), bytes_per_token=median(nbytes_each), share=median(shares))


def table(spec: Spec, bandwidth: float, speeds: Sequence[Speed]) -> Table:
    """The modes side by side, with a bar for each one's tokens per second."""
    title = f"What it gains: a made-up model of {nbytes(spec) / 1e9:.2f} GB, {100 * spec.density:.0f} % of neurons fire"
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in ("", "tokens/s", "", "MB/token", "bandwidth"):
        shown.add_column(head, justify="right" if head else "left", no_wrap=True)
    fastest = max(speed.tokens_per_s for speed in speeds)
    for speed in speeds:
        bar = Bar(fastest, 0, speed.tokens_per_s, width=32, color="green")
        megabytes, share = f"{speed.bytes_per_token / 1e6:.0f}", f"{100 * speed.share:.0f} %"
        shown.add_row(speed.mode, f"{speed.tokens_per_s:.1f}", bar, megabytes, share)
    shown.caption = f"bandwidth: share of the {bandwidth / 1e9:.1f} GB/s at which this machine's memory is read"
    shown.caption_justify = "left"
    return shown


def sentence(speeds: Sequence[Speed]) -> str:
    """What one sees in the table."""
    dense, _, predicted = speeds
    told = (
        f"Dense reads {dense.bytes_per_token / 1e6:.0f} MB for every token. Predicted reads only what belongs to the "
        f"neurons that fire, {predicted.bytes_per_token / 1e6:.0f} MB, and writes "
        f"{predicted.tokens_per_s / dense.tokens_per_s:.1f} times as many tokens a second."
    )
    if dense.share < BUSY_SHARE:
        told += f" Dense got only {100 * dense.share:.0f} % of the memory's bandwidth: other programs run here too."
    return told
