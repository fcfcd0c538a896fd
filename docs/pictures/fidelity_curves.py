"""Draw curves from the numbers that `tests/benchmarks/fidelity.py --figures` keeps.

    python docs/pictures/fidelity_curves.py NAME=FIGURES.json… -o fidelity.svg

One row a model: divergence of the next token against bytes read, a line for each set of rungs; and, of the predictors
that were tried, the bytes they read and the energy they lose, a line a rank. Needs matplotlib.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams |= {"svg.hashsalt": "pi", "svg.fonttype": "none", "font.size": 9}


def draw_curves(axis: Any, curves: dict[str, list[dict[str, Any]]]) -> None:
    for name, points in curves.items():
        x = [p["ffn_bytes_over_gate"] for p in points]
        axis.plot(x, [max(p["report_divergence"], 1e-7) for p in points], "o-", ms=3, lw=1.1, label=name)
    axis.set(xlabel="FFN bytes read ÷ gate", ylabel="divergence from dense, nats", yscale="log")
    axis.legend(frameon=False)


def draw_ranks(axis: Any, predictors: list[dict[str, Any]]) -> None:
    """The middle layer's, in f16."""
    ways = [p for p in predictors if p["rung"] == "predicted" and p["format"] == "f16" and p["trained"]]
    layer = sorted({p["layer"] for p in ways})[len({p["layer"] for p in ways}) // 2]
    ways = [p for p in ways if p["layer"] == layer]
    for rank in sorted({p["rank"] for p in ways}):
        points = sorted(
            (sum(v for k, v in p["reads"].items() if k != "rung"), p["error"]) for p in ways if p["rank"] == rank
        )
        axis.plot([x / 1000 for x, _ in points], [y for _, y in points], "o-", ms=3, lw=1.1, label=f"rank {rank}")
    axis.set(xlabel=f"bytes a token, layer {layer}, thousands", ylabel="energy left out ÷ state", yscale="log")
    axis.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", metavar="NAME=FILE")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib.pyplot as plt  # noqa: PLC0415  after the backend is chosen

    figure, axes = plt.subplots(len(args.models), 2, figsize=(7.4, 2.9 * len(args.models)), squeeze=False)
    for row, model in zip(axes, args.models, strict=True):
        name, _, file = model.partition("=")
        figures = json.loads(Path(file).read_text(encoding="utf-8"))
        draw_curves(row[0], figures["curves"])
        if any(p["rung"] == "predicted" for p in figures["predictors"]):
            draw_ranks(row[1], figures["predictors"])
        else:
            row[1].axis("off")
        row[0].set_title(name)
        for axis in row:
            axis.grid(color="#ddd", lw=0.5)
    figure.tight_layout()
    figure.savefig(args.output, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
