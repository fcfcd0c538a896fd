"""Locks: written, recomputed without model and torch, and compared layer by layer."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT
from support.synthetic import small_decoder

from pi_compile.cli.main import app
from pi_compile.errors import ProfileError, RecipeError
from pi_compile.machine.profile import Cpu, Disk, Gpu, Link, Machine
from pi_compile.pipeline import lock_file
from pi_compile.pipeline.recipe_placement import place_recipe
from pi_compile.recipe import default_recipe
from pi_compile.results.activation_profile import ActivationProfile, LayerWork
from pi_runtime import console
from pi_runtime.errors import NotMetError, UsageError

RECIPES = ROOT / "recipes"
LOCKS = sorted(RECIPES.glob("*.lock"))
SMALL = [path for path in LOCKS if "175b" not in path.stem]

WITHOUT = """
import sys
class Blocked:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {names}:
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Blocked(f) for f in sys.meta_path]
import socket
socket.socket = None
from pi_compile.cli.main import main
main()
"""
FOREIGN = {"torch", "transformers", "datasets", "huggingface_hub", "zarr", "safetensors", "numba", "tokenizers"}


def activations() -> ActivationProfile:
    decoder, rng = small_decoder(n_layers=3, d_ff=640), np.random.default_rng(4)
    counts = rng.integers(0, 1000, (3, 640)).astype(np.uint64)
    rows = [LayerWork(rung="predicted", rank=4 + n, ffn_bytes=1, read_ppm=1_500_000, loss_ppb=7) for n in range(3)]
    return ActivationProfile(
        decoder=decoder,
        formats={"embedding": "f16", "attention": "f16", "ffn": "f16", "head": "f16"},
        tokens=1000,
        counts=counts,
        order=np.argsort(-counts.astype(np.int64), axis=1, kind="stable").astype(np.uint32),
        layers=tuple(rows),
        predictor_format="f16",
    )


MACHINE = Machine(
    name="m",
    source="test",
    cpu=Cpu(name="c", cores=2, ram_gib=1.0, bandwidth_gb_per_s=4.0),
    gpu=Gpu(name="g", vram_gib=1.0, bandwidth_gb_per_s=40.0),
    link=Link(pcie_gb_per_s=16.0, sync_us=0.5),
)


def wide_activations() -> ActivationProfile:
    """A model whose FFNs take more than the buffers of a run from disk."""
    decoder, rng = small_decoder(n_layers=3, d_ff=4096, d_model=256), np.random.default_rng(4)
    counts = (1000 * rng.random((3, 4096)) ** 6).astype(np.uint64)
    order = np.argsort(-counts.astype(np.int64), axis=1, kind="stable").astype(np.uint32)
    return replace(activations(), decoder=decoder, counts=counts, order=order)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with its activations and machine; there is no model."""
    activations().save(tmp_path / "a.npz")
    (tmp_path / "m.toml").write_text(MACHINE.to_toml())
    found = default_recipe("no-such-model")
    place = found.place.model_copy(update={"machine": "m.toml", "activations": "a.npz"})
    path = tmp_path / "r.toml"
    path.write_text(found.model_copy(update={"place": place}).to_toml())
    return path


def run(*arguments: object) -> int:
    return console.run(app, [str(a) for a in arguments])


def test_a_lock_holds_and_every_input_breaks_it(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("place", recipe, "--lock") == 0
    lock = recipe.with_suffix(".lock")
    written = lock.read_bytes()
    assert run("place", recipe, "--locked") == 0
    capsys.readouterr()
    a = activations()
    counts = a.counts.copy()
    counts[1, a.order[1, 0]] -= 1
    machine, found = recipe.with_name("m.toml"), recipe.read_text()
    changes: list[tuple[Path, Any]] = [
        (recipe, found.replace("vram_gib = []", "vram_gib = [0.0001]")),
        (recipe, found.replace('"time"', '"hot-mass"')),
        (recipe, found.replace("context = 2048", "context = 32")),
        (machine, machine.read_text().replace("= 4.0", "= 4.1")),
    ]
    for path, text in changes:
        before = path.read_text()
        path.write_text(text)
        assert run("place", recipe, "--locked") == 5, text
        assert "locked → recomputed" in capsys.readouterr().err
        path.write_text(before)
    ActivationProfile(**{**vars(a), "counts": counts}).save(recipe.with_name("a.npz"))
    assert run("place", recipe, "--locked") == 5
    a.save(recipe.with_name("a.npz"))
    assert run("place", recipe, "--locked") == 0
    assert lock.read_bytes() == written


def test_the_difference_is_told_by_layer(recipe: Path) -> None:
    lock_file.lock_path(recipe).write_text(lock_file.lock_text(place_recipe(recipe)))
    lock = recipe.with_suffix(".lock")
    text = lock.read_text()
    plan = tomllib.loads(text)["plan"][1]
    cut = plan["layers"][2]["cut"]
    head, _, tail = text.partition(f"vram_bytes = {plan['vram_bytes']}")
    lines = tail.splitlines()
    at = [n for n, line in enumerate(lines) if line.startswith("    {")][2]
    lines[at] = lines[at].replace(f"cut = {cut},", f"cut = {cut + 64},")
    lock.write_text(head + f"vram_bytes = {plan['vram_bytes']}" + "\n".join(lines) + "\n")
    with pytest.raises(NotMetError) as caught:
        lock_file.check_lock(lock, place_recipe(recipe))
    told = str(caught.value.found).strip().splitlines()
    assert told == [f"plan for {plan['vram_bytes']} bytes, layer 2, cut: {cut + 64} → {cut}"]


def test_placements_with_rows_on_disk_are_locked(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk's rates, persistence and RAM break the lock; a wrong division is told by layer."""
    a, disk = wide_activations(), Disk(name="d", sizes_kib=[4], depths=[1, 16], read_mb_per_s=[[40.0], [400.0]])
    active = a.counts.sum(1, dtype=np.uint64)
    persistence = np.stack([active, *(active * np.uint64(n) // np.uint64(10) for n in (5, 6, 7, 8))], axis=1)
    ActivationProfile(**{**vars(a), "persistence": persistence}).save(recipe.with_name("a.npz"))
    machine = MACHINE.model_copy(update={"disk": disk, "gpu": None, "link": None})
    recipe.with_name("m.toml").write_text(machine.to_toml())
    assert run("place", recipe, "--lock") == 0
    lock = recipe.with_suffix(".lock")
    text = lock.read_text()
    plans = tomllib.loads(text)["plan"]
    assert [p["vram_bytes"] for p in plans] == [0] * len(plans)
    assert len({p["ram_budget_bytes"] for p in plans}) == len(plans) >= 3
    assert all({"pinned", "cached", "first"} <= layer.keys() for p in plans for layer in p["layers"])
    assert run("place", recipe, "--locked") == 0
    capsys.readouterr()
    for path, old, new in (
        (recipe.with_name("m.toml"), "[40.0]", "[41.0]"),
        (recipe, "ram_gib = 0.0", f"ram_gib = {(plans[2]['ram_budget_bytes'] + 4096) / 2**30!r}"),
    ):
        before = path.read_text()
        path.write_text(before.replace(old, new))
        assert run("place", recipe, "--locked") == 5
        path.write_text(before)
    ActivationProfile(**{**vars(a), "persistence": persistence - np.uint64(1)}).save(recipe.with_name("a.npz"))
    assert run("place", recipe, "--locked") == 5
    ActivationProfile(**{**vars(a), "persistence": persistence}).save(recipe.with_name("a.npz"))
    pinned = plans[1]["layers"][0]["pinned"]
    head, mark, tail = text.partition(f"ram_budget_bytes = {plans[1]['ram_budget_bytes']}")
    lock.write_text(head + mark + tail.replace(f"pinned = {pinned},", f"pinned = {pinned + 64},", 1))
    capsys.readouterr()
    assert run("place", recipe, "--locked") == 5
    told = (
        f"plan for 0 bytes and {plans[1]['ram_budget_bytes']} bytes of RAM, layer 0, pinned: {pinned + 64} → {pinned}"
    )
    assert told in capsys.readouterr().err


def test_which_release_wrote_it_does_not_count(recipe: Path) -> None:
    placed, lock = place_recipe(recipe), recipe.with_suffix(".lock")
    lock.write_text(lock_file.lock_text(placed))
    lock.write_text(lock.read_text().replace('solver = "pi-toolchain ', 'solver = "pi-toolchain 99.'))
    lock_file.check_lock(lock, placed)
    lock.write_text(lock.read_text() + "nonsense\n")
    with pytest.raises(NotMetError, match="not the locked one"):
        lock_file.check_lock(lock, placed)


def test_without_lock_or_activations(recipe: Path) -> None:
    with pytest.raises(UsageError, match="no lock"):
        lock_file.check_lock(recipe.with_suffix(".lock"), place_recipe(recipe))
    recipe.write_text(recipe.read_text().replace('"a.npz"', '""'))
    with pytest.raises(RecipeError, match="no activations to place from"):
        place_recipe(recipe)
    recipe.write_text(recipe.read_text().replace('activations = ""', 'activations = "b.npz"'))
    with pytest.raises(ProfileError, match="no such activation profile"):
        place_recipe(recipe)


def test_a_trained_profile_gives_the_rungs_and_without_it_a_rule_does(recipe: Path) -> None:
    trained = place_recipe(recipe)
    ActivationProfile(**{**vars(activations()), "layers": ()}).save(recipe.with_name("a.npz"))
    assert place_recipe(recipe).placements[0].digest != trained.placements[0].digest


def test_an_activation_profile_is_the_same_bytes_and_read_back_unchanged(tmp_path: Path) -> None:
    a = activations()
    for name in ("one", "two"):
        a.save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = ActivationProfile.load(tmp_path / "one")
    assert found.placing_digest() == a.placing_digest()
    assert np.array_equal(found.ordered_counts(), a.ordered_counts())
    alike = ActivationProfile(
        **{**vars(a), "counts": np.repeat(a.counts[:1], 3, 0), "order": np.repeat(a.order[:1], 3, 0)}
    )
    alike.save(tmp_path / "alike")
    assert ActivationProfile.load(tmp_path / "alike").placing_digest() == alike.placing_digest()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": 5}, "counts above the 5 tokens"),
        ({"order": np.zeros((3, 640), np.uint32)}, "does not name every neuron once"),
        ({"layers": activations().layers[:2]}, "2 layers for 3"),
        ({"layers": (LayerWork(rung="predicted", rank=None, ffn_bytes=1, read_ppm=1, loss_ppb=0),) * 3}, "a rung"),
    ],
    ids=["tokens", "order", "rows", "rung"],
)
def test_an_activation_profile_that_contradicts_itself(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    ActivationProfile(**{**vars(activations()), **change}).save(tmp_path / "a.npz")
    with pytest.raises(ProfileError, match=problem):
        ActivationProfile.load(tmp_path / "a.npz")


@pytest.mark.slow
@pytest.mark.parametrize("path", SMALL[:2], ids=lambda p: p.stem)
def test_recomputed_without_torch_model_or_network(path: Path) -> None:
    """With those modules hidden, another locale and another number of threads."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(names=FOREIGN), "place", str(path.with_suffix(".toml")), "--locked"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "LC_ALL": "C", "OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "7"},
    )
    assert done.returncode == 0, done.stderr


def test_two_locks_have_cuts_inside_that_differ_between_layers() -> None:
    def inside(path: Path) -> bool:
        plans = tomllib.loads(path.read_text(encoding="utf-8"))["plan"]
        most = max(layer["cut"] for plan in plans for layer in plan["layers"])
        cuts = [{layer["cut"] for layer in plan["layers"]} - {0, most} for plan in plans]
        return any(len(found) >= 2 for found in cuts)

    assert len([path for path in LOCKS if inside(path)]) >= 2
