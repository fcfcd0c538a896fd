"""Train: a predictor for each layer, of the size that pays, under one quality budget.

Layer by layer: the layer's FFN inputs on the fit and tune texts, a few candidate ranks around the one its sparsity and
skewness suggest, a few thresholds each, and for every candidate the bytes it reads and the error it leaves on the
tune text. Then one number, the price of an error, is raised until the perplexity on the tune text keeps the budget;
a layer takes the candidate, or the gate rung, that is cheapest at that price. What is reported is measured on a third
text. N tokens, D model width, F neurons.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr

from pi_compile import torch_decoder as td
from pi_compile.activations import ActivationProfile
from pi_compile.array_file import read_arrays, write_arrays
from pi_compile.checkpoint import Checkpoint
from pi_compile.hidden_states import HiddenStates
from pi_compile.predictor import Predictor, energy, second_moment, starting_rank, thresholds_for, train, warm_start
from pi_compile.rungs import exact_rung
from pi_compile.selection_quality import BATCH, Tally, Verdict, judge
from pi_compile.trained import Floats, LayerRow, Trained
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.schema import RUNGS
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import NotMetError

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]
LOST_SHARES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Shares of the neurons' energy that thresholds are tried for."""
RANK_FACTORS = (0.5, 1.0, 1.5)
TUNE_SHARE = 0.25
"""Part of the quality budget that may be spent on the tune text: other text costs more."""
LOWEST_PRICE, HIGHEST_PRICE, PRICES = -1.0, 8.0, 8
"""The price of an error is searched between these powers of ten, in so many halvings."""
CHUNK = 4096
"""Samples in memory at once."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How predictors are trained and chosen."""

    window: int = 512
    batch: int = 512
    steps: int = 400
    learning_rate: float = 3e-3
    perplexity_increase: float = 0.001
    """Largest relative increase of perplexity that all layers together may cost."""
    predictor_format: str = "f16"
    ffn_format: str = "f16"
    rungs: tuple[str, ...] = RUNGS
    """Rungs a layer may take. Without dense and gate the quality budget may be out of reach."""
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Three disjoint token streams."""

    fit: Tokens
    tune: Tokens
    report: Tokens


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run a layer, as measured on the tune text."""

    predictor: Predictor | None
    """As trained, with its threshold; packing rounds it to its format, as every measurement does."""
    row: LayerRow


def train_predictors(
    checkpoint: Checkpoint,
    profile: ActivationProfile,
    texts: Texts,
    spec: TrainSpec,
    *,
    scratch: Path,
    inputs: str,
    progress: Progress,
) -> Trained:
    """Fit, choose and report. `scratch` is this run's alone; finished layers of an earlier run with the same `inputs`
    are taken over. Raises NotMetError if the allowed rungs cannot keep the quality budget."""
    run = _Run(checkpoint, profile, texts, spec, scratch, progress)
    # A model that is not sparse has nothing to predict.
    sparse = checkpoint.decoder.sparse and "predicted" in spec.rungs
    layers = [run.layer(n) if sparse else [] for n in range(checkpoint.decoder.n_layers)]
    chosen, tune = _choose(run, layers)
    report_ids = run.ids(texts.report)
    dense = judge(checkpoint, report_ids, [None] * len(layers), device=spec.device)
    sparse_verdict = judge(checkpoint, report_ids, run.stored(chosen), device=spec.device, dense=dense)
    rows = [t.row(run.neuron, c.row.rung, c.row.rank) for t, c in zip(sparse_verdict.tallies, chosen, strict=True)]
    return Trained(
        rows=tuple(rows),
        predictors=tuple(_arrays(c.predictor) for c in chosen),
        perplexity={**tune, "report_dense": dense.perplexity, "report": sparse_verdict.perplexity},
        inputs=inputs,
    )


@dataclass(frozen=True)
class _Run:
    checkpoint: Checkpoint
    profile: ActivationProfile
    texts: Texts
    spec: TrainSpec
    scratch: Path
    progress: Progress

    @property
    def neuron(self) -> FfnBytes:
        return FfnBytes(self.checkpoint.decoder, self.spec.ffn_format, self.spec.predictor_format)

    def ids(self, tokens: Tokens) -> torch.Tensor:
        return td.windows(tokens, min(self.spec.window, self.checkpoint.decoder.context_length))

    def layer(self, n: int) -> list[Candidate]:
        """Candidates of layer n, trained now or taken from an earlier run."""
        file = self.scratch / f"layer-{n}.npz"
        if not file.exists():
            self._fit(n, file)
        # What follows the layers, a pass for each price, is shown as further steps.
        self.progress(n + 1, self.checkpoint.decoder.n_layers + PRICES)
        stored = read_arrays(file)
        found = []
        for item in json.loads(str(stored["candidates"])):
            down, up, bias = (torch.from_numpy(stored[f"{k}-{item['rank']}"]) for k in ("down", "up", "bias"))
            predictor = Predictor(down, up, bias).shifted(item.pop("threshold"))
            found.append(Candidate(predictor, LayerRow(**item)))
        return found

    def stored(self, chosen: list[Candidate]) -> list[Predictor | None]:
        """Their predictors as the artifact will hold them."""
        return [c.predictor and c.predictor.stored_as(self.spec.predictor_format) for c in chosen]

    def _fit(self, n: int, file: Path) -> None:
        w = td.layer_weights(self.checkpoint, n, self.spec.device)
        fit = self._advance("fit", self.texts.fit, n, w)
        tune = self._advance("tune", self.texts.tune, n, w)
        moment = second_moment(_blocks(fit, self.spec.device), self.checkpoint.decoder.d_model)
        arrays: dict[str, Any] = {}
        candidates: list[dict[str, Any]] = []
        for rank in self._ranks(n):
            start = warm_start(w["ffn/first"], w.get("ffn/first_bias"), moment, rank)
            batches = _batches(fit, self.spec.batch, self.spec.device, np.random.default_rng([self.spec.seed, n, rank]))
            with torch.enable_grad():
                trained = train(
                    start,
                    batches,
                    self.checkpoint.decoder,
                    w,
                    steps=self.spec.steps,
                    learning_rate=self.spec.learning_rate,
                )
            arrays |= {f"down-{rank}": trained.down, f"up-{rank}": trained.up, f"bias-{rank}": trained.bias}
            candidates += self._thresholds(trained.stored_as(self.spec.predictor_format), rank, n, w, tune)
        arrays = {name: array.numpy(force=True) for name, array in arrays.items()}
        write_arrays(file, {"candidates": np.array(json.dumps(candidates)), **arrays})

    def _ranks(self, n: int) -> list[int]:
        d = self.checkpoint.decoder
        full = min(d.d_model, d.d_ff)
        # A row of `up` is padded to whole cache lines: ranks in between would cost the same.
        step = min(FORMATS[self.spec.predictor_format].columns_per_line, full)
        top = float(self.profile.cumulative_curve(5)[n, 1])
        base = min(starting_rank(d, float(self.profile.density()[n]), top, step), full // step * step)
        wished = (max(step, round(base * factor / step) * step) for factor in RANK_FACTORS)
        return sorted({rank for rank in wished if rank <= full})

    def _advance(self, name: str, tokens: Tokens, n: int, w: td.Weights) -> zarr.Array[Any]:
        """Push a text's hidden states through layer n; its FFN inputs (N, D) as a chunked array on disk."""
        d, ids, states = self.checkpoint.decoder, self.ids(tokens), self._states(name, tokens)
        samples = zarr.create_array(
            self.scratch / f"{name}-inputs.zarr",
            shape=(ids.numel(), d.d_model),
            chunks=(min(CHUNK, ids.numel()), d.d_model),
            dtype="float32",
            compressors=None,
            overwrite=True,
        )
        ends = td.end_weights(self.checkpoint, self.spec.device) if n == 0 else {}
        before, after = states.before(n), states.before(n + 1)
        with torch.inference_mode():
            for start in range(0, len(ids), BATCH):
                rows = slice(start, start + BATCH)
                x = (
                    td.embed(d, ends, ids[rows].to(self.spec.device))
                    if n == 0
                    else torch.from_numpy(before[rows].copy()).to(self.spec.device)
                )
                x, inputs = td.before_ffn(d, w, x)
                flat = inputs.flatten(0, 1).numpy(force=True)
                samples[start * ids.shape[1] : start * ids.shape[1] + len(flat)] = flat
                y = td.ffn_output(w, td.neurons(d, w, inputs))
                after[rows] = td.after_ffn(d, w, x, y).numpy(force=True)
        return samples

    def _states(self, name: str, tokens: Tokens) -> HiddenStates:
        return HiddenStates(self.scratch, name, (*self.ids(tokens).shape, self.checkpoint.decoder.d_model))

    def _thresholds(
        self, p: Predictor, rank: int, n: int, w: td.Weights, tune: "zarr.Array[Any]"
    ) -> list[dict[str, Any]]:
        """Candidates of one trained predictor: a threshold for each share of energy that may be lost."""
        d, rest = self.checkpoint.decoder, w["ffn/rest"][:, -1]
        found: dict[float, dict[str, Any]] = {}
        with torch.inference_mode():
            blocks = list(_blocks(tune, self.spec.device))
            h = torch.cat([td.neurons(d, w, x) for x in blocks])
            scores = torch.cat([p.scores(x) for x in blocks])
            lost_by_neuron = energy(h, w)
            x = torch.from_numpy(self._states("tune", self.texts.tune).before(n + 1)).to(h.device)
            for threshold in thresholds_for(scores, lost_by_neuron, LOST_SHARES):
                predicted = scores > threshold
                tally = Tally()
                tally.add(h, predicted, torch.where(predicted, 0.0, h) @ rest, x)
                row = tally.row(self.neuron, "predicted", rank)
                found[threshold] = {**asdict(row), "threshold": threshold}
        return list(found.values())


def _choose(run: _Run, layers: list[list[Candidate]]) -> tuple[list[Candidate], dict[str, float]]:
    """The cheapest candidates that keep the budget on the tune text, found by raising the price of an error."""
    ids, device = run.ids(run.texts.tune), run.spec.device
    dense = judge(run.checkpoint, ids, [None] * len(layers), device=device)
    options = [_options(run, found, tally) for found, tally in zip(layers, dense.tallies, strict=True)]

    def verdict_on(chosen: list[Candidate]) -> Verdict:
        return judge(run.checkpoint, ids, run.stored(chosen), device=device, dense=dense)

    # At no price is there a better choice for quality than the least error in every layer.
    chosen = [min(found, key=lambda c: (c.row.error, c.row.ffn_bytes)) for found in options]
    verdict, most = verdict_on(chosen), TUNE_SHARE * run.spec.perplexity_increase
    if verdict.divergence > most:
        raise _not_met(run, chosen, verdict)
    low, high = LOWEST_PRICE, HIGHEST_PRICE
    for tried in range(PRICES):
        price = (low + high) / 2
        cheaper = [_cheapest(found, 10**price) for found in options]
        judged = verdict if cheaper == chosen else verdict_on(cheaper)
        if judged.divergence <= most:
            chosen, verdict, high = cheaper, judged, price
        else:
            low = price
        run.progress(len(layers) + tried + 1, len(layers) + PRICES)
    return chosen, {"tune_dense": dense.perplexity, "tune": verdict.perplexity, "tune_divergence": verdict.divergence}


def _options(run: _Run, found: list[Candidate], dense: Tally) -> list[Candidate]:
    """What a layer may take: an exact rung if the recipe allows one, and predictors that read less than gate."""
    exact = [rung for rung in (exact_rung(run.checkpoint.decoder), "dense") if rung in run.spec.rungs]
    if not exact and not found:
        raise NotMetError("only dense runs this model, which is not sparse", remedy="allow dense in [train] rungs")
    useful = [c for c in found if c.row.ffn_bytes < c.row.gate_bytes]
    # Without an exact rung a predictor has to do, even one that reads more.
    return [*useful, Candidate(None, dense.row(run.neuron, exact[0], None))] if exact else useful or found


def _cheapest(options: list[Candidate], price: float) -> Candidate:
    return min(options, key=lambda c: c.row.ffn_bytes / c.row.gate_bytes + price * c.row.error)


def _not_met(run: _Run, safest: list[Candidate], verdict: Verdict) -> NotMetError:
    worst = sorted(range(len(safest)), key=lambda n: -safest[n].row.error)[:3]
    return NotMetError(
        "the quality budget is out of reach with the rungs that [train] rungs allows",
        expected=f"at most {TUNE_SHARE * run.spec.perplexity_increase:.2e} nats of divergence on the tune text",
        found=f"{verdict.divergence:.2e} with the best predictors; layers {', '.join(map(str, worst))} lose most",
        remedy="allow gate in [train] rungs, or raise [quality] perplexity_increase",
    )


def _arrays(p: Predictor | None) -> tuple[Floats, Floats, Floats] | None:
    return None if p is None else (p.down.numpy(force=True), p.up.numpy(force=True), p.bias.numpy(force=True))


def _blocks(samples: "zarr.Array[Any]", device: str) -> Iterator[torch.Tensor]:
    for start in range(0, samples.shape[0], CHUNK):
        yield torch.from_numpy(np.asarray(samples[start : start + CHUNK])).to(device)


def _batches(samples: "zarr.Array[Any]", size: int, device: str, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Endless batches in random order; one chunk of the file is in memory at a time."""
    starts = np.arange(0, samples.shape[0], CHUNK)
    while True:
        for start in rng.permutation(starts):
            chunk = torch.from_numpy(np.asarray(samples[start : start + CHUNK])).to(device)
            yield from torch.split(chunk[torch.from_numpy(rng.permutation(len(chunk)))], size)
