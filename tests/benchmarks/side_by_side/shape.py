"""The shape that engines are compared on, as options: 1.2 B parameters unless asked otherwise."""

import argparse
import json
from typing import Any

from support.paths import ROOT
from support.synthetic import small_decoder

from pi_runtime.artifact.decoder import Decoder

CONFIGS = ROOT / "tests" / "compile" / "checkpoint" / "configs"
"""Published configurations, with their sources."""
_SHAPE = {"layers": 16, "d-model": 2048, "d-ff": 8192, "heads": 32, "kv-heads": 32, "vocabulary": 32000, "rank": 512}
_KEYS = {
    "layers": "num_hidden_layers", "d_model": "hidden_size", "d_ff": "intermediate_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size",
}  # fmt: skip


class _Published(argparse.Action):
    """Takes the sizes of a published configuration; options behind it change one."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, _flag: str | None = None) -> None:
        found = sorted(CONFIGS.glob(f"*{value}.json"), key=lambda path: len(path.name))
        if not found:
            parser.error(f"no published configuration ends in {value}: see {CONFIGS.relative_to(ROOT)}")
        config = json.loads(found[0].read_text())
        if "num_experts" in config or "num_local_experts" in config:
            parser.error(f"{value} is a mixture of experts: the model of these benchmarks is dense")
        for name, key in _KEYS.items():
            setattr(namespace, name, config[key])
        namespace.head_dim = config.get("head_dim")
        namespace.rank = config["hidden_size"] // 4
        namespace.shape = value


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options for the shape, the predictor's rank and the density."""
    parser.add_argument("--shape", action=_Published, help="that of a published configuration: Llama-3.2-1B-Instruct")
    for name, default in _SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--head-dim", type=int, help="default: the width ÷ heads")
    parser.add_argument("--density", type=float, default=0.1)


def decoder_of(a: argparse.Namespace) -> Decoder:
    """The decoder that the options describe."""
    return small_decoder(
        n_layers=a.layers, d_model=a.d_model, d_ff=a.d_ff, n_heads=a.heads, n_kv_heads=a.kv_heads,
        head_dim=a.head_dim or a.d_model // a.heads, vocab_size=a.vocabulary, context_length=640,
    )  # fmt: skip


def head_share(d: Decoder, density: float) -> float:
    """The head's share of the weights that a token reads where so many neurons fire."""
    attention = (2 * d.n_heads + 2 * d.n_kv_heads) * d.head_dim
    layer = d.d_model * (attention + 3 * d.d_ff * density)
    return d.d_model * d.vocab_size / (d.d_model * d.vocab_size + d.n_layers * layer)
