"""Answer several prompts at once, each with the text that it would get alone.

python docs/examples/many_prompts.py ARTIFACT
"""

import sys
from pathlib import Path

from pi_runtime import Engine, Sampling, load

PROMPTS = ("The with statement", "A list comprehension", "An exception is raised when")


def main(artifact: Path) -> None:
    with load(artifact) as model, Engine(model, slots=8) as engine:
        sampling = Sampling(temperature=0.7, seed=1)
        streams = [engine.generate(prompt, max_tokens=20, sampling=sampling) for prompt in PROMPTS]
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            print(f"{prompt}{''.join(stream)}\n")
        print(f"{engine.stats.generated_tokens} tokens in {engine.stats.busy_s:.2f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
