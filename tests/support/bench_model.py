"""The model of the engine's benchmarks: a Llama shape with 10 % density; 16 layers of it are the 1.2 B shape."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparse_model import Spec, build

from pi_runtime import Model, load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import GuessHead
from pi_runtime.artifact.sizes import PARTS
from support.synthetic import byte_tokenizer, small_decoder

CONTEXT, VOCABULARY = 8192, 32000
SHAPE = {"layers": 4, "d-model": 2048, "d-ff": 8192, "heads": 32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `opened` takes."""
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--format", default="q8")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--mode", default="predicted")
    parser.add_argument("--threads", type=int)


@contextmanager
def built(a: argparse.Namespace, guess: Callable[[Decoder], GuessHead] | None = None) -> Iterator[Path]:
    """The artifact, in a folder that is deleted; `guess`: the guess head of a decoder, with random weights."""
    decoder = small_decoder(
        n_layers=a.layers, d_model=a.d_model, d_ff=a.d_ff, n_heads=a.heads, n_kv_heads=a.heads // 4,
        head_dim=a.d_model // a.heads, vocab_size=VOCABULARY, context_length=CONTEXT,
    )  # fmt: skip
    formats = {**dict.fromkeys(PARTS, a.format), "predictor": "q4"}
    head = None if guess is None else guess(decoder)
    spec = Spec(decoder=decoder, formats=formats, density=a.density, rank=a.d_model // 4, guess=head)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pi"
        build(spec, {1.5: path}, byte_tokenizer())
        yield path


@contextmanager
def opened(a: argparse.Namespace) -> Iterator[Model]:
    """The model, built in a folder that is deleted, with its kernels loaded."""
    with built(a) as path, load(path, mode=a.mode, context=CONTEXT, threads=a.threads, device="cpu") as model:
        model.warm_up()
        yield model


def verdict(what: str, found: float, at_least: float | None = None, at_most: float | None = None) -> str:
    """A line that says whether a target was reached."""
    reached = (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
    target = f"≥ {at_least:g}" if at_least is not None else f"≤ {at_most:g}"
    return f"{what}: {found:.2f}, target {target}: {'reached' if reached else 'MISSED'}"
