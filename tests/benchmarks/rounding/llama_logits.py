"""llama.cpp's logits of windows of tokens, in a process of its own: python llama_logits.py MODEL.gguf TOKENS.npy.

A line on stdout is the path of a window's logits (T, V), float32; a line on stdin asks for the next window's.
"""

import os
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    model, tokens = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    ids_NT = np.load(tokens)
    llama = llama_cpp.Llama(model_path=model, n_ctx=ids_NT.shape[1], logits_all=True, n_gpu_layers=0, verbose=False)
    found = Path(tokens).with_suffix(".logits.npy")
    for ids_T in ids_NT:
        llama.reset()
        llama.eval(ids_T.tolist())
        np.save(found, np.asarray(llama.scores[: len(ids_T)], np.float32))
        print(found, file=answers, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
