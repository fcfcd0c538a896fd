"""The shape that engines are compared on, as options: 1.2 B parameters unless asked otherwise."""

import argparse

from support.synthetic import small_decoder

from pi_runtime.artifact.decoder import Decoder

_SHAPE = {"layers": 16, "d-model": 2048, "d-ff": 8192, "heads": 32, "kv-heads": 32, "vocabulary": 32000, "rank": 512}


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options for the shape, the predictor's rank and the density."""
    for name, default in _SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--density", type=float, default=0.1)


def decoder_of(a: argparse.Namespace) -> Decoder:
    """The decoder that the options describe."""
    return small_decoder(
        n_layers=a.layers, d_model=a.d_model, d_ff=a.d_ff, n_heads=a.heads, n_kv_heads=a.kv_heads,
        head_dim=a.d_model // a.heads, vocab_size=a.vocabulary, context_length=640,
    )  # fmt: skip
