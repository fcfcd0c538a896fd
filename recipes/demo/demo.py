"""The whole road on the bundled model: profile, train, place, pack, run; then what was done, and what it gains.

The bundled model is real and small: it shows the text and the fidelity. It lies in the processor's cache, so what
skipping gains is shown by a made-up model that does not.

python recipes/demo/demo.py [PROMPT]
"""

import sys
from pathlib import Path
from typing import Any

import gain
import numpy as np
from rich.console import Console
from rich.table import Table

from pi_compile.corpus.python_docs import HELD_OUT, split_documents
from pi_compile.evaluation.fidelity import evaluate
from pi_compile.pipeline.pipeline import Pipeline
from pi_runtime import Sampling, console, load
from pi_runtime.commands.warm_up import warm_up
from pi_runtime.errors import size

HERE = Path(__file__).parent
PROMPT = "The with statement is used to"
TOKENS = 8192


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else PROMPT
    pipeline = Pipeline(HERE.with_suffix(".toml"), "cpu", console.say, console.progress)
    with pipeline.worker:
        artifact = pipeline.store.folder / "demo.pi"
        packed = pipeline.pack(artifact)
    console.say(f"{artifact}: {', '.join(pipeline.ran) or 'up to date'}")

    console.say(f"\npi-run {artifact} --prompt {prompt!r}\n")
    with load(artifact) as model:
        warm_up(model)
        answer = model.generate(prompt, max_tokens=80, sampling=Sampling(temperature=0.7, top_k=40, seed=1))
        print(prompt, *answer, sep="", flush=True)

    text = pipeline.store.folder / "held-out.txt"
    text.write_text("\n\n".join(split_documents(HELD_OUT)), encoding="utf-8")
    with console.progress("scoring", "windows") as progress:
        found = evaluate(artifact, [text], None, tokens=TOKENS, window=512, progress=progress)
    Console().print(table(pipeline, packed, found))
    show_gain(pipeline.store.folder)


def table(pipeline: Pipeline, packed: dict[str, Any], found: dict[str, Any]) -> Table:
    """What was done, in a few rows."""
    profile, modes = pipeline.profile, list(found["tokens_per_s"])
    shown = Table(title="What was done", show_header=False, title_justify="left")
    rows = {
        "artifact": f"{size(packed['bytes'])}, sha256 {packed['sha256'][:16]}…",
        "neurons that fire": " ".join(f"{100 * d:.1f} %" for d in profile.density()) + " by layer",
        "hot share": f"{100 * np.mean(profile.cumulative_curve()[:, 20]):.0f} % of activations in the hottest fifth",
        "rungs": ", ".join(
            f"{row['rung']}" + (f" (rank {row['rank']})" if row["rank"] else "") for row in found["layers"]
        ),
        "perplexity": _by_mode(found["perplexity"], modes, "{:.4f}"),
        "FFN bytes / token": _by_mode(found["ffn_bytes_per_token"], modes, "{:,.0f}"),
        "same next token": _by_mode(found["agreement"], modes[1:], "{:.4f}") + " of dense",
        "placements stored": ", ".join(size(plan.vram_bytes) for plan in pipeline.plans),
    }
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def show_gain(folder: Path) -> None:
    """Measure the made-up model in `folder`, if there is room for it, and say what one sees."""
    made_up = size(gain.nbytes(gain.MODEL))
    if short := gain.shortage(gain.MODEL, folder):
        console.say(f"\nThe comparison on a made-up model of {made_up} is left out. It needs {short}.")
        return
    console.say(f"\nMaking a model of {made_up}, to decode with it in all modes; its file is deleted afterwards.\n")
    bandwidth, speeds = gain.measure(gain.MODEL, folder, (HERE / "tokenizer.json").read_bytes())
    Console().print(gain.table(gain.MODEL, bandwidth, speeds), "", gain.sentence(speeds), sep="\n")


def _by_mode(values: dict[str, float], modes: list[str], style: str) -> str:
    return ", ".join(f"{mode} {style.format(values[mode])}" for mode in modes)


if __name__ == "__main__":
    main()
