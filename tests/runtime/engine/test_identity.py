"""An engine gives every request the text that the model gives it alone, whatever else it serves."""

import random
from pathlib import Path
from typing import Any

import numba
import pytest
from support.long_form import marked_long
from support.requests import alone, assert_same, follow_ups, found_by, oracle, random_requests, together
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Engine, load
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.execution.pages import PAGE_POSITIONS

CONTEXT, THREADS = 128, int(numba.config.NUMBA_NUM_THREADS)
EXPERTS = {"n_experts": 4, "experts_per_token": 2, "d_ff": 40}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "f32 dense": ("f32", {}, {"mode": "dense"}),
    "f32 gate": ("f32", {}, {"mode": "gate"}),
    "f16 predicted": ("f16", {}, {"mode": "predicted"}),
    "q8 auto": ("q8", {}, {"mode": "auto"}),
    "q8 dense": ("q8", {}, {"mode": "dense"}),
    "q4 predicted": ("q4", {}, {"mode": "predicted"}),
    "q8 predicted, cache in q8": ("q8", {}, {"mode": "predicted", "cache_format": "q8"}),
    "q8 predicted, cache in q4": ("q8", {}, {"mode": "predicted", "cache_format": "q4"}),
    "q4 gate": ("q4", {}, {"mode": "gate"}),
    "f32 experts": ("f32", EXPERTS, {"mode": "auto"}),
    "q8 experts": ("q8", EXPERTS, {"mode": "predicted"}),
    "f16 thresholds": ("f16", {"activation": "silu"}, {"mode": "auto"}),
    "f32 stand-in": ("f32", {}, {"mode": "auto", "device": "stand-in"}),
    "q4 stand-in, dense": ("q4", {}, {"mode": "dense", "device": "stand-in"}),
}


def artifact(path: Path, fmt: str, fields: dict[str, Any]) -> Path:
    """Two layers; the first skips by a predictor or a threshold, and random tokens sometimes end a text."""
    decoder = small_decoder(context_length=CONTEXT, d_model=64, **fields)
    rank = None if decoder.activation == "silu" else 4
    layers = (
        Layer(rung="threshold", rank=None, threshold=0.2) if rank is None else Layer(rung="predicted", rank=rank),
        Layer(rung="dense" if rank is None else "gate"),
    )
    text = Text(prefix_ids=(), end_ids=(3, 77))
    plans = () if decoder.n_experts > 1 else (stored_plan((16, 8), 1 << 20, 20000, context=CONTEXT),)
    return random_artifact(
        path, decoder, format=fmt, ranks=[rank, None], layers=layers, text=text, scale=2.0, plans=plans
    )


@pytest.mark.parametrize(
    "case", marked_long(CASES, ["f32 dense", "q8 dense", "q8 experts", "q8 predicted, cache in q4"])
)
def test_the_same_text_in_any_company(case: str, tmp_path: Path, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, fields, options = CASES[case]
    path = artifact(tmp_path / "a.pi", fmt, fields)
    rounds, count = (10, 100) if long else (2, 12)
    compared = preempted = cached = guessed = accepted = 0
    for n in range(rounds):
        rng = random.Random(f"{case} {n}")
        requests = random_requests(rng, count, sampled=n % 2 == 1, context=CONTEXT, cancels=True)
        threads = rng.randint(1, min(2, THREADS))
        # In the short form another process has the other core; `disk/test_engine.py` has an engine on two threads.
        with load(path, threads=threads if long else 1, **options) as model:
            wanted = [alone(model, request) for request in requests]
            page = model.executor.new_pool(None).page_nbytes
            # As little as one full context takes, more, or no limit.
            budget = page * (CONTEXT // PAGE_POSITIONS + rng.randint(0, 3)) if rng.random() < 0.7 else None
            speculate: str | int = rng.choice(["auto", "off", 1, 4, 32])
            settings: dict[str, Any] = {"kv_budget": budget, "speculate": speculate}
            piece = rng.choice([None, rng.randint(1, 64)])
            with (
                monkeypatch.context() as patch,
                Engine(model, slots=rng.choice([1, 2, 4, 6, 8]), piece=piece, **settings) as engine,
            ):
                oracle(patch, requests, wanted, wrong=rng.choice([0, 0.1, 0.5]))
                for request, answer in zip(requests, wanted, strict=True):
                    generated = model.generate(request.prompt, **request.settings, speculate=speculate)
                    assert_same(request, answer, found_by(generated))
                found = together(engine, requests, rng)
                turns = follow_ups(rng, requests, wanted, CONTEXT)
                found += together(engine, turns, rng)
                # Whatever is still held is held for later requests, and nothing after the end.
                assert engine.stats.pages_used == engine.stats.pages_kept == len(set(engine._store.tree.pages))
                preempted, cached = preempted + engine.stats.preemptions, cached + engine.stats.cached_tokens
                guessed, accepted = guessed + engine.stats.guessed_tokens, accepted + engine.stats.accepted_tokens
            assert engine.stats.pages_used == 0
            wanted += [alone(model, request) for request in turns]
            for row in zip([*requests, *turns], wanted, found, strict=True):
                assert_same(*row)
                compared += 1
    print(
        f"{case}: {compared} answers the same; {preempted} preemptions, {cached} tokens of prompts reused, "
        f"{accepted} of {guessed} guesses right"
    )
