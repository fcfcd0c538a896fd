"""Two sides at once: same result as one side, truly at the same time, faults surface."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import FACTS, random_artifact, small_decoder, stored_plan

from pi_runtime import load
from pi_runtime.artifact.schema import Layer, Plan
from pi_runtime.engine.model import Model
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution.cut import StandIn
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.host_executor import HostExecutor
from pi_runtime.kernels.ffn import memory

BESIDE = {name: facts for name, facts in FACTS.items() if "inner_norms" not in facts}
"""Decoders whose FFNs may be computed in two places."""
CUTS = {"inside": (128, 64), "one-sided": (0, 200), "mixed": (192, 0)}


def plans(cuts: tuple[int, ...]) -> list[Plan]:
    return [stored_plan(cuts, 1000, 900)]


@pytest.fixture
def artifact(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    decoder = small_decoder(**{"d_ff": 200, **getattr(request, "param", {})})
    return random_artifact(tmp_path / "a.pi", decoder, ranks=[7] * decoder.n_layers, plans=plans(CUTS["inside"]))


def decode(model: Model, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cache = model.new_cache()
    steps = [model.decode(int(token), cache) for token in ids]
    return np.stack([logits for logits, _ in steps]), np.stack([rows for _, rows in steps])


def test_it_may_have_a_cache_in_q8(artifact: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 40)
    options = {"mode": "predicted", "cache_format": "q8"}
    with load(artifact, **options) as one, load(artifact, **options, device="stand-in") as two:
        np.testing.assert_allclose(decode(two, ids)[0], decode(one, ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["dense", "gate", "predicted"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_two_sides_give_what_one_gives(family: str, cuts: tuple[int, ...], mode: str, tmp_path: Path) -> None:
    decoder = small_decoder(family, d_ff=200)
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[7] * decoder.n_layers, plans=plans(cuts))
    ids = np.random.default_rng(0).integers(0, decoder.vocab_size, 20)
    with load(path, mode=mode) as one, load(path, mode=mode, device="stand-in") as two:
        (wanted, wanted_rows), (found, rows) = decode(one, ids), decode(two, ids)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    np.testing.assert_array_equal(rows, wanted_rows)


@pytest.mark.parametrize("facts", BESIDE.values(), ids=BESIDE)
def test_two_sides_give_what_one_gives_whatever_the_decoder(facts: dict[str, Any], tmp_path: Path) -> None:
    decoder = small_decoder(d_ff=200, **facts)
    some = (128, 64, 0) if decoder.n_experts == 1 else (128, 0, 64, 0, 200, 64, 30, 200, 5, 0)
    cuts = some[: decoder.n_layers * decoder.n_experts]
    plan = stored_plan(cuts, 1000, 900, attention=("cpu",) * decoder.n_layers)
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[7] * decoder.n_layers, plans=[plan])
    ids = np.random.default_rng(0).integers(0, decoder.vocab_size, 20)
    with load(path) as one, load(path, device="stand-in") as two:
        (wanted, wanted_rows), (found, rows) = decode(one, ids), decode(two, ids)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    np.testing.assert_array_equal(rows, wanted_rows)


def test_a_norm_over_both_sides_is_refused(tmp_path: Path) -> None:
    """Its square sum would have to be known to both sides before either has the factors."""
    decoder = small_decoder(d_ff=200, inner_norms=True)
    path = random_artifact(tmp_path / "a.pi", decoder, plans=[stored_plan((128, 64), 1000, 900)])
    for budget in (None, 1 << 32):
        with pytest.raises(DoesNotFitError, match="inner_norms"):
            load(path, device="stand-in", ram_budget=budget)


@pytest.mark.parametrize("fmt", ["f32", "q4"])
@pytest.mark.parametrize("facts", [{}, {"n_experts": 3, "experts_per_token": 2}], ids=["one", "experts"])
def test_a_block_has_the_bits_of_its_tokens_one_by_one(facts: dict[str, Any], fmt: str, tmp_path: Path) -> None:
    """Also beside other sequences, and where there are more tokens than a worker takes at a time."""
    cuts = (128, 64) if not facts else (128, 0, 64, 0, 200, 64)
    decoder = small_decoder(d_ff=200, **facts)
    path = random_artifact(
        tmp_path / "a.pi",
        decoder,
        format=fmt,
        ranks=[7] * decoder.n_layers,
        plans=[stored_plan(cuts, 1000, 900, attention=("cpu", "cpu"))],
    )
    blocks_ST = [np.random.default_rng(n).integers(0, decoder.vocab_size, count) for n, count in enumerate((21, 4, 1))]
    with load(path, device="stand-in") as model:
        wanted = [decode(model, ids)[0] for ids in blocks_ST]
        caches = [model.new_cache() for _ in blocks_ST]
        steps = [
            SequenceStep(cache=cache, tokens=ids, select=True, logits="all")
            for cache, ids in zip(caches, blocks_ST, strict=True)
        ]
        found = model.executor.step(steps)
        for block, alone in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(block.logits_TV, alone)


RUNGS = (Layer(rung="threshold", threshold=0.1), Layer(rung="predicted", rank=7))


@pytest.mark.parametrize("layer", RUNGS, ids=lambda layer: layer.rung)
def test_two_sides_share_the_experts(layer: Layer, tmp_path: Path) -> None:
    """Cuts of one layer: inside, none, all, inside, none; so a token may be wholly on one side."""
    decoder = small_decoder(d_ff=70, n_layers=1, n_experts=5, experts_per_token=2, activation="silu")
    path = random_artifact(
        tmp_path / "a.pi", decoder, ranks=[layer.rank], layers=(layer,),
        plans=[stored_plan((30, 0, 70, 64, 0), 1000, 900, attention=("cpu",))],
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, decoder.vocab_size, 40)
    with load(path) as one, load(path, device="stand-in") as two:
        (wanted, wanted_rows), (found, rows) = decode(one, ids), decode(two, ids)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    np.testing.assert_array_equal(rows, wanted_rows)


def sums_of(model: Model, side: str) -> tuple[Any, str]:
    """Who sums the neurons of a side, and by which method."""
    assert isinstance(model.executor, HostExecutor)
    assert isinstance(model.executor.cut, StandIn)
    return (model.executor.cut.hot, "run") if side == "hot" else (model.executor.rows, "sum_few")


def test_both_sides_are_inside_the_same_ffn_at_once(artifact: Path) -> None:
    with load(artifact, mode="gate", device="stand-in") as model:
        barrier, seen = threading.Barrier(2, timeout=30), list[int]()

        def meeting(whole: Any) -> Any:
            def run(*arguments: Any) -> None:
                barrier.wait()  # broken, and so an error, unless the other side comes in too
                whole(*arguments)
                tally_13 = next(a for a in arguments if getattr(a, "shape", None) == (1, 3))
                seen.append(int(tally_13[0, memory.KEPT]))

            return run

        for side in ("hot", "cold"):
            owner, name = sums_of(model, side)
            setattr(owner, name, meeting(getattr(owner, name)))
        model.decode(5, model.new_cache())
    assert len(seen) == 2 * model.manifest.decoder.n_layers
    assert all(kept > 0 for kept in seen)


@pytest.mark.parametrize("broken", ["hot", "cold"])
def test_a_fault_on_either_side_surfaces_and_the_model_still_works(broken: str, artifact: Path) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError(f"{broken} side broke")

    with load(artifact, device="stand-in") as model:
        owner, name = sums_of(model, broken)
        setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match=f"{broken} side broke"):
            model.decode(5, model.new_cache())
        delattr(owner, name)
        model.decode(5, model.new_cache())
    assert not [t for t in threading.enumerate() if t.name.startswith("pi-stand-in")]
