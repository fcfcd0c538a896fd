"""The model card of the folder that comes out."""

import re
from pathlib import Path
from typing import Any

_LICENSE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def license_of(base: Path) -> str:
    """The licence that the card of the base model names; `unknown` where it names none."""
    card = base / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front = _FRONT_MATTER.match(text)
    found = _LICENSE.search(front[1]) if front else None
    return found[1] if found else "unknown"


def model_card(record: dict[str, Any], base: Path) -> str:
    """The card, from the record of a run and the folder of its base model."""
    perplexity, recipe = record["perplexity"], record["recipe"]
    control = perplexity["control"]
    against = "the base model" if control is None else "the control"
    low, high = record["interval"] or (None, None)
    spread = "" if low is None else f" (95 % interval over windows: {low:+.2%} to {high:+.2%})"
    of_control = "–" if control is None else f"{control:.3f}"
    rows = "\n".join(
        f"| {n} | {sparsity:.1%} | {dead:.1%} |"
        for n, (sparsity, dead) in enumerate(zip(record["sparsity_by_layer"], record["dead_by_layer"], strict=True))
    )
    threshold = f" with threshold {record['threshold']:g}" if record["threshold"] else ""
    form = "" if record["stock"] else f"\n**Note**: {record['form']}.\n"
    return f"""---
license: {license_of(base)}
base_model: {recipe["model"]["path"]}
tags: [sparse, {record["activation"]}]
---

# {Path(recipe["model"]["path"]).name}, made sparse

The FFNs of {recipe["model"]["path"]} with the activation {record["activation"]}{threshold}, trained on for
{record["tokens"]:,} tokens ({record["steps"]:,} steps, {record["seconds"] / 60:.1f} minutes). Made by
`pi-compile sparsify`; `pi-compile init` and `build` make an artifact of it.
{form}
| | |
| --- | --- |
| sparsity, mean over layers | {record["sparsity"]:.1%} |
| neurons that never fired in {record["held_out"]["tokens"]:,} tokens | {record["dead"]:.1%} |
| perplexity of the base model | {perplexity["base"]:.3f} |
| perplexity of this model | {perplexity["model"]:.3f} |
| perplexity of the control: the base model, trained on the same tokens | {of_control} |
| perplexity against {against} | {record["perplexity_increase"]:+.2%}{spread} |

All figures are of the held-out text, {record["held_out"]["windows"]:,} windows that were not trained on.

| layer | sparsity | never fired |
| --- | --- | --- |
{rows}

Recipe: `SPARSIFY.toml`. Everything as plain values, with the hashes of the text: `sparsify.json`. Curves:
`training.html`.
"""
