"""The store of prefixes: the same text whatever it has, in memory and on disk, before and after a restart."""

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import SUPPORT
from support.requests import alone, assert_same, follow_ups, found_by, random_requests, settle, together
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.layer_classes import sequence_nbytes
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.engine import page_files
from pi_runtime.engine.page_files import PageFiles
from pi_runtime.engine.store import DiskStorey
from pi_runtime.errors import UsageError

CONTEXT = 256
WINDOWS = {"n_layers": 4, "window": 9, "windowed_layers": (0, 1, 3)}
LATENTS = {"n_kv_heads": 1, "latent_rank": 37, "rotary_frequencies": (1.0,)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {"mode": "dense"}),
    "predicted": ({}, {"mode": "predicted"}),
    "cache in q8": ({}, {"mode": "predicted", "cache_format": "q8"}),
    "windows": (WINDOWS, {"mode": "predicted"}),
    "wide windows, cache in q8": (WINDOWS | {"window": 70}, {"mode": "dense", "cache_format": "q8"}),
    "windows alone": (WINDOWS | {"windowed_layers": (0, 1, 2, 3)}, {"mode": "dense"}),
    "windows, cache in q4": (WINDOWS, {"mode": "predicted", "cache_format": "q4"}),
    "latents": (LATENTS, {"mode": "dense"}),
    "latents, cache in q4": (LATENTS, {"mode": "dense", "cache_format": "q4"}),
    "stand-in": ({}, {"mode": "auto", "device": "stand-in"}),
}


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model computes a page faster than any disk reads it."""
    monkeypatch.setattr(DiskStorey, "pays", True)


def artifact(path: Path, **fields: Any) -> Path:
    decoder = small_decoder(**{"context_length": CONTEXT, "d_model": 64, "n_layers": 2} | fields)
    layers = (Layer(rung="predicted", rank=4), *[Layer(rung="gate")] * (decoder.n_layers - 1))
    plan = stored_plan((16, 8), 1 << 20, 20000, context=CONTEXT)
    return random_artifact(
        path,
        decoder,
        format="f16",
        ranks=[4, *[None] * (decoder.n_layers - 1)],
        layers=layers,
        text=Text(prefix_ids=(), end_ids=(3, 77)),
        scale=2.0,
        plans=(plan,) if decoder.n_layers == 2 and not decoder.latent_rank else (),
    )


def page_nbytes(model: Model) -> int:
    return model.executor.new_pool().page_nbytes


def smallest(model: Model) -> int:
    """Bytes of what one sequence needs at most."""
    return sequence_nbytes(model.executor.new_pool().classes, CONTEXT, model.executor.block_tokens)


def fresh(path: Path) -> list[str]:
    """Files that are neither pages nor what is there besides."""
    return [found.name for found in path.iterdir() if found.suffix != ".pages" and found.name != ".budget.lock"]


@pytest.mark.parametrize("case", CASES)
def test_the_same_text_with_any_store(case: str, tmp_path: Path, long: bool) -> None:
    """Off, in memory, cold, warm, and after restarts, with much and little room in both storeys."""
    fields, options = CASES[case]
    path, folder = artifact(tmp_path / "a.pi", **fields), tmp_path / "pages"
    read = cached = 0
    for n in range(8 if long else 2):
        rng = random.Random(f"{case} {n}")
        requests = random_requests(rng, 60 if long else 10, sampled=n % 2 == 1, context=CONTEXT, cancels=True)
        with load(path, threads=1, **options) as model:
            wanted = [alone(model, request) for request in requests]
            turns = follow_ups(rng, requests, wanted, CONTEXT)
            wanted += [alone(model, request) for request in turns]
            for restart in range(3):
                budget = smallest(model) + rng.choice([0, 1, 5, 50]) * page_nbytes(model)
                disk_budget = rng.choice([20, 200]) * page_nbytes(model)
                with Engine(
                    model,
                    slots=rng.choice([1, 2, 4]),
                    kv_budget=budget,
                    speculate=rng.choice(["auto", 4]),
                    kv_disk=folder,
                    kv_disk_budget=disk_budget,
                ) as engine:
                    found = together(engine, requests, rng) + together(engine, turns, rng)
                    assert engine.stats.pages_used == engine.stats.pages_kept == len(set(engine._store.tree.pages))
                    read, cached = read + engine.stats.kv_disk_tokens, cached + engine.stats.cached_tokens
                assert engine.stats.pages_used == 0
                assert sum(file.stat().st_size for file in folder.glob("*.pages")) <= disk_budget, restart
                assert fresh(folder) == []
                for row in zip([*requests, *turns], wanted, found, strict=True):
                    assert_same(*row)
    assert read > 0
    print(f"{case}: {read} of {cached} tokens that were stored came from disk")


def test_a_prompt_is_found_again_after_a_restart(tmp_path: Path) -> None:
    path, prompt = artifact(tmp_path / "a.pi"), [n % 200 for n in range(150)]
    texts, read = [], []
    for _ in range(2):
        with (
            load(path, mode="dense") as model,
            Engine(model, kv_disk=tmp_path / "pages", kv_disk_budget=1 << 20) as engine,
        ):
            stream = engine.generate(prompt, max_tokens=5)
            texts.append("".join(stream))
            read.append((stream.stats.cached_tokens, engine.stats.kv_disk_tokens))
    assert texts[0] == texts[1]
    assert read == [(0, 0), (128, 128)]
    files = [*(tmp_path / "pages").iterdir()]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files if file.suffix == ".pages")


def test_several_answers_to_a_prompt_from_disk(tmp_path: Path) -> None:
    prompt, drawn = [n % 200 for n in range(150)], Sampling(temperature=1.0, seed=3)
    with load(artifact(tmp_path / "a.pi"), mode="predicted") as model:
        wanted = [
            found_by(model.generate(prompt, max_tokens=5, sampling=replace(drawn, number=number)))
            for number in range(3)
        ]
        for n in range(2):
            with Engine(model, slots=2, kv_budget=smallest(model), kv_disk=tmp_path / "pages") as engine:
                streams = engine.generate_many(prompt, 3, max_tokens=5, sampling=drawn)
                assert [found_by(stream) for stream in streams] == wanted
                assert engine.stats.kv_disk_tokens == 128 * n


def test_what_is_evicted_is_read_again(tmp_path: Path) -> None:
    """Memory holds one of three texts; a page that still waits to be written is found too."""
    texts = [[(7 * k + n) % 200 for n in range(140)] for k in range(3)]
    with load(artifact(tmp_path / "a.pi"), mode="dense") as model:
        wanted = [found_by(model.generate(text, max_tokens=4)) for text in texts]
        with Engine(model, slots=1, kv_budget=smallest(model), kv_disk=tmp_path, kv_disk_budget=1 << 20) as engine:
            for _ in range(3):
                assert [found_by(engine.generate(text, max_tokens=4)) for text in texts] == wanted
            assert engine.stats.kv_disk_tokens >= 2 * 3 * 64


def test_a_salt_another_mode_and_another_model_find_nothing(tmp_path: Path) -> None:
    path, other, prompt = artifact(tmp_path / "a.pi"), artifact(tmp_path / "b.pi", d_ff=72), [5] * 100
    said: list[str] = []

    def read(path: Path, salt: str = "", **options: Any) -> int:
        with load(path, **options) as model, Engine(model, kv_disk=tmp_path / "pages", say=said.append) as engine:
            "".join(engine.generate(prompt, max_tokens=2, cache_salt=salt))
            return engine.stats.kv_disk_tokens

    assert read(path, mode="dense") == 0
    assert said == []
    assert read(path, mode="gate") == 0
    assert ["other models or runs" in line for line in said] == [True]
    assert read(path, mode="dense", cache_format="q8") == 0
    assert read(path, mode="dense", cache_format="q4") == 0
    assert read(other, mode="dense") == 0
    assert read(path, salt="another", mode="dense") == 0
    assert read(path, mode="dense") == read(path, salt="another", mode="dense") == 96
    (tmp_path / "a.pi").rename(tmp_path / "c.pi")
    assert read(tmp_path / "c.pi", mode="dense") == 96, "a name is no part of what is computed"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "in the magic": lambda path: flip(path, 3),
    "in the header's length": lambda path: flip(path, 15),
    "in the header": lambda path: flip(path, 40),
    "in the table": lambda path: flip(path, path.read_bytes().index(b"}") + 20),
    "in a page": lambda path: flip(path, -50),
    "a folder in its place": lambda path: (path.unlink(), path.mkdir()),  # type: ignore[func-returns-value,dict-item]
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_computed_again_and_said_once(case: str, tmp_path: Path) -> None:
    path, folder, said = artifact(tmp_path / "a.pi"), tmp_path / "pages", list[str]()
    prompts = [[k] * 100 for k in range(3)]
    for n in range(2):
        with load(path, mode="dense") as model, Engine(model, kv_disk=folder, say=said.append) as engine:
            for prompt in prompts:
                assert found_by(engine.generate(prompt, max_tokens=3)) == found_by(model.generate(prompt, max_tokens=3))
            assert engine.stats.kv_disk_tokens == 0
        if n == 0:
            for file in folder.glob("*.pages"):
                DAMAGE[case](file)
    assert len(said) == 1
    assert "computed again" in said[0]


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = artifact(tmp_path / "a.pi"), list[str]()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_files.Replacement, "publish", full)
    with load(path, mode="dense") as model:
        settings: Any = {"slots": 1, "kv_budget": smallest(model), "kv_disk": tmp_path / "pages"}
        with Engine(model, **settings, say=said.append) as engine:
            for k in range(6):
                prompt = [k] * 140
                assert found_by(engine.generate(prompt, max_tokens=3)) == found_by(model.generate(prompt, max_tokens=3))
        assert engine.stats.finished == 6
    assert len(said) == 1
    assert "the disk is full" in said[0]
    assert not [*(tmp_path / "pages").glob("*.pages")]


def test_a_file_that_is_removed_meanwhile_is_computed_again_in_silence(tmp_path: Path) -> None:
    path, folder, said = artifact(tmp_path / "a.pi"), tmp_path / "pages", list[str]()
    for n in range(2):
        with load(path, mode="dense") as model, Engine(model, kv_disk=folder, say=said.append) as engine:
            if n:
                for file in folder.glob("*.pages"):
                    file.unlink()
            "".join(engine.generate([3] * 100, max_tokens=3))
            assert engine.stats.kv_disk_tokens == 0
    assert said == []


def test_of_a_prompt_whose_end_is_gone_the_beginning_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "FILE_NBYTES", 1)  # a file for each page
    path, folder, prompt = artifact(tmp_path / "a.pi"), tmp_path / "pages", [n % 200 for n in range(150)]
    read = []
    for _ in range(2):
        with load(path, mode="dense") as model, Engine(model, kv_disk=folder) as engine:
            if read:
                newest = max(folder.glob("*.pages"), key=lambda file: file.stat().st_mtime_ns)
                newest.unlink()
            answer = engine.generate(prompt, max_tokens=3)
            assert found_by(answer) == found_by(model.generate(prompt, max_tokens=3))
            read.append(engine.stats.kv_disk_tokens)
    assert read == [0, 96]


def test_a_disk_that_is_slower_than_computing_is_left_alone_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with load(artifact(tmp_path / "a.pi"), mode="dense") as model:
        with Engine(model, kv_disk=tmp_path / "pages") as engine:
            "".join(engine.generate([7] * 100, max_tokens=2))
        with Engine(model, kv_disk=tmp_path / "pages") as engine:
            disk = engine._store._disk
            assert disk is not None
            disk.token_s.value, disk.read_s.value = 1e-9, 1.0
            monkeypatch.setattr(disk.token_s, "count", lambda _: None)
            "".join(engine.generate([7] * 100, max_tokens=1))
            assert engine.stats.kv_disk_tokens == 0
            assert (disk.pays, disk.read_s.value) == (False, 0.9)


def test_scorings_pages_serve_later_ones(tmp_path: Path) -> None:
    """They are computed with selection, as those of answers, which no prompt finds again."""
    with load(artifact(tmp_path / "a.pi"), mode="predicted") as model, Engine(model) as engine:
        engine.score([7] * 100).result()
        settle(engine)
        assert not any(engine._store.tree._is_over(node) for node in engine._store.tree.nodes())
        "".join(engine.generate([9] * 40, max_tokens=60, min_tokens=60))
        settle(engine)
        assert any(engine._store.tree._is_over(node) for node in engine._store.tree.nodes())


def test_servers_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    """Two engines at once, each of which finds what the other has written, within one budget."""
    path, folder = artifact(tmp_path / "a.pi"), tmp_path / "pages"
    prompts = [[(k + n) % 250 for n in range(140)] for k in range(40)]
    with load(path, mode="dense") as one, load(path, mode="dense") as two:
        budget = 30 * page_nbytes(one)
        wanted = [found_by(one.generate(prompt, max_tokens=3)) for prompt in prompts]
        engines = [
            Engine(model, slots=2, kv_budget=smallest(model), kv_disk=folder, kv_disk_budget=budget)
            for model in (one, two)
        ]
        found: dict[int, list[Any]] = {}

        def run(n: int) -> None:
            streams = [engines[n].generate(prompt, max_tokens=3) for prompt in prompts]
            found[n] = [found_by(stream) for stream in streams]

        threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for engine in engines:
            engine.close()
        assert found == {0: wanted, 1: wanted}
        sizes = [file.stat().st_size for file in folder.glob("*.pages")]
        assert 0 < sum(sizes) <= budget
        with Engine(one, kv_disk=folder, kv_disk_budget=budget) as engine:
            assert found_by(engine.generate(prompts[-1], max_tokens=3)) == wanted[-1]
            assert engine.stats.kv_disk_tokens > 0


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"kv_disk_budget": 1 << 20}, "kv_disk_budget"),
        ({"kv_disk": "FILE"}, "kv_disk"),
        ({"kv_disk": "pages", "kv_disk_budget": 9}, "kv_disk_budget=9"),
    ],
)
def test_what_cannot_be_a_storey_is_refused(settings: dict[str, Any], setting: str, tmp_path: Path) -> None:
    (tmp_path / "FILE").touch()
    if "kv_disk" in settings:
        settings = settings | {"kv_disk": tmp_path / settings["kv_disk"]}
    with load(artifact(tmp_path / "a.pi")) as model, pytest.raises(UsageError, match=f"^{setting}"):
        Engine(model, **settings)


def test_a_full_queue_refuses_and_what_waits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(artifact(tmp_path / "a.pi")) as model:
        pool = model.executor.new_pool()
        values = pool.values(pool.take(1)[0])
        monkeypatch.setattr(page_files, "QUEUE_NBYTES", 3 * values.nbytes)
        monkeypatch.setattr(page_files, "WAIT_S", 60.0)
        files = PageFiles(tmp_path / "pages", 1 << 20, {"name": "x"}, pool.classes, lambda _: None)
        names = [bytes([n]) * 32 for n in range(4)]
        values[:] = 5
        taken = [files.offer(page_files.Offered(name, 0, values)) for name in names]
        assert taken == [True, True, True, False]
        values[:] = 0
        assert files.read([page_files.Offered(names[1], 0, values)])
        assert np.all(values == 5)
        assert not files.read([page_files.Offered(names[3], 0, values)])
        files.close(60)
        assert files.size == 3


def test_killed_at_any_moment_no_text_is_wrong_and_no_file_is_left(tmp_path: Path, long: bool) -> None:
    kills, folder = 50 if long else 3, tmp_path / "pages"
    command = [sys.executable, "-m", "support.kill_stores", artifact(tmp_path / "a.pi"), folder, str(kills), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SUPPORT.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["killed"] == kills
    assert found["read"] > 0
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}\.pages|\.budget\.lock", name) for name in found["files"])
    with load(tmp_path / "a.pi", mode="dense") as model:
        assert sum(found["files"].values()) <= 25 * page_nbytes(model)
