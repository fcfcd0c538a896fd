"""A layer behind the last that drafts tokens: what it computes is its definition, and it changes no text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.guess_heads import drafted_behind
from support.requests import found_by
from support.synthetic import FACTS, random_artifact, small_decoder, small_guess_head, stored_plan

from pi_runtime import Engine, Sampling, load
from pi_runtime.artifact.checks import contradictions
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan, Text
from pi_runtime.artifact.verification import verify
from pi_runtime.engine.loading import NO_HEAD
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.plan_layout import placed_arrays

LATENTS = "latents of keys and of queries, experts of groups by their largest"
SHARED = "shared experts, dense layers, a bias for choosing in groups"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"activation": "silu", "window": 9, "windowed_layers": (0, 1)},
    "sparse, tied": {"tied_head": True},
    "latents": FACTS[LATENTS] | {"activation": "silu"},
    "shared experts": FACTS[SHARED] | {"activation": "silu", "qk_norm": True},
}


def artifact(path: Path, kind: str, fmt: str = "f32", **fields: Any) -> Path:
    decoder = small_decoder(context_length=128, **KINDS[kind])
    text = Text(prefix_ids=(), end_ids=(3, 77))
    return random_artifact(path, decoder, format=fmt, guess_layers=1, scale=2.0, text=text, **fields)


def plan(experts: int) -> Plan:
    return stored_plan((8,) * 2 * experts, 1 << 24, 20000, context=128, attention=("cpu", "cpu"))


@pytest.mark.parametrize(
    ("kind", "fmt"), [*((kind, "f32") for kind in KINDS), ("latents", "q8"), ("shared experts", "q4")]
)
def test_the_layer_is_its_definition(kind: str, fmt: str, tmp_path: Path) -> None:
    path, tokens = artifact(tmp_path / "a.pi", kind, fmt), [n % 250 for n in range(3, 80)]
    verify(path)
    with load(path, device="cpu") as model, Artifact.open(path) as file:
        assert "guess_head" in file.manifest.features
        runner = model.executor.guess_head
        assert runner is not None
        cache, parts = model.new_cache(), []
        for part in (tokens[:64], tokens[64:-1]):
            (result,) = model.executor.step(
                [SequenceStep(cache=cache, tokens=np.array(part), select=True, states=model.manifest.guess_states)]
            )
            assert result.states_TC is not None
            parts.append(result.states_TC)
        states_TD = np.concatenate(parts)
        kept = states_TD.copy()
        wanted, logits = drafted_behind(file, tokens, states_TD, 3)
        cache = runner.new_cache()
        y_TD, logits_V = runner.draft(cache, tokens[1:], states_TD, states_TD[:0])
        assert np.array_equal(states_TD, kept)
        for n in range(3):
            rounding = 1e-4 if fmt == "f32" else 0.1
            assert np.abs(logits_V - logits[n]).max() < rounding * np.abs(logits[n]).max()
            y_TD, logits_V = runner.draft(cache, [wanted[n]], None, y_TD)


@pytest.mark.parametrize("device", ["cpu", "stand-in"])
@pytest.mark.parametrize("kind", ["latents", "shared experts"])
def test_the_same_text(tmp_path: Path, kind: str, device: str) -> None:
    experts = KINDS[kind]["n_experts"]
    plans = (plan(experts),)
    path = artifact(tmp_path / "a.pi", kind, "f16", plans=plans if device == "stand-in" else ())
    prompts = [[n, 200, 7] for n in range(4)]
    settings: dict[str, Any] = {"max_tokens": 40, "sampling": Sampling(temperature=1.0, seed=1)}
    with load(path, device=device) as model:
        wanted = [found_by(model.generate(prompt, speculate="off", **settings)) for prompt in prompts]
        generated = [model.generate(prompt, speculate=4, **settings) for prompt in prompts]
        assert [found_by(one) for one in generated] == wanted
        assert sum(one.stats.head_guessed_tokens for one in generated) > 40
        with Engine(model, slots=3, speculate="auto") as engine:
            streams = [engine.generate(prompt, **settings) for prompt in prompts]
            assert [found_by(stream) for stream in streams] == wanted


def test_it_is_on_the_cpu_alone(tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.pi", "shared experts", plans=(plan(5),))
    with Artifact.open(path) as file:
        assert not [a.name for a in placed_arrays(file.manifest, file.manifest.plans[0]) if a.name.startswith("guess")]
    with load(path, device="cpu") as model:
        wanted = found_by(model.generate([5, 6], max_tokens=9, sampling=Sampling()))
    with load(path, ram_budget=1 << 30) as model:
        assert model.notice == NO_HEAD
        assert found_by(model.generate([5, 6], max_tokens=9, sampling=Sampling(), speculate=4)) == wanted


@pytest.mark.parametrize(
    ("fields", "family"), [({"guess_layers": 2}, "llama"), ({"guess": True}, "llama"), ({}, "opt")]
)
def test_what_is_impossible_is_refused(tmp_path: Path, fields: dict[str, Any], family: str) -> None:
    decoder = small_decoder(family)
    if "guess" in fields:
        fields = {"guess": small_guess_head(decoder)}
    with Artifact.open(random_artifact(tmp_path / "a.pi", decoder)) as file:
        manifest = file.manifest
    vars(manifest).update({"guess_layers": 1} | fields)
    assert next(contradictions(manifest)).startswith("guess_layers: ")
