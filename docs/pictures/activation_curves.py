"""Draw `docs/pictures/activation-curves.svg`: share of activations that the hottest neurons have, one panel a model.

    python docs/pictures/activation_curves.py NAME=PROFILE.npz… [NAME=CURVES.csv] -o docs/pictures/activation-curves.svg

The committed figure: "demo model"=profiles/activations/demo.npz, the counts of a small ReLU model by
`pi-compile profile RECIPE --export`, and Bamboo-7B's curves as numbers read off the vector figure of its authors'
public README.

Needs matplotlib (the `report` extra).

A `.npz` is an activation profile (`pi-compile profile RECIPE --export`): one line a layer. A `.csv` holds published
curves: a column of fractions, then a column a line.
"""

import argparse
import csv
from pathlib import Path

import matplotlib as mpl
import numpy as np

from pi_compile.results.activation_profile import ActivationProfile

mpl.use("svg")
mpl.rcParams |= {"svg.hashsalt": "pi", "svg.fonttype": "none", "font.size": 9}


def curves(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(fraction of neurons, share of activations) of each line, both in percent."""
    if path.suffix == ".npz":
        return [(np.linspace(0, 100, 101), 100 * curve) for curve in ActivationProfile.load(path).cumulative_curve()]
    with path.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    table = np.array([[float(v) for v in row] for row in rows[1:]])
    scale = 100 if table[:, 0].max() <= 1 else 1
    return [(scale * table[:, 0], scale * column) for column in table[:, 1:].T]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("panels", nargs="+", metavar="NAME=FILE")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib.pyplot as plt  # noqa: PLC0415  after the backend is chosen

    figure, axes = plt.subplots(1, len(args.panels), figsize=(3.1 * len(args.panels), 2.9), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], args.panels, strict=True):
        name, _, file = panel.partition("=")
        lines = curves(Path(file))
        for n, (x, y) in enumerate(lines):
            axis.plot(x, y, color=plt.cm.viridis(n / max(len(lines) - 1, 1) * 0.9), lw=1.1)
        axis.plot([0, 100], [0, 100], color="#999", lw=0.7, ls=":")
        axis.set(title=name, xlabel="hottest neurons, %", xlim=(0, 100), ylim=(0, 101))
        axis.grid(color="#ddd", lw=0.5)
    axes[0][0].set_ylabel("share of activations, %")
    figure.tight_layout()
    figure.savefig(args.output, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
