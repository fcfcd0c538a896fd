"""What the kernels of a prompt take, each alone on one thread: products, sums of `down`, attention and the rest.

nox -s bench -- prompts [--formats f16,q8,q4] [--prompts 64,512,2048] [--rounds 3] [--layers 1] [--shape NAME]

A synthetic Llama of one layer reads prompts in blocks of 64 tokens. Beside the whole layer, each of its kernels runs
alone on the same numbers: products with the rows of `qkv`, `out`, `first` and `up`; the sums of rows of `down`; and
attention. The rest is what the layer takes beyond these: norms, rotation, inputs, activations. Times are those of the
thread, so other processes do not count; the least of the rounds is taken. `PI_ISA` chooses the instructions.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numba
import numpy as np
from side_by_side.shape import add_shape, decoder_of
from sparse_model import Spec, build
from support.synthetic import byte_tokenizer

from pi_runtime.artifact.footprint import BLOCK_TOKENS, CHUNKS, FEW_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.host import CpuModel, token_blocks
from pi_runtime.execution.ops import CpuOps
from pi_runtime.execution.rows import MemoryRows
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats, MatrixView, matrix
from pi_runtime.kernels.ffn import network
from pi_runtime.kernels.ffn.memory import Batch, Ffn, first_rows, up_rows, whole_batch
from pi_runtime.kernels.ops.attention import LayerCache, attend
from pi_runtime.kernels.ops.linear import linear


@public
def _sums(f: Ffn, e: Batch, y_TD: Floats) -> None:
    """The sums of rows of `down` by the factors that are there."""
    network.sum_tiles(f, e, 0, CHUNKS, y_TD, y_TD)


@public
def _rows(f: Ffn, e: Batch, up: bool) -> MatrixView:
    return up_rows(f, e) if up else first_rows(f, e)


@dataclass
class Seconds:
    """What the kernels of a prompt take in all its layers."""

    layers: float = 0.0
    products: float = 0.0
    down: float = 0.0
    attention: float = 0.0

    def add(self, name: str, work: Callable[[], object]) -> None:
        """Run a kernel and count its time."""
        began = time.thread_time()
        work()
        setattr(self, name, getattr(self, name) + time.thread_time() - began)


def read(model: CpuModel, tokens: int) -> Seconds:
    """Read a prompt, and run each of its kernels once more alone."""
    ops, found, cache = CpuOps(model, MemoryRows(model)), Seconds(), model.new_cache()
    ids = np.random.default_rng(0).integers(0, model.manifest.decoder.vocab_size, tokens)
    for part in token_blocks(tokens, BLOCK_TOKENS):
        step = SequenceStep(cache=cache, tokens=ids[part], select=False)
        cache.reserve(len(step.tokens))
        ops.take([step])
        ops.embed(0)
        for layer in range(len(model.table_LX)):
            found.add("layers", lambda n=layer: (ops.attention(n), ops.ffn(n)))  # type: ignore[misc]
            _alone(model, ops, layer, found)
        cache.append(step.tokens, step.select)
    return found


def _alone(model: CpuModel, ops: CpuOps, layer: int, found: Seconds) -> None:
    """The kernels of one layer on what its workspace holds."""
    cfg, w, ws, tokens = model.cfg, model.table_LX[layer, 0], model.workspace, len(ops.x_TD)
    f, at, inputs = model.ffn, ops.at, ws.inputs.ctypes.data
    batch = whole_batch(f, model.table_LX[layer], 0, ws.token_T[:tokens], ops.select_T, ws.one_T[:tokens])
    found.add("down", lambda: _sums(f, batch, ws.attended_TD[:tokens]))
    shape = w["page_layer"], w["kv_heads"], int(w["cached_width"]), w["window"]
    pages = LayerCache(at.keys, at.values, *shape)
    qkv_TQ, mixed_TQ = ws.qkv_TQ[:tokens], ws.mixed_TQ[:tokens]
    found.add("attention", lambda: attend(pages, qkv_TQ, at.run_R4, ws.unpacked_CBE, ws.attention_CX, mixed_TQ))
    qkv = matrix(w["qkv_format"], w["qkv"], w["qkv_scales"], cfg.d_model)
    out = matrix(w["out_format"], w["out"], w["out_scales"], int(w["mixed_width"]))
    x_TD, y_TF = ws.normed_TD[:tokens], np.empty((tokens, cfg.d_ff), np.float32)
    products = [(MatrixView(*qkv), qkv_TQ.shape[1], x_TD, qkv_TQ), (MatrixView(*out), cfg.d_model, mixed_TQ, x_TD)]
    products += [(_rows(f, batch, up), cfg.d_ff, x_TD, y_TF) for up in (False, True)]
    for m, rows, a_TD, b_TN in products:
        found.add("products", lambda: linear(m, rows, 0, a_TD, inputs, b_TN))  # noqa: B023


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="f16,q8,q4")
    parser.add_argument("--prompts", default="64,512,2048")
    parser.add_argument("--rounds", type=int, default=3)
    add_shape(parser)
    parser.set_defaults(layers=1)
    a = parser.parse_args()
    if min(int(n) for n in a.prompts.split(",")) <= FEW_TOKENS:
        parser.error(f"up to {FEW_TOKENS} tokens go another way than prompts: see the benchmark `batch`")
    return a


def main() -> None:
    a = arguments()
    prompts, decoder = [int(n) for n in a.prompts.split(",")], decoder_of(a)
    flops = 2 * decoder.d_model * ((2 * a.heads + 2 * a.kv_heads) * decoder.head_dim + 3 * decoder.d_ff) * a.layers
    numba.set_num_threads(1)
    print(f"{ISA.name}, one thread, {a.layers} layers: milliseconds a token, 10⁹ operations a second")
    print(f"{'':>4} {'tokens':>6} {'products':>9} {'down':>7} {'attention':>10} {'rest':>7} {'all':>7} {'GFLOP/s':>8}")
    for name in a.formats.split(","):
        formats = {**dict.fromkeys(PARTS, name), "predictor": "q4"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pi"
            build(Spec(decoder=decoder, formats=formats, density=a.density, rank=a.rank), {1.0: path}, byte_tokenizer())
            with Artifact.open(path) as artifact:
                kernels = CpuModel(artifact, "dense", max(prompts) + BLOCK_TOKENS, threads=1)
                read(kernels, BLOCK_TOKENS)
                for tokens in prompts:
                    found = [read(kernels, tokens) for _ in range(a.rounds)]
                    least = {f.name: min(getattr(one, f.name) for one in found) for f in fields(Seconds)}
                    rest = 2 * least["layers"] - sum(least.values())
                    told = [least["products"], least["down"], least["attention"], rest, least["layers"]]
                    each = " ".join(f"{1e3 * s / tokens:{n}.3f}" for s, n in zip(told, (9, 7, 10, 7, 7), strict=True))
                    rate = flops * tokens / least["layers"] / 1e9
                    print(f"{name:>4} {tokens:>6} {each} {rate:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
