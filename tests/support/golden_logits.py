"""Golden logits: what small models compute, to the last bit, on every instruction set and at any number of threads.

    python tests/support/golden_logits.py FOLDER THREADS… [FORMAT…]    prints the instruction set, once all are the same
    python tests/support/golden_logits.py FOLDER --write               writes them anew (f16: those of its lanes)

Where they change, so does `kernels.SUMS`, which stands beside them.

A process of its own for each instruction set, because the choice is made once. No exponential but the softmax's own is
computed: others come from the machine's C library.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi_runtime import load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.kernels import SUMS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.weight_formats import REGISTER
from support.paths import GOLDEN_LOGITS
from support.stored import BLOCK_FORMATS, GROUPED_FORMATS, TABLE_FORMATS
from support.synthetic import counted_artifact, small_decoder

WHOLE_FORMATS = tuple(dict.fromkeys((*GROUPED_FORMATS, *TABLE_FORMATS)))
FORMATS, MODES = ("f16", *BLOCK_FORMATS, *WHOLE_FORMATS), ("dense", "predicted")
_SHAPE = {"d_model": 352, "n_heads": 11, "n_kv_heads": 1, "head_dim": 32, "d_ff": 332}
"""A group of blocks, three blocks beside it, and an end of 12 columns, in which lanes are left over."""
DECODERS = {
    "gated, rms norm": small_decoder(**_SHAPE, qk_norm=True),
    "plain, layer norm": small_decoder("opt", **_SHAPE | {"d_model": 300}),
}
_WHOLE = {"d_model": 256, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32, "d_ff": 512}
WHOLE_DECODERS = {"whole groups": small_decoder(**_WHOLE, qkv_bias=True)}
"""For formats with scales of groups; keys and values of the first layer stand apart."""
TABLE_DECODERS = {"gated, rms norm": DECODERS["gated, rms norm"]}
"""For other formats whose rows are not summed: the same."""
PROMPT, TOKENS = [3, 141, 59, 26, 53, 58, 97], [7, 200]


def decoders(fmt: str) -> dict[str, Decoder]:
    """The models of a format."""
    return WHOLE_DECODERS if fmt in GROUPED_FORMATS else TABLE_DECODERS if fmt in TABLE_FORMATS else DECODERS


def key(fmt: str, lanes: int) -> str:
    """The entry of a format's logits: f16 has them for each number of lanes."""
    return f"{fmt} in {lanes} lanes" if fmt == "f16" else fmt


def logits(fmt: str, folder: Path, threads: int | None = None) -> Iterator[npt.NDArray[np.float32]]:
    """Of the prompt's last token, read at once, then of two more tokens alone, model by model."""
    for name, decoder in decoders(fmt).items():
        path = folder / f"{name}, {fmt}.pi"
        if not path.exists():
            counted_artifact(path, decoder, fmt)
        for mode in MODES[: 1 if fmt in WHOLE_FORMATS else 2]:
            with load(path, mode=mode, threads=threads) as model:
                cache = model.new_cache()
                yield model.logits(PROMPT, cache=cache)[-1].copy()
                for token in TOKENS:
                    yield model.decode(token, cache)[0].copy()


def main() -> None:
    folder, *words = sys.argv[1:]
    formats = [word for word in words if word in FORMATS]
    numbers = [word for word in words if word not in formats]
    golden = dict(np.load(GOLDEN_LOGITS)) if GOLDEN_LOGITS.exists() else {}
    for threads, fmt in itertools.product(numbers, formats or FORMATS):
        entry = key(fmt, REGISTER)
        found = np.stack(list(logits(fmt, Path(folder), None if threads == "--write" else int(threads))))
        if threads == "--write":
            changed = entry in golden and (found != golden[entry]).any()
            assert not changed or golden["sums"] != SUMS, f"{entry}: other bits, so raise kernels.SUMS"
            golden[entry] = found
        wrong = np.flatnonzero((found != golden[entry]).any(-1))
        assert not len(wrong), f"{ISA.name}, {entry}, {threads} threads: rows {wrong.tolist()}"
    if numbers == ["--write"]:
        np.savez(GOLDEN_LOGITS, **golden | {"sums": np.array(SUMS)})
    print(ISA.name)


if __name__ == "__main__":
    main()
