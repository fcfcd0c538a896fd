"""Runs damaged artifacts in a process that may die of it: `python -m support.fuzz.running FOLDER SEED FIRST COUNT`.

Before each case its number goes to stdout, afterwards `ok`, or what was wrong: so whoever reads it knows which crashed.
"""

import faulthandler
import sys
from pathlib import Path
from random import Random
from typing import Any

from pi_runtime import Sampling, load
from pi_runtime.artifact.buffers import CACHE_FORMATS
from pi_runtime.engine.engine import Engine
from pi_runtime.errors import PiError
from support.fuzz.artifacts import Forger

TOKENS = 6


def run(path: Path, rng: Random) -> None:
    """Answer a prompt in some mode, with some sampling, alone or beside others. Raises what is no error of ours."""
    options: dict[str, Any] = {"mode": rng.choice(("auto", "auto", "dense", "gate"))}
    options["cache_format"] = rng.choice(sorted(CACHE_FORMATS))
    if rng.random() < 0.3:
        options |= {"device": "stand-in", "vram_budget": rng.choice((1 << 16, 1 << 20, 1 << 30))}
    else:
        options["device"] = "cpu"
    prompt = [rng.randrange(256) for _ in range(rng.choice((1, 3, 40)))]
    sampling = Sampling(temperature=rng.choice((0.0, 1.0)), top_k=rng.choice((0, 5)), seed=1)
    try:
        with load(path, **options) as model:
            if rng.random() < 0.3:
                with Engine(model, slots=2) as engine:
                    streams = [engine.generate(prompt, max_tokens=TOKENS, sampling=sampling) for _ in range(2)]
                    texts = ["".join(stream) for stream in streams]
            else:
                texts = ["".join(model.generate(prompt, max_tokens=TOKENS, sampling=sampling, logprobs=2))]
            assert all(len(text) < 100 * TOKENS for text in texts), texts
    except PiError:
        return


def main() -> None:
    folder, seed, first, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    faulthandler.enable()
    forgers = [Forger(path) for path in sorted(folder.glob("*.pi"))]
    path = folder / f"damaged-{first}"
    for n in range(first, first + count):
        print(n, end=" ", flush=True)
        rng = Random(f"{seed} run {n}")
        forger = rng.choice(forgers)
        lie = forger.shape(rng) if rng.random() < 0.3 else forger.damage(rng)
        path.write_bytes(lie.data)
        try:
            run(path, rng)
        except Exception as error:
            print(f"{type(error).__name__}: {error} ({lie.what[:500]})".replace("\n", " "), flush=True)
        else:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
