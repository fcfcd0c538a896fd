"""Holds our reading of llama.cpp's own files against llama.cpp: `python vocabularies.py FOLDER [--texts N] [--seed N]`.

FOLDER is llama-cpp-python's source package, unpacked. Compared are the ids that it has beside its vocabularies
(`models/ggml-vocab-*.gguf.inp` and `.out`), the ids of random texts beside its own tokenizer where the package
`llama_cpp` is installed, and the names in its source that our tables should have.
"""

import argparse
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pi_compile.checkpoint.gguf.file import GgufFile, open_gguf
from pi_compile.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, REFUSED
from pi_compile.checkpoint.gguf.tokenizer import gguf_tokenizer
from pi_compile.checkpoint.tokenizer_files import named_ends

MODELS = ("gpt2", "llama", "gemma4")
SEPARATOR = "\n__ggml_vocab_test__\n"
RANGES = ((32, 127), (160, 592), (880, 1792), (2304, 3584), (8192, 10240), (12288, 16384), (44032, 55040))
RANGES += ((127744, 129280),)
OTHER_BLANKS = ("deepseek-llm", "deepseek-coder", "phi-3")
"""Where wide blanks are not what they are to llama.cpp: in a rule's ranges, or behind a marker that takes blanks."""
BLANKS = (" ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", " \n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    (source,) = asked.folder.glob("**/src/llama-vocab.cpp")
    wrong = _names(source.read_text())
    print(f"seed {asked.seed}")
    for path in sorted(source.parents[1].glob("models/ggml-vocab-*.gguf")):
        wrong += _vocabulary(path, random.Random(asked.seed), asked.texts)
    print("all alike" if not wrong else f"{wrong} differ")
    return 1 if wrong else 0


def _names(source: str) -> int:
    """Say which names of llama.cpp's source are in none of our tables."""
    rules = set(re.findall(r'tokenizer_pre == "([^"]+)"', source)) - PRE_TOKENIZERS.keys() - REFUSED
    # Names of ends are compared where each token's id is put among them.
    lists = re.findall(r"if \(false((?:\s*\|\| t\.first == .*)+)\s*\) \{\s*special_(\w+?)_ids?\b", source)
    kinds = ("eog", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    ends = {name for names, kind in lists if kind in kinds for name in re.findall(r'"([^"]+)"', names)}
    ends -= named_ends(ends) | {"<|end|>", "</s>"}
    for what, names in (("pre-tokenizers", rules), ("ends", ends)):
        print(f"{what} of llama.cpp that we do not know: {', '.join(sorted(names)) or 'none'}")
    return len(rules) + len(ends)


def _vocabulary(path: Path, rng: random.Random, count: int) -> int:
    file = open_gguf(path)
    if file.metadata["tokenizer.ggml.model"] not in MODELS:
        print(f"{path.stem}: {file.metadata['tokenizer.ggml.model']}, which is not compared")
        return 0
    ours = gguf_tokenizer(file).backend_tokenizer
    pairs = list(_pairs(path))
    wrong = _differing(ours, pairs)
    markers = _markers(file)
    texts = [_text(rng, markers) for _ in range(count)]
    if path.stem.endswith(OTHER_BLANKS):
        texts = ["".join(c for c in text if c.isascii() or not c.isspace()) for text in texts]
    theirs = _of_llama_cpp(path, texts)
    more = _differing(ours, theirs)
    alike = f"{len(pairs) - wrong} of {len(pairs)} pairs and {len(theirs) - more} of {len(theirs)} random texts"
    print(f"{path.stem}: {alike} alike", flush=True)
    return wrong + more


def _pairs(path: Path) -> Iterable[tuple[str, list[int]]]:
    texts, ids = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
    if not texts.is_file():
        return ()
    lines = ids.read_text().splitlines()
    asked = texts.read_bytes().decode().split(SEPARATOR)
    return [(text, [int(i) for i in line.split()]) for text, line in zip(asked, lines, strict=False)]


def _differing(ours: Any, pairs: Iterable[tuple[str, list[int]]]) -> int:
    wrong = 0
    for text, ids in pairs:
        found = ours.encode(text, add_special_tokens=False).ids
        if found != ids:
            wrong += 1
            print(f"  {text!a}: {found} for {ids}")
    return wrong


def _markers(file: GgufFile) -> list[str]:
    """Tokens that are found whole; those that two readings could cut, made of blanks, apart."""
    types = file.metadata["tokenizer.ggml.token_type"]
    tokens = zip(file.strings("tokenizer.ggml.tokens"), types, strict=True)
    whole = [token for token, kind in tokens if kind in (3, 4) and token.strip() == token and len(token) > 2]
    return whole or ["<none>"]


def _text(rng: random.Random, markers: list[str]) -> str:
    parts = {
        0: lambda: rng.choice(BLANKS),
        1: lambda: str(rng.randrange(10 ** rng.randint(1, 9))),
        2: lambda: rng.choice(("'s", "'LL", "'re", "don't", "I'M")),
        3: lambda: "".join(rng.choices("abcdeXYZ", k=rng.randint(1, 8))),
        4: lambda: "".join(rng.choices("!?.,;:-_/*#()[]{}\"'`~^|<>=+$%&@\\", k=rng.randint(1, 4))),
        5: lambda: chr(rng.randrange(*rng.choice(RANGES))),
        6: lambda: rng.choice(markers),
    }
    return "".join(parts[rng.choice((0, 0, 1, 2, 3, 3, 4, 5, 5, 5, 6))]() for _ in range(rng.randint(1, 16)))


def _of_llama_cpp(path: Path, texts: list[str]) -> list[tuple[str, list[int]]]:
    """What its own tokenizer makes of the texts; nothing where the package is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return []
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [(text, model.tokenize(text.encode(), add_bos=False, special=True)) for text in texts]


if __name__ == "__main__":
    sys.exit(main())
