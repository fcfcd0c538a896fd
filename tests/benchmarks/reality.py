"""Predicted against measured time of a token: the model of time held against this machine, CPU only.

    nox -s bench -- reality [--quick] [--json PATH]

Synthetic sparse models (recipes/demo/sparse_model) of two sizes, three formats and two densities, each on all rungs.
The rates that a prediction starts from are those of `pi-compile machine`, measured in turn with the tokens. How often a
neuron fires is what the generator measured of the model, not what the timed tokens did. Nothing is fitted. Then, for
one model, the order of placements on the stand-in.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from against_reality.decoding import Decoding
from against_reality.order import on_one_bus, pairs_in_order
from against_reality.rates import Rates
from sparse_model import Activity, Spec, build
from sparse_model.activity import TOKENS
from support.synthetic import byte_tokenizer, small_decoder, stored_plan

from pi_compile.cost_model.processors import CPU
from pi_compile.cost_model.token_time import TokenTime, costs_of, token_time
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Machine
from pi_compile.results.activation_profile import MILLION, LayerWork
from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.execution.host_executor import in_memory
from pi_runtime.execution.plan_choice import allocation
from pi_runtime.kernels.benchmarks import most_threads

# (layers, d_model, d_ff, heads, heads of keys and values)
SIZES = {"0.6 B": (12, 1536, 6144, 24, 24), "0.9 B": (12, 2048, 8192, 32, 8)}
FORMATS, DENSITIES = ("f16", "q8", "q4"), (0.1, 0.3)
MODES = ("dense", "gate", "predicted")
PREDICTOR, RANK = "q4", 384
POSITIONS = 256
"""Tokens before those that are timed."""
SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of each layer's neurons that the stand-in has in the placements that are ordered."""
LARGEST_DISTANCE, LARGEST_SURPLUS = 0.01, 0.3
"""Of the gate rung's logits to the dense ones', and of the rows read to those expected; relative."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One artifact on one rung: medians over the rounds."""

    size: str
    format: str
    density: float
    rung: str
    predicted_ms: float
    measured_ms: float
    ratio: float
    """Predicted ÷ measured, within a round."""

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def spec(size: str, fmt: str, density: float) -> Spec:
    layers, d_model, d_ff, heads, kv_heads = SIZES[size]
    decoder = small_decoder(
        n_layers=layers, d_model=d_model, d_ff=d_ff, n_heads=heads, n_kv_heads=kv_heads, head_dim=d_model // heads,
        vocab_size=32000, context_length=2 * POSITIONS,
    )  # fmt: skip
    return Spec(
        decoder=decoder, formats={**dict.fromkeys(PARTS, fmt), "predictor": PREDICTOR}, density=density, rank=RANK
    )


def workload(s: Spec, activity: Activity, mode: str) -> Workload:
    """What the artifact asks of a machine on one rung, by the generator's counts."""
    read_ppm = round(activity.read_over_active * MILLION)
    how = LayerWork(rung=mode, rank=s.rank if mode == "predicted" else None, read_ppm=read_ppm)
    return Workload(
        decoder=s.decoder,
        formats=s.formats,
        tokens=TOKENS,
        counts=activity.counts_LF,
        layers=(how,) * s.decoder.n_layers,
        context=2 * POSITIONS,  # half full
    )


def time_of(work: Workload, machine: Machine, cuts: Sequence[int] | None = None) -> TokenTime:
    """Everything on the CPU but the neurons before the cuts."""
    layers = work.decoder.n_layers
    return token_time(costs_of(work, machine), (CPU,) * layers, cuts or (0,) * layers, CPU, CPU)


def check(decoding: Decoding, activity: Activity) -> None:
    """Gate computes what dense does, and as many rows are read as expected. Raises RuntimeError otherwise."""
    kept = []
    for token in range(8):
        wanted_V, _ = decoding.token("dense", token)
        found_V, rows_L2 = decoding.token("gate", token)
        distance = float(np.linalg.norm(found_V - wanted_V) / np.linalg.norm(wanted_V))
        if not distance <= LARGEST_DISTANCE:
            raise RuntimeError(f"wrong result: relative distance {distance:.1e}, at most {LARGEST_DISTANCE} expected")
        kept.append(rows_L2[:, 1].sum())
    expected = activity.counts_LF.sum() / TOKENS
    if not abs(np.mean(kept) / expected - 1) <= LARGEST_SURPLUS:
        raise RuntimeError(f"{np.mean(kept):.0f} neurons fire, {expected:.0f} expected")


def rows(size: str, fmt: str, density: float, path: Path, rounds: int) -> Iterator[Row]:
    """Rates and tokens in turn; a prediction is the mean of those by the rates before and after its tokens."""
    s = spec(size, fmt, density)
    activity = build(s, {1.0: path}, byte_tokenizer())[1.0]
    decoding = Decoding({mode: load(path, mode=mode, context=2 * POSITIONS) for mode in MODES}, POSITIONS)
    check(decoding, activity)
    rates, works = Rates(s), {mode: workload(s, activity, mode) for mode in MODES}
    samples: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for n in range(rounds + 1):
        before = rates.machine(most_threads())
        for mode in MODES if n % 2 else MODES[::-1]:
            measured = decoding.seconds(mode, 4)
            after = rates.machine(most_threads())
            if n:  # the first round faults pages in
                samples[mode].append(
                    (statistics.mean(time_of(works[mode], m).total / 1e12 for m in (before, after)), measured)
                )
            before = after
    for mode, found in samples.items():
        predicted, measured, ratio = (
            statistics.median(values) for values in zip(*((p, m, p / m) for p, m in found), strict=True)
        )
        yield Row(
            size=size, format=fmt, density=density, rung=mode, predicted_ms=predicted * 1e3, measured_ms=measured * 1e3,
            ratio=ratio,
        )  # fmt: skip
    decoding.close()


def order(path: Path, rounds: int) -> None:
    """Placements of one artifact on the stand-in: is the one predicted to be faster also measured to be?

    Both sides have one thread and share one memory.
    """
    s = spec("0.6 B", "q8", 0.3)
    activity = build(s, {1.0: path}, byte_tokenizer())[1.0]
    d, work, rates = s.decoder, workload(s, activity, "gate"), Rates(s)
    cuts = {f"{share:.0%} of each layer": (round(d.d_ff * share),) * d.n_layers for share in SHARES}
    cuts["half of the layers"] = (d.d_ff,) * (d.n_layers // 2) + (0,) * (d.n_layers // 2)
    models = {
        name: _on_the_stand_in(Artifact.open(path), stored_plan(layer_cuts, 1, 1)) for name, layer_cuts in cuts.items()
    }
    decoding = Decoding(models, POSITIONS)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in cuts}
    for n in range(rounds + 1):
        one, two = rates.stand_in(1), rates.stand_in(2)
        for name, layer_cuts in cuts.items():
            measured = decoding.seconds(name, 4)
            if n:
                predicted = on_one_bus(time_of(work, one, layer_cuts), time_of(work, two, layer_cuts)) / 1e12
                samples[name].append((predicted, measured))
    medians = {name: tuple(statistics.median(v) for v in zip(*found, strict=True)) for name, found in samples.items()}
    print(f"\nstand-in, {s.decoder.n_layers} layers, q8, gate\n{'placement':22}{'predicted ms':>13}{'measured ms':>12}")
    for name, (predicted, measured) in medians.items():
        print(f"{name:22}{predicted * 1e3:13.2f}{measured * 1e3:12.2f}")
    right, pairs = pairs_in_order(list(medians.values()))
    print(f"pairs in the order predicted: {right} of {pairs}", flush=True)
    decoding.close()


def _on_the_stand_in(artifact: Artifact, plan: Plan) -> Model:
    taken = allocation(artifact.manifest, plan, 2 * POSITIONS, 0)
    return Model(artifact, "gate", in_memory(artifact, "gate", taken.context, 2, taken=taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", help="like 'q4': artifacts of one format")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--folder", type=Path, help="for the artifacts, 2.5 GB; default: a temporary one")
    a = parser.parse_args()
    found: list[Row] = []
    rounds = 2 if a.quick else 4
    print(f"{'size':7}{'format':7}{'density':>7}  {'rung':10}{'predicted ms':>13}{'measured ms':>12}{'ratio':>7}")
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        path = Path(name) / "model.pi"
        for size, fmt, density in product(SIZES, FORMATS, DENSITIES):
            if a.only and fmt != a.only:
                continue
            for row in rows(size, fmt, density, path, rounds):
                figures = f"{row.predicted_ms:13.2f}{row.measured_ms:12.2f}{row.ratio:7.2f}"
                print(f"{row.size:7}{row.format:7}{row.density:7.0%}  {row.rung:10}{figures}", flush=True)
                found.append(row)
        errors = [row.error for row in found]
        print(f"{len(found)} figures of {len(found) // len(MODES)} artifacts:", end=" ")
        print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}", flush=True)
        if a.json:
            a.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
        order(path, rounds)


if __name__ == "__main__":
    main()
