"""Predicted against published tokens per second: this design, PowerInfer's, and a split by layers.

    python tests/benchmarks/published.py [--format q4] [--solver greedy] [--svg docs/pictures/published.svg]

The rows are the measurements of PowerInfer (SOSP'24): in FP16 its figures 10 and 11 (OPT-6.7B: its first version), in
INT4 (q4) its figure 13. They are tokens per second of llama.cpp at 512 tokens of output, and PowerInfer's steady rate,
fitted to its three lengths of output. No constant belongs to a model: everything comes from the machine profiles, the
published activations beside the models' configs, and what stands here with its source.
"""

import argparse
import statistics
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from pi_compile.cost_model.processors import PICO
from pi_compile.cost_model.workload import PREDICTOR_SHARE, Workload
from pi_compile.files import bundled_folder
from pi_compile.machine.profile import Machine, read_machine
from pi_compile.placement.formulation import Problem
from pi_compile.placement.stage import place
from pi_compile.planning.activation_curves import TOKENS, curve_counts, find_curve
from pi_compile.planning.baselines import Baselines
from pi_compile.planning.model_config import find_planned
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.artifact.sizes import PARTS, parameters

DRIVER, BUFFERS = 2**29, 2**29
"""GPU memory that the driver takes, and a baseline's buffers: our assumptions. This design counts its own buffers."""
OUTPUT = 512
"""Longest output; the cache is half full on average over prompt and output."""
PREDICTOR_WEIGHTS = {
    "facebook/opt-13b": 880,
    "facebook/opt-66b": 3230,
    "SparseLLM/ReluFalcon-40B": 3630,
    "SparseLLM/ReluLLaMA-70B": 5660,
}
"""Millions, PowerInfer's table 6; for other models its mean share."""


@dataclass(frozen=True)
class Published:
    """One measurement: tokens per second of llama.cpp and of PowerInfer."""

    machine: str
    model: str
    prompt: int
    layer_split: float
    powerinfer: float


FP16 = (
    Published("pc-high", "facebook/opt-30b", 64, 1.6, 17.4),
    Published("pc-high", "facebook/opt-30b", 128, 1.6, 17.5),
    Published("pc-high", "facebook/opt-66b", 64, 0.6, 2.33),
    Published("pc-high", "facebook/opt-66b", 128, 0.6, 2.36),
    Published("pc-high", "SparseLLM/ReluFalcon-40B", 64, 1.1, 12.9),
    Published("pc-high", "SparseLLM/ReluFalcon-40B", 128, 1.1, 12.1),
    Published("pc-high", "SparseLLM/ReluLLaMA-70B", 64, 0.6, 2.0),
    Published("pc-high", "SparseLLM/ReluLLaMA-70B", 128, 0.6, 2.0),
    Published("pc-low", "PowerInfer/Bamboo-base-v0_1", 64, 7.3, 26.9),
    Published("pc-low", "PowerInfer/Bamboo-base-v0_1", 128, 7.2, 25.5),
    Published("pc-low", "facebook/opt-6.7b", 64, 7.4, 39.4),
    Published("pc-low", "facebook/opt-6.7b", 128, 6.9, 36.2),
    Published("pc-low", "facebook/opt-13b", 64, 1.9, 14.2),
    Published("pc-low", "facebook/opt-13b", 128, 1.9, 12.7),
    Published("pc-low", "facebook/opt-30b", 64, 0.6, 2.04),
    Published("pc-low", "facebook/opt-30b", 128, 0.6, 1.94),
    Published("pc-low", "SparseLLM/ReluLLaMA-13B", 64, 2.0, 10.1),
    Published("pc-low", "SparseLLM/ReluLLaMA-13B", 128, 2.0, 10.1),
)
"""Figures 10 and 11."""
INT4 = (
    Published("pc-high", "facebook/opt-66b", 64, 2.9, 12.1),
    Published("pc-high", "metaseq/OPT-175B", 64, 0.7, 1.92),
    Published("pc-high", "SparseLLM/ReluFalcon-40B", 64, 17.0, 29.3),
    Published("pc-high", "SparseLLM/ReluLLaMA-70B", 64, 3.2, 10.1),
    Published("pc-low", "facebook/opt-30b", 64, 3.8, 13.2),
    Published("pc-low", "facebook/opt-66b", 64, 1.1, 5.37),
    Published("pc-low", "SparseLLM/ReluFalcon-40B", 64, 2.0, 16.2),
    Published("pc-low", "SparseLLM/ReluLLaMA-70B", 64, 1.1, 4.22),
)
"""Figure 13. Its prompts' length is not stated; 64 is assumed."""
ROWS = {"f16": FP16, "q4": INT4}
NAMES = {"f16": "FP16", "q4": "INT4"}


@dataclass(frozen=True)
class Predicted:
    """The same three rates by the model of time."""

    ours: float
    layer_split: float
    powerinfer: float


def workload(model: str, prompt: int, fmt: str) -> Workload:
    """A published model as PowerInfer ran it: its predictors' sizes, and a cache of 16 bit numbers."""
    planned = find_planned(model, Path())
    decoder, activation = planned.decoder, planned.activation
    assert activation is not None
    counts = curve_counts(find_curve(activation.curve), decoder, activation.density).astype(np.int64)
    published = PREDICTOR_WEIGHTS.get(model)
    weights = published * 10**6 if published else int(parameters(decoder) * Fraction(PREDICTOR_SHARE))
    rank = weights // (decoder.n_layers * (decoder.d_model + decoder.d_ff))
    return Workload(
        decoder=decoder,
        formats=dict.fromkeys(PARTS, fmt),
        tokens=TOKENS,
        counts=counts,
        layers=(LayerWork(rung="predicted", rank=rank),) * decoder.n_layers,
        context=prompt + OUTPUT,
    )


def baselines(row: Published, fmt: str = "f16") -> tuple[float, float]:
    """(split by layers, PowerInfer) predicted for one row."""
    work, machine, vram = _given(row, fmt)
    left = vram - BUFFERS
    baselines = Baselines(work, machine)
    return baselines.layer_split(left).tokens_per_s, baselines.powerinfer(left).tokens_per_s


def predict(row: Published, fmt: str = "f16", solver: str = "exact") -> Predicted:
    """All three rates for one row."""
    work, machine, vram = _given(row, fmt)
    ours = place(Problem.of(work, machine), vram, int(machine.cpu.ram_gib * 2**30), solver=solver)
    return Predicted(PICO / ours.time.total, *baselines(row, fmt))


def _given(row: Published, fmt: str) -> tuple[Workload, Machine, int]:
    machine = read_machine(bundled_folder("profiles/machines") / f"{row.machine}.toml")
    assert machine.gpu is not None
    return workload(row.model, row.prompt, fmt), machine, int(machine.gpu.vram_gib * 2**30) - DRIVER


def errors(pairs: list[tuple[float, float]]) -> list[float]:
    """|predicted ÷ published − 1|."""
    return [abs(predicted / published - 1) for predicted, published in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=tuple(ROWS), default="f16", help="number format of the weights")
    parser.add_argument("--solver", choices=("exact", "greedy"), default="exact", help="of this design's placement")
    parser.add_argument("--svg", type=Path, help="draw the table")
    args = parser.parse_args()
    rows = ROWS[args.format]
    found = [predict(row, args.format, args.solver) for row in rows]
    print(
        "| machine | model | prompt | layer split | predicted | | PowerInfer | predicted | | this design, predicted |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row, p in zip(rows, found, strict=True):
        split, power = p.layer_split / row.layer_split - 1, p.powerinfer / row.powerinfer - 1
        print(
            f"| {row.machine} | {row.model.split('/')[1]} | {row.prompt} | {row.layer_split} | {p.layer_split:.2f} "
            f"| {split:+.0%} | {row.powerinfer} | {p.powerinfer:.1f} | {power:+.0%} | {p.ours:.1f} |"
        )
    print(f"\n{NAMES[args.format]}")
    _summarise("layer split", [(p.layer_split, r.layer_split) for p, r in zip(found, rows, strict=True)])
    _summarise("PowerInfer", [(p.powerinfer, r.powerinfer) for p, r in zip(found, rows, strict=True)])
    if args.svg:
        draw(found, args.format, args.svg)


def _summarise(name: str, pairs: list[tuple[float, float]]) -> None:
    ratios = [predicted / published for predicted, published in pairs]
    median = statistics.median(errors(pairs))
    print(f"{name}: median error {median:.1%}, predicted ÷ published {min(ratios):.2f} to {max(ratios):.2f}")


def draw(found: list[Predicted], fmt: str, path: Path) -> None:
    """One group of bars a row: published rates hollow, predicted ones filled."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "pi", "svg.fonttype": "none", "font.size": 9}
    import matplotlib.pyplot as plt

    kept = [(row, p) for row, p in zip(ROWS[fmt], found, strict=True) if row.prompt == 64]
    figure, axis = plt.subplots(figsize=(9.2, 3.6))
    bars = (
        ("layer split, published", "#777", False, [r.layer_split for r, _ in kept]),
        ("layer split, predicted", "#777", True, [p.layer_split for _, p in kept]),
        ("PowerInfer, published", "#2a6f97", False, [r.powerinfer for r, _ in kept]),
        ("PowerInfer, predicted", "#2a6f97", True, [p.powerinfer for _, p in kept]),
        ("this design, predicted", "#c1121f", True, [p.ours for _, p in kept]),
    )
    for n, (label, colour, filled, values) in enumerate(bars):
        places = [i + (n - 2) * 0.16 for i in range(len(kept))]
        axis.bar(places, values, 0.14, label=label, edgecolor=colour, color=colour if filled else "white")
    axis.set_yscale("log")
    axis.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axis.set_ylabel(f"tokens per second, {NAMES[fmt]}")
    names = [f"{r.model.split('/')[1].replace('-base-v0_1', '')}\n{r.machine}" for r, _ in kept]
    axis.set_xticks(range(len(kept)), names, fontsize=7)
    axis.grid(axis="y", color="#ddd", lw=0.5)
    axis.set_axisbelow(True)
    axis.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
