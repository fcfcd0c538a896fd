"""What people write or fetch, damaged by structure: read, or refused by an error with exit code and remedy.

Recipes, machine profiles, locks, configs, tasks, activation profiles and predictors: nothing here needs torch.
"""

import json
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from support import sparsifying
from support.fuzz import mutations
from support.fuzz.cases import Cases
from support.fuzz.texts import SHORT, check, damaged_json, damaged_lines, damaged_toml
from support.paths import ROOT

from pi_compile.evaluation.task_files import read_task
from pi_compile.machine.profile import bundled_machines, read_machine
from pi_compile.pipeline import lock_file
from pi_compile.pipeline.recipe_placement import place_recipe
from pi_compile.planning.model_config import find_planned
from pi_compile.recipe import default_recipe, read_recipe
from pi_compile.results import ActivationProfile, PredictorSet
from pi_compile.sparsification.recipe import read_sparsify_recipe

pytestmark = pytest.mark.timeout(0)


def test_recipes(cases: Cases, tmp_path: Path) -> None:
    original, path = default_recipe("model").to_toml(), tmp_path / "r.toml"
    check(cases, SHORT, 0.3, lambda rng: damaged_toml(rng, path, original), lambda: read_recipe(path))


def test_recipes_of_sparsify(cases: Cases, tmp_path: Path) -> None:
    original, path = sparsifying.small_recipe().to_toml(), tmp_path / "r.toml"
    check(cases, SHORT, 0.3, lambda rng: damaged_toml(rng, path, original), lambda: read_sparsify_recipe(path))


def test_machine_profiles(cases: Cases, tmp_path: Path) -> None:
    original, path = (bundled_machines() / "pc-low.toml").read_text(), tmp_path / "m.toml"
    check(cases, SHORT, 0.3, lambda rng: damaged_toml(rng, path, original), lambda: read_machine(path))


def test_locks(cases: Cases, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "demo.toml"
    placed, path = place_recipe(recipe), tmp_path / "demo.lock"
    original = lock_file.lock_text(placed)
    check(cases, SHORT, 0.3, lambda rng: damaged_toml(rng, path, original), lambda: lock_file.check_lock(path, placed))


def test_configs(cases: Cases, tmp_path: Path) -> None:
    configs = sorted((ROOT / "tests" / "compile" / "checkpoint" / "configs").glob("*.json"))
    path = tmp_path / "config.json"

    def damaged(rng: Random) -> str:
        config = rng.choice(configs)
        return f"{config.name} {damaged_json(rng, path, json.loads(config.read_text()))}"

    check(cases, 2 * SHORT, 0.5, damaged, lambda: find_planned(str(path), tmp_path))


TASKS = (
    {"ctx": "Once upon", "target": " a time"},
    {"ctx": "The sky is", "choices": [" blue", " loud"], "label": 0},
    {"text": "It was the best of times"},
    {"question": "What is it?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
)


def test_task_files(cases: Cases, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    check(cases, 2 * SHORT, 0.3, lambda rng: damaged_lines(rng, path, TASKS), lambda: read_task(path).items)


def test_activation_profiles(cases: Cases, tmp_path: Path) -> None:
    whole = ROOT / "profiles" / "activations" / "demo.npz"
    check_archives(cases, whole, tmp_path / "p.npz", lambda path: ActivationProfile.load(path).digest())


def test_predictors(cases: Cases, tmp_path: Path) -> None:
    from pi_compile.results.predictor_set import LayerRow

    names = ("density", "ffn_bytes", "gate_bytes", "ffn_us", "recall", "precision", "rows_read_over_active", "error")
    figures: Any = dict.fromkeys(names, 1)
    rows = LayerRow(rung="gate", **figures), LayerRow(rung="predicted", rank=2, **figures)
    predictor = tuple(np.zeros(shape, np.float32) for shape in ((2, 8), (16, 2), (16,)))
    whole = tmp_path / "whole.npz"
    PredictorSet(
        rows=rows, predictors=(None, predictor), counts=(None, None), predictor_format="f32", counted_tokens=0,
        perplexity={}, inputs="",
    ).save(whole)  # fmt: skip
    check_archives(cases, whole, tmp_path / "p.npz", lambda path: list(PredictorSet.load(path).predictors))


def check_archives(cases: Cases, whole: Path, path: Path, read: Callable[[Path], object]) -> None:
    """NumPy's archives with another `meta`, arrays of other shapes and bytes, or bytes of the file changed."""
    with np.load(whole) as stored:
        arrays = {name: stored[name] for name in stored.files}
    meta, raw = json.loads(str(arrays["meta"])), whole.read_bytes()

    def damaged(rng: Random) -> str:
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(mutations.data(rng, raw))
            return "bytes"
        changed, what, entries = deepcopy(meta), "arrays", dict(arrays)
        if kind == 1:
            what = mutations.tree(rng, changed)
            entries["meta"] = np.array(mutations.spelled(changed).decode("utf-8", "replace"))
        name = rng.choice(sorted(entries))
        if kind == 2:
            entries[name] = other_array(rng, entries[name])
        np.savez(path, **entries)
        if kind == 3:
            damage_entry(rng, path, f"{name}.npy")
        return f"{what} {name}"

    check(cases, SHORT, 0.3, damaged, lambda: read(path))


def other_array(rng: Random, old: np.ndarray) -> np.ndarray:
    changes: list[Callable[[], Any]] = [
        lambda: old.reshape(-1)[:0],
        lambda: old[..., None],
        lambda: np.concatenate([old.reshape(-1)] * 2),
        lambda: old.astype("S4") if old.dtype.kind != "U" else old,
        lambda: np.zeros(old.shape, rng.choice(("i8", "f8", "u1", "U3", "?", "c16", "M8[s]"))),
        lambda: np.full(old.shape, 2**63, np.uint64),
        lambda: np.array(-1),
    ]
    return np.asarray(rng.choice(changes)())


def damage_entry(rng: Random, path: Path, name: str) -> None:
    """Other bytes at the beginning of an array's file, where NumPy says what it is, with the right checksum."""
    with zipfile.ZipFile(path) as file:
        entries = {n: file.read(n) for n in file.namelist()}
    entries[name] = mutations.data(rng, entries[name][:128]) + entries[name][128:]
    with zipfile.ZipFile(path, "w") as file:
        for n, data in entries.items():
            file.writestr(n, data)
