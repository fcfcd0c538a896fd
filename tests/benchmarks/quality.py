"""What few bits cost: the error of candidate block formats per bit, a model's perplexity with its weights in q4, and
files with budgets of bits beside those of llama.cpp's quantiser.

python tests/benchmarks/quality.py [MODEL …] [--text FILE] [--fit N] [--tokens N] [--formats-only]
    [--budgets MB …] [--kinds KIND …] [--on-text N] [--beside-only]

llama.cpp's files are of the kinds that are named, ours of the same bytes, and of --budgets; bytes of tokenizers do not
count.
MODEL is a folder or a GGUF file, by default the bundled demo model. Of the text the first tokens say how much each
input counts and are what weights are rounded on, the last ones are what is reported. Everything is in torch, in
float32: what a format would lose, before any kernel reads it.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from rounding.beside import Beside

from pi_compile.calibration.quantising.compensation import FIRST, OUT, QKV, importance, second_moments
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.tokenizer_files import TOKENIZER
from pi_compile.pipeline.stages import quantise
from pi_compile.torch_model import decoder as td
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import as_stored, dequantise

ROOT = Path(__file__).parents[2]
WINDOW = 512
MATRICES = (QKV, OUT, FIRST, "ffn/rest")
EVERY = 8
"""Every n-th row of a matrix is looked at."""
SHARES = (1.0, 0.95, 0.9, 0.85, 1.05, 1.1)
"""Parts of the plain scale that are tried."""
Floats = npt.NDArray[np.float32]
Rounding = Callable[[Floats, Floats], Floats]
"""Blocks (N, B) and the weights of their errors (N, B) → the rounded blocks."""


def f16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def least(w: Floats, a: Floats, tried: Iterator[Floats]) -> Floats:
    """Of some roundings of each block the one with the least weighted error."""
    best, error = np.zeros_like(w), np.full((len(w), 1), np.inf, np.float32)
    for found in tried:
        e = (a * np.square(w - found)).sum(1, keepdims=True)
        best, error = np.where(e < error, found, best), np.minimum(e, error)
    return best


def quotient(w: Floats, scale: Floats) -> Floats:
    return np.rint(w / np.where(scale == 0, np.inf, scale))


def symmetric(bits: int) -> Rounding:
    """scale · q, as q4 is."""
    half = 2 ** (bits - 1)

    def tried(w: Floats, a: Floats) -> Iterator[Floats]:
        extreme = np.take_along_axis(w, np.abs(w).argmax(1, keepdims=True), 1)
        for share in SHARES:
            scale = f16(extreme / np.float32(-half * share))
            q = np.clip(quotient(w, scale), -half, half - 1)
            yield q * scale
            norm = (a * q * q).sum(1, keepdims=True)
            scale = f16((a * q * w).sum(1, keepdims=True) / np.where(norm == 0, 1, norm))
            yield np.clip(quotient(w, scale), -half, half - 1) * scale

    return lambda w, a: least(w, a, tried(w, a))


def with_minimum(bits: int) -> Rounding:
    """scale · q + minimum, both f16: the first that is tried is Q4_1's, so what is on its grid stays."""
    most = 2**bits - 1

    def tried(w: Floats, a: Floats) -> Iterator[Floats]:
        low, high = w.min(1, keepdims=True), w.max(1, keepdims=True)
        for share in SHARES:
            scale = f16((high - low) / np.float32(most * share))
            minimum = f16(low if share == 1 else (low + high - scale * most) / 2)
            for _ in range(2):
                q = np.clip(quotient(w - minimum, scale), 0, most)
                yield q * scale + minimum
                s, sq, sqq, sw, sqw = ((a * x).sum(1, keepdims=True) for x in (np.ones_like(w), q, q * q, w, q * w))
                det = s * sqq - sq * sq
                scale = f16(np.where(det > 1e-9 * s * sqq, (s * sqw - sq * sw) / np.where(det == 0, 1, det), 0))
                minimum = f16((sw - scale * sq) / np.where(s == 0, 1, s))

    return lambda w, a: least(w, a, tried(w, a))


def with_zero(bits: int) -> Rounding:
    """scale · (q − zero), zero an integer, as GPTQ and AWQ have it."""
    most = 2**bits - 1

    def tried(w: Floats, a: Floats) -> Iterator[Floats]:
        low, high = np.minimum(w.min(1, keepdims=True), 0), np.maximum(w.max(1, keepdims=True), 0)
        for share, shift in product(SHARES, (0, -1, 1)):
            scale = f16((high - low) / np.float32(most * share))
            zero = np.clip(quotient(-low, scale) + shift, 0, most)
            yield (np.clip(quotient(w, scale) + zero, 0, most) - zero) * scale

    return lambda w, a: least(w, a, tried(w, a))


CANDIDATES: dict[str, tuple[float, int, Rounding]] = {
    **{f"symmetric, {n} bits of 32": (n + 16 / 32, 32, symmetric(n)) for n in (4, 5, 6, 8)},
    **{f"f16 minimum, {n} bits of 32": (n + 32 / 32, 32, with_minimum(n)) for n in (4, 5, 6)},
    **{f"integer zero, 4 bits of {b}": (4 + 20 / b, b, with_zero(4)) for b in (32, 64, 128)},
}
"""Name → bits of a weight, columns of a block, and how it is rounded."""


class Model:
    """A checkpoint with its text."""

    def __init__(self, path: Path, text: str, fit: int, tokens: int) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self.d = self.checkpoint.decoder
        files = self.checkpoint.text_files.files
        tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER])
        tokenizer.no_truncation()
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(ids) >= fit + tokens, f"{len(ids)} tokens of text, {fit + tokens} wanted"
        self.window = min(WINDOW, self.d.context_length)
        self.fit, self.report = ids[:fit], td.windows(ids[-tokens:], self.window)
        self.fit_text = tokenizer.decode(self.fit)
        self.weights = [dict(w) for w in td.stored_layers(self.checkpoint, "cpu")]
        self.globals = td.global_weights(self.checkpoint, "cpu")

    def errors(self) -> dict[str, float]:
        """Σ a (w − ŵ)² ÷ Σ a w² of each candidate, over every `EVERY`th row of all matrices but the embedding."""
        sums = dict.fromkeys(CANDIDATES, 0.0)
        of, x = 0.0, td.embed(self.d, self.globals, td.windows(self.fit, self.window)[:8])
        for n, w in enumerate(self.weights):
            moments = second_moments(self.d, n, w, [x], lambda batch: batch)
            ((x,),) = td.layers(self.d, [w], [x])
            for name in MATRICES:
                rows = w[name][:, 0] if name == "ffn/rest" and w[name].shape[1] == 2 else w[name].flatten(0, -2)
                key = FIRST if name == "ffn/rest" else name
                a = importance(moments[key]) if rows.shape[1] == len(moments[key]) else np.ones(rows.shape[1], "f4")
                values = rows[::EVERY].numpy()
                of += float((a * np.square(values)).sum(dtype=np.float64))
                for candidate, (_, block, rounding) in CANDIDATES.items():
                    found = rounded(values, a, block, rounding)
                    sums[candidate] += float((a * np.square(values - found)).sum(dtype=np.float64))
        return {name: total / of for name, total in sums.items()}

    def log_probabilities(self, weights: list[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        for ids in self.report:
            *_, (x,) = td.layers(self.d, weights, [td.embed(self.d, self.globals, ids[None])])
            yield td.logits(self.d, self.globals, x)[0].log_softmax(-1)

    def in_q4(self, matrix: Callable[[str, torch.Tensor], Floats]) -> list[dict[str, torch.Tensor]]:
        """The layers with the matrices of attention and FFN as `matrix` has them."""
        return [
            {**w, **{name: torch.from_numpy(matrix(f"layers/{n}/{name}", w[name])) for name in MATRICES}}
            for n, w in enumerate(self.weights)
        ]


def rounded(values: Floats, a: Floats, block: int, rounding: Rounding) -> Floats:
    columns = -(-values.shape[1] // block) * block
    w, weight = np.zeros((len(values), columns), np.float32), np.zeros(columns, np.float32)
    w[:, : values.shape[1]], weight[: len(a)] = values, a
    weights = np.broadcast_to(weight, w.shape).reshape(-1, block)
    return rounding(w.reshape(-1, block), weights).reshape(w.shape)[:, : values.shape[1]]


def print_errors(model: Model) -> None:
    """A row for each candidate. A bit more is worth a quarter of the error, so `at 4.5 bits` compares them."""
    errors = model.errors()
    found = errors["symmetric, 4 bits of 32"]
    assert (
        errors["symmetric, 8 bits of 32"]
        < errors["symmetric, 6 bits of 32"]
        < errors["symmetric, 5 bits of 32"]
        < found
    )
    print(f"{'format':<28}{'bits':>6}{'error':>9}{'at 4.5 bits':>13}")
    for name, (bits, _, _) in sorted(CANDIDATES.items(), key=lambda item: item[1][0]):
        print(
            f"{name:<28}{bits:>6.2f}{math.sqrt(errors[name]):>9.2%}{math.sqrt(errors[name]) * 2 ** (bits - 4.5):>13.2%}"
        )


def print_perplexity(model: Model) -> None:
    exact = [found.half() for found in model.log_probabilities(model.weights)]
    q4 = FORMATS["q4"]
    on_text = quantise(model.checkpoint, model.fit, formats={"attention": "q4", "ffn": "q4"}, window=model.window)
    kinds = {
        "as it is": model.weights,
        "q8": model.in_q4(lambda _name, w: as_stored("q8", w.numpy())),
        "q4, to nearest": model.in_q4(lambda _name, w: as_stored("q4", w.numpy())),
        "q4, on text": model.in_q4(lambda name, w: dequantise(q4, *on_text[name], w.shape[-1])),
    }
    print(f"\n{'attention and FFN':<20}{'perplexity':>11}{'divergence':>12}{'same next token':>17}")
    for kind, weights in kinds.items():
        loss = divergence = same = 0.0
        for ids, before, after in zip(model.report, exact, model.log_probabilities(weights), strict=True):
            loss -= float(after[:-1].gather(1, ids[1:, None]).mean()) / len(exact)
            divergence += float((before.float().exp() * (before.float() - after)).sum(-1).mean()) / len(exact)
            same += float((before.argmax(-1) == after.half().argmax(-1)).float().mean()) / len(exact)
        print(f"{kind:<20}{math.exp(loss):>11.3f}{divergence:>12.4f}{same:>17.1%}")


def parsed(
    description: str | None,
    flag: str,
    *,
    fit: int,
    tokens: int,
    further: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
) -> tuple[argparse.Namespace, str]:
    """The command line of a study of models on a text, with a flag of its own and `further` options, and the text."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[ROOT / "recipes" / "demo"])
    parser.add_argument("--text", type=Path, help="the documentation of this project, unless told")
    parser.add_argument("--fit", type=int, default=fit)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument(flag, action="store_true")
    further(parser)
    args = parser.parse_args()
    pages = [args.text] if args.text else sorted((ROOT / "docs").rglob("*.md"))
    return args, "\n".join(page.read_text(encoding="utf-8") for page in pages)


def print_beside(model: Model, args: argparse.Namespace) -> None:
    """A row for each file: its bytes, and how much higher the perplexity is than the source's, with an interval."""
    columns = f"{'file':<34}{'MB':>9}{'of file':>9}{'perplexity':>20}{'divergence':>20}"
    print(f"\n{columns} (95 %), {model.report.numel():,} tokens")
    checkpoint, d = model.checkpoint, model.d
    if not d.sparse and d.n_experts == 1:  # as a plain pack has them
        checkpoint = checkpoint.in_layout("matrices")
    with tempfile.TemporaryDirectory() as folder:
        beside = Beside(checkpoint, model.fit_text, model.fit, model.report.flatten().numpy(), Path(folder))
        for row in beside.rows(args.budgets, args.kinds, args.on_text):
            print(row, flush=True)


def beside_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budgets", type=float, nargs="*", default=[], help="megabytes of more files of ours")
    parser.add_argument("--kinds", nargs="*", default=["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K"], help="llama.cpp's")
    parser.add_argument("--on-text", type=int, default=0, help="tokens of the text that weights are rounded on")
    parser.add_argument("--beside-only", action="store_true")


def main() -> None:
    args, text = parsed(__doc__, "--formats-only", fit=16_384, tokens=16_384, further=beside_options)
    for path in args.models:
        with torch.inference_mode():
            model = Model(path, text, args.fit, args.tokens)
            print(f"\n{path.name}: {model.d.n_layers} layers of {model.d.d_model}, {args.fit:,} tokens to round on")
            if not args.beside_only:
                print_errors(model)
            if not (args.formats_only or args.beside_only):
                print_perplexity(model)
        if not args.formats_only:
            print_beside(model, args)


if __name__ == "__main__":
    main()
