"""Files that people have, in one table: bytes, quality and speed of a GGUF file in llama.cpp, and of what is packed.

python tests/benchmarks/real_files.py FILE.gguf … [--formats keep,q8,q5,q4] [--tokens N] [--turns N] [--text FILE]
    [--greedy]

`keep` is what `pi-run FILE.gguf` makes; other formats are those of attention and FFN. Perplexity and divergence
(Kullback and Leibler's, in nats a token) are of the logits that either program computes, from those of the file's own
values in torch, in float32. Windows are paired; intervals are of 95 %. Speeds are medians of turns. `--greedy` compares
the most likely token behind every token of the text instead, of what `pi-run` makes and of llama.cpp, and names the
first that differs.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from rounding.beside import INTERVAL

from pi_compile import open_checkpoint, pack
from pi_compile.calibration.quantising import source_values, text_windows
from pi_compile.calibration.quantising.loss import text_states
from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.tokenizer_files import TOKENIZER
from pi_compile.pipeline.packed import pack_model
from pi_compile.torch_model import decoder as td
from pi_runtime import console, load

ROOT = Path(__file__).parents[2]
WINDOW = 512
Floats = npt.NDArray[np.float32]
Logits = Iterator[Floats]
"""Of each window (T, V)."""


class Reference:
    """The predictions of a file's own values, from which others are measured."""

    def __init__(self, checkpoint: Checkpoint, ids_NT: torch.Tensor) -> None:
        self._decoder, self.ids_NT = checkpoint.decoder, ids_NT
        with torch.inference_mode():
            ((self._ends, self._states_NTD),) = text_states(checkpoint, ids_NT, [source_values], lambda *_: None)

    def compared(self, logits: Logits) -> str:
        """Perplexity, its increase and the divergence of other predictions, with intervals."""
        rows = []
        with torch.inference_mode():
            for ids, x_TD, z_TV in zip(self.ids_NT, self._states_NTD, logits, strict=True):
                p = td.logits(self._decoder, self._ends, x_TD[None])[0].log_softmax(-1)
                q = torch.from_numpy(z_TV).log_softmax(-1)
                losses = [torch.nn.functional.nll_loss(each[:-1], ids[1:]).item() for each in (q, p)]
                rows.append((*losses, (p.exp() * (p - q)).sum(-1).mean().item()))
        own_N, source_N, divergence_N = np.array(rows).T
        change_N = own_N - source_N
        error, of_divergence = (INTERVAL * x.std(ddof=1) / len(x) ** 0.5 for x in (change_N, divergence_N))
        increase = f"{np.expm1(change_N.mean()):+.2%} ± {error:.2%}"
        return f"{np.exp(own_N.mean()):.3f} | {increase} | {divergence_N.mean():.5f} ± {of_divergence:.5f}"


def of_llama(file: Path, ids_NT: torch.Tensor, folder: Path) -> Logits:
    """llama.cpp's logits, from a process of its own."""
    np.save(folder / "ids.npy", ids_NT.numpy())
    command = [sys.executable, "-P", str(ROOT / "tests/benchmarks/rounding/llama_logits.py")]
    command += [str(file), str(folder / "ids.npy")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in ids_NT:
            path = child.stdout.readline().strip()
            assert path, "llama.cpp cannot run it"
            yield np.load(path, mmap_mode="c")
            child.stdin.write("\n")
            child.stdin.flush()


def of_ours(path: Path, ids_NT: torch.Tensor) -> Logits:
    """The runtime's logits, every neuron computed."""
    with load(path, mode="dense", context=ids_NT.shape[1]) as model:
        for ids in ids_NT:
            yield model.logits(ids.numpy())


def speeds(path: Path, beside: Path | None, turns: int) -> dict[str, str]:
    """Tokens a second of decoding and of a prompt, of the artifact and of llama.cpp."""
    command = [sys.executable, "-m", "pi_runtime", str(path), "--bench", "--json", "--mode", "dense"]
    command += ["--batches", "1", "--prompt-tokens", "256", "--repetitions", str(turns), "--seconds", "600"]
    command += ["--beside", str(beside)] if beside else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, str]] = {}
    for row in json.loads(done.stdout)["rows"]:
        ratio = "" if row["mode"] == "dense" else " ({:.2f}, {:.2f} to {:.2f} ×)".format(*row["times_dense"])
        found.setdefault(row["mode"], {})[row["phase"]] = f"{row['tokens_per_s']:.1f}{ratio}"
    return {mode: f"{of['decode']} | {of['prompt']}" for mode, of in found.items()}


def packed(file: Path, fmt: str, path: Path) -> None:
    """Pack a file as `pi-run` does, or with attention and FFN in a format."""
    if fmt == "keep":
        pack_model(str(file), path, progress=console.progress, notice=lambda _line: None)
    else:
        pack(open_checkpoint(file).in_layout("matrices"), path, formats={"attention": fmt, "ffn": fmt})


def rows(file: Path, args: argparse.Namespace, text: str) -> Iterator[str]:
    """The lines of one file."""
    checkpoint = open_checkpoint(file)
    tokenizer = tokenizers.Tokenizer.from_buffer(checkpoint.text_files.files[TOKENIZER])
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids[: args.tokens])
    reference = Reference(checkpoint, text_windows(checkpoint.decoder, ids, WINDOW))
    there = importlib.util.find_spec("llama_cpp") is not None
    with tempfile.TemporaryDirectory() as name:
        folder, nbytes = Path(name), file.stat().st_size
        of_peer = ""
        for fmt in args.formats.split(","):
            path, began = folder / "a.pi", time.perf_counter()
            packed(file, fmt, path)
            seconds = time.perf_counter() - began
            found = speeds(path, file if there and not of_peer else None, args.turns)
            quality, size = reference.compared(of_ours(path, reference.ids_NT)), path.stat().st_size
            if "llama.cpp" in found:
                of_peer = found["llama.cpp"]
                theirs = reference.compared(of_llama(file, reference.ids_NT, folder))
                yield f"| {file.name} | llama.cpp | {nbytes / 1e6:.1f} | 1.000 | | {theirs} | {of_peer} |"
            shown = f"{size / 1e6:.1f} | {size / nbytes:.3f} | {seconds:.1f}"
            yield f"| {file.name} | ours, {fmt} | {shown} | {quality} | {found['dense']} |"


def losses(z_TV: Floats, ids: torch.Tensor) -> float:
    """The mean loss of a window's next tokens."""
    return torch.nn.functional.cross_entropy(torch.from_numpy(z_TV[:-1]).double(), ids[1:]).item()


def greedy(file: Path, tokens: int, text: str) -> Iterator[str]:
    """How many tokens of the text both programs go on with alike, and where they first do not."""
    checkpoint = open_checkpoint(file)
    tokenizer = tokenizers.Tokenizer.from_buffer(checkpoint.text_files.files[TOKENIZER])
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids[:tokens])
    ids_NT, same, first, found = text_windows(checkpoint.decoder, ids, WINDOW), 0, "", []
    with tempfile.TemporaryDirectory() as name:
        packed(file, "keep", Path(name) / "a.pi")
        both = zip(ids_NT, of_ours(Path(name) / "a.pi", ids_NT), of_llama(file, ids_NT, Path(name)), strict=True)
        for window, (ids_T, z_TV, peer_TV) in enumerate(both):
            one_T, other_T = z_TV.argmax(1), peer_TV.argmax(1)
            same += int((one_T == other_T).sum())
            found.append((losses(z_TV, ids_T), losses(np.array(peer_TV), ids_T)))
            if not first and (t := int((one_T != other_T).argmax())) + (one_T[0] != other_T[0]):
                pair = [one_T[t], other_T[t]]
                logits = "; ".join(
                    f"{who} {z[t, pair].round(4).tolist()}" for who, z in (("ours", z_TV), ("llama.cpp", peer_TV))
                )
                first = f"; first apart at window {window}, token {t}: {tokenizer.decode(pair)!r}, logits {logits}"
    ours, peer = np.array(found).mean(0)
    yield f"{file.name}: {same} of {ids_NT.numel()} greedy tokens are the same{first}"
    yield f"perplexity {np.exp(ours):.4f}, of llama.cpp {np.exp(peer):.4f}: {np.expm1(ours - peer):+.3%}"


def main(say: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--formats", default="keep,q8,q4")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--text", type=Path, help="the documentation of this project, unless told")
    parser.add_argument("--greedy", action="store_true", help="compare greedy tokens alone")
    args = parser.parse_args()
    pages = [args.text] if args.text else sorted((ROOT / "docs").rglob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    if args.greedy:
        for file in args.files:
            for line in greedy(file, args.tokens, text):
                say(line)
        return
    columns = (
        "file | in | MB | ÷ file | packed in s | perplexity | ÷ source | divergence | decode, tokens/s | prompt of 256"
    )
    say(f"| {columns} |\n|{' --- |' * len(columns.split('|'))}")
    for file in args.files:
        for line in rows(file, args, text):
            say(line)


if __name__ == "__main__":
    main()
