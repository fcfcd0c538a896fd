"""The whole road from Python: a checkpoint is profiled, given predictors, placed, packed, run and evaluated.

    python docs/examples/python_api.py [CHECKPOINT [ARTIFACT]]

CHECKPOINT is a folder or a GGUF file, by default the bundled demo model; ARTIFACT is the file to write. The amounts of
text are small, so that the demo takes seconds; without them the stages take those that `pi-compile init` writes.
"""

import sys
from pathlib import Path

from pi_compile import evaluate, open_checkpoint, pack, place, profile, read_corpus, train
from pi_runtime import Sampling, load

REPOSITORY = Path(__file__).parents[2]


def main(model: Path, artifact: Path) -> None:
    checkpoint = open_checkpoint(model)
    corpus = read_corpus(checkpoint, [REPOSITORY / "docs/**/*.md"], fit_tokens=2048, tune_tokens=512, report_tokens=512)

    counts = profile(checkpoint, corpus.fit)
    for layer, density in enumerate(counts.density()):
        print(f"layer {layer}: {density:.1%} of the neurons fire for a token")

    predictors = train(checkpoint, counts, corpus, "stand-in", tokens=512, steps=10)
    print("rungs:", ", ".join(row.rung for row in predictors.rows))

    placements = place(checkpoint, counts, predictors, "stand-in")
    for placement in placements:
        gib, share = placement.plan.vram_bytes / 2**30, placement.activations_on_gpu
        print(f"{gib:.4f} GiB of GPU memory: {1e9 / placement.time.ns:,.0f} tokens/s, {share:.0%} of activations")

    packed = pack(checkpoint, artifact, profile=counts, predictors=predictors, placements=placements)
    print(f"{packed.path}: {packed.nbytes:,} bytes")

    with load(artifact) as running:
        sampling = Sampling(temperature=0.7, seed=1)
        print("".join(running.generate("The with statement", max_tokens=20, sampling=sampling)))

    found = evaluate(artifact, [REPOSITORY / "docs" / "explanation" / "pipeline.md"], tokens=256, window=128)
    print("perplexity:", ", ".join(f"{mode} {value:.3f}" for mode, value in found["perplexity"].items() if value))


if __name__ == "__main__":
    defaults = [REPOSITORY / "recipes" / "demo", Path("demo.pi")]
    arguments = [Path(argument) for argument in sys.argv[1:]]
    main(*[*arguments, *defaults[len(arguments) :]])
