"""Decoding in BitNet-2B4T's shape, dense, gate and predicted, beside llama.cpp's formats of ternary weights.

nox -s bench -- bitnet [--layers 2] [--rounds 20] [--no-peer]

Random weights in q4, of which half of the neurons fire and the predictor names half; a vocabulary of 2,048. One thread
each, in turns: printed is the processor's time for a token, which other programs on the machine hardly change. The row
without norms says what the norms cost. llama.cpp's model is dense and has SiLU, which costs the same.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from side_by_side.gguf_file import add_shape
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.decoder import Decoder

PEER_TYPES = (Type.TQ2_0, Type.TQ1_0, Type.Q4_0)
WARM = 4
"""Rounds that are not counted."""
Run = Callable[[int], object]


def decoder_of(layers: int, *, inner_norms: bool) -> Decoder:
    """The published shape with fewer layers and tokens."""
    return small_decoder(
        n_layers=layers, d_model=2560, d_ff=6912, n_heads=20, n_kv_heads=5, head_dim=128, vocab_size=2048,
        context_length=256, activation="relu2", tied_head=True, inner_norms=inner_norms,
    )  # fmt: skip


def write_gguf(path: Path, d: Decoder, kind: Type) -> None:
    """The same shape for llama.cpp, with ternary weights."""
    writer, rng = gguf.GGUFWriter(path, "bitnet"), np.random.default_rng(0)
    add_shape(writer, d)
    writer.add_rope_dimension_count(d.head_dim)
    writer.add_tokenizer_model("none")
    kv, heads = d.n_kv_heads * d.head_dim, d.n_heads * d.head_dim
    norms = {"attn_norm": d.d_model, "ffn_norm": d.d_model, "attn_sub_norm": heads, "ffn_sub_norm": d.d_ff}
    matrices = {"attn_q": (heads, d.d_model), "attn_k": (kv, d.d_model), "attn_v": (kv, d.d_model)}
    matrices |= {"attn_output": (d.d_model, heads), "ffn_gate": (d.d_ff, d.d_model)}
    matrices |= {"ffn_up": (d.d_ff, d.d_model), "ffn_down": (d.d_model, d.d_ff)}
    writer.add_tensor("token_embd.weight", rng.standard_normal((d.vocab_size, d.d_model)).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(d.d_model, np.float32))
    for n in range(d.n_layers):
        for name, width in norms.items():
            writer.add_tensor(f"blk.{n}.{name}.weight", np.ones(width, np.float32))
        for name, shape in matrices.items():
            values = rng.integers(-1, 2, shape).astype(np.float32) / np.float32(np.sqrt(shape[1]))
            writer.add_tensor(f"blk.{n}.{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(folder: Path, layers: int, stack: ExitStack) -> dict[str, Run]:
    """A function for each mode, and for dense without norms, that decodes a token."""
    found: dict[str, Run] = {}
    for norms, modes in ((True, ("dense", "gate", "predicted")), (False, ("dense",))):
        decoder = decoder_of(layers, inner_norms=norms)
        path = random_artifact(folder / f"{norms}.pi", decoder, format="q4", ranks=[320] * layers)
        for mode in modes:
            model = stack.enter_context(load(path, mode=mode, threads=1, device="cpu"))
            cache = model.new_cache()
            name = mode if norms else f"{mode} without norms"
            found[name] = lambda token, model=model, cache=cache: model.decode(token, cache)
    return found


def theirs(folder: Path, layers: int, stack: ExitStack) -> dict[str, Run]:
    """The same of llama.cpp, for each of its types."""
    import llama_cpp

    found: dict[str, Run] = {}
    for kind in PEER_TYPES:
        path = folder / f"{kind.name}.gguf"
        write_gguf(path, decoder_of(layers, inner_norms=True), kind)
        model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
        stack.callback(model.close)
        found[f"llama.cpp {kind.name}"] = lambda token, model=model: model.eval([token])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        runs = ours(Path(name), args.layers, stack)
        runs |= {} if args.no_peer else theirs(Path(name), args.layers, stack)
        seconds: dict[str, list[float]] = {run: [] for run in runs}
        for n in range(WARM + args.rounds):
            for run, decode in runs.items():
                began = time.process_time()
                decode(7 * n % 2048)
                seconds[run].append(time.process_time() - began)
        dense = statistics.median(seconds["dense"][WARM:])
        for run, taken in seconds.items():
            middle = statistics.median(taken[WARM:])
            print(f"{run:20} {1e3 * middle:6.2f} ms   {dense / middle:.2f} × dense")


if __name__ == "__main__":
    main()
