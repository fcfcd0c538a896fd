"""What predictors without training read: a truncated SVD, a threshold calibrated for each neuron (arXiv 2603.14110).

nox -s bench -- calibrated CHECKPOINT --text FOLDER [--layers N,…] [--ranks N,…] [--seeds N,…]

A table of the bytes that layers read, in f16, over those of all their neurons, where predictors lose equal shares of
the FFN output's energy on text that they were not calibrated on (interpolated).
Shape letters: N samples, D model width, F neurons, R rank.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.torch_model import Predictor, WarmStarts, energy, second_moment, train
from pi_compile.torch_model import decoder as td

WINDOW, FIT, CALIBRATION, REPORT = 128, 80, 40, 40
"""Tokens of a window; windows that predictors are made from, that thresholds are calibrated on, and of the figures."""
CHARACTERS = 400_000
"""Read of each file."""
LOSSES = (1e-4, 4e-4, 1e-3, 4e-3, 1e-2, 2e-2)
"""Shares of the energy that thresholds are calibrated for."""
SHOWN = (1e-3, 1e-2)
Tensor = torch.Tensor


@dataclass(frozen=True)
class Layer:
    """FFN inputs of a layer, with the energies of its neurons."""

    checkpoint: Checkpoint
    w: td.NamedTensors
    fit_ND: Tensor
    calibration_ND: Tensor
    report_ND: Tensor

    def energies(self, x_ND: Tensor) -> Tensor:
        """(N, F) energies of the neurons."""
        return energy(td.neurons(self.checkpoint.decoder, self.w, x_ND), self.w)

    def predictors(self, rank: int, seed: int) -> dict[str, Predictor]:
        """Predictors of one rank, trained and not."""
        first, bias = self.w["ffn/first"], self.w.get("ffn/first_bias")
        moment = second_moment(self.fit_ND.split(4096), first.shape[1])
        warm = WarmStarts.of(first, bias, moment).at(rank)
        w, kept = first.double(), warm.up.double() @ warm.down.double()
        whole = ((w @ moment) * w).sum(1)
        missing = (whole - ((kept @ moment) * kept).sum(1)).clamp_min(whole * 1e-6).sqrt().float()
        with torch.enable_grad():
            (trained,) = train(
                [warm], self._batches(seed), self.checkpoint.decoder, self.w, steps=300, learning_rate=3e-3
            )
        return {
            "plain SVD": WarmStarts.of(first, bias, torch.eye(first.shape[1], dtype=torch.float64)).at(rank),
            "warm start": warm,
            "warm start ÷ its error": Predictor(warm.down, warm.up / missing[:, None], warm.bias / missing),
            "trained": trained,
        }

    def _batches(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from self.fit_ND[torch.randperm(len(self.fit_ND), generator=generator)].split(512)

    def bytes_at(self, predictor: Predictor, *, each: bool) -> list[float]:
        """Bytes over those of all neurons at each loss of `SHOWN`, with one threshold or one for each neuron."""
        calibration, report = self.energies(self.calibration_ND), self.energies(self.report_ND)
        scores, shown = predictor.scores(self.calibration_ND), predictor.scores(self.report_ND)
        (f, d), rank = self.w["ffn/first"].shape, predictor.up.shape[1]
        rest, found = self.w["ffn/rest"].shape[1], []
        for lost in LOSSES:
            threshold = each_threshold(scores, calibration, lost) if each else one_threshold(scores, calibration, lost)
            read = shown > threshold
            used = float((read & (report > 0)).float().mean())
            share = (rank * (d + f) + d * f * (float(read.float().mean()) + rest * used)) / ((1 + rest) * d * f)
            found.append((float((report * ~read).sum() / report.sum()), share))
        losses, shares = zip(*sorted(found), strict=True)
        return [float(np.interp(math.log(at), np.log(np.maximum(losses, 1e-9)), shares)) for at in SHOWN]


def one_threshold(scores: Tensor, energies: Tensor, lost: float) -> Tensor:
    """The highest threshold of the layer that loses at most a share of the energy."""
    fires = energies > 0
    ordered, order = scores[fires].sort()
    missed = energies[fires][order].double().cumsum(0)
    n = int((missed <= lost * missed[-1]).sum())
    return ordered[n - 1] if n else ordered[0] - 1


def each_threshold(scores: Tensor, energies: Tensor, lost: float) -> Tensor:
    """Thresholds of the neurons that read least at a loss: each gives up rows at the same price in energy."""
    ordered, order = scores.sort(0)
    missed, total = energies.gather(0, order).cumsum(0), float(energies.sum())
    spared = torch.arange(1, len(scores) + 1, dtype=torch.float32)[:, None]
    low, high = 0.0, 32.0
    for _ in range(11):
        price = (low + high) / 2
        _, at = _cuts(missed * (2.0**price / total) - spared)
        gone = torch.where(at >= 0, missed.gather(0, at.clamp_min(0)[None])[0], 0.0).sum() / total
        low, high = (price, high) if gone > lost else (low, price)
    best, at = _cuts(missed * (2.0**high / total) - spared)
    return torch.where(best < 0, ordered.gather(0, at.clamp_min(0)[None])[0], ordered[0] - 1)


def _cuts(cost_NF: Tensor) -> tuple[Tensor, Tensor]:
    """The least cost of each neuron, and after how many of its lowest scores it is; −1 for none."""
    best, at = cost_NF.min(0)
    return best, torch.where(best < 0, at, -1)


def layers(checkpoint: Checkpoint, text: Path, wanted: list[int], seed: int) -> Iterator[Layer]:
    """The wanted layers with their inputs: windows of the text, drawn at random."""
    d = checkpoint.decoder
    files = sorted(text.glob("*.txt"))
    read = "".join(file.read_text(encoding="utf-8", errors="replace")[:CHARACTERS] for file in files)
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(read, add_special_tokens=False).ids)
    ids = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    x = td.embed(d, td.global_weights(checkpoint, "cpu"), ids[order[: FIT + CALIBRATION + REPORT]])
    for layer in range(d.n_layers):
        w = td.layer_weights(checkpoint, layer, "cpu")
        residual, inputs = td.before_ffn(d, w, x)
        x = td.after_ffn(d, w, residual, td.ffn_output(w, td.neurons(d, w, inputs)))
        if layer in wanted:
            yield Layer(checkpoint, w, *(part.flatten(0, 1) for part in inputs.split([FIT, CALIBRATION, REPORT])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a folder with *.txt")
    parser.add_argument("--layers", default="0,2,5")
    parser.add_argument("--ranks", default="24,48")
    parser.add_argument("--seeds", default="0,1")
    args = parser.parse_args()
    wanted, ranks, seeds = ([int(n) for n in part.split(",")] for part in (args.layers, args.ranks, args.seeds))
    checkpoint, found = open_checkpoint(args.checkpoint), dict[tuple[int, str, str], list[list[float]]]()
    with torch.no_grad():
        for seed in seeds:
            for layer in layers(checkpoint, args.text, wanted, seed):
                for rank in ranks:
                    for name, predictor in layer.predictors(rank, seed).items():
                        for each in (False, True):
                            key = rank, name, "each neuron's" if each else "one"
                            found.setdefault(key, []).append(layer.bytes_at(predictor, each=each))
    print("| rank | scores | threshold | at 0.1 % | at 1 % |\n| --- | --- | --- | --- | --- |")
    for key, values in found.items():
        print("|", *(f"{cell} |" for cell in key), *(f"{value:.3f} |" for value in np.mean(values, 0)))


if __name__ == "__main__":
    main()
