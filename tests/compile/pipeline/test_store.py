"""The store: nothing made twice, nothing stale used, a half-made stage found again, other builds left alone."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pi_compile
from pi_compile.pipeline import store as store_module
from pi_compile.pipeline.store import Store, code_digest, key_of, sources_of
from pi_compile.workers import Worker


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Worker(tmp_path / "workers", build="one") as worker:
        yield Store(tmp_path / "store", worker)


def get(store: Store, key: str, make: Callable[[Path], str] | None = None, stage: str = "count") -> tuple[str, bool]:
    """The result of a stage; without `make` it has to be there."""

    def unexpected(_scratch: Path) -> str:
        raise AssertionError("made again")

    return store.result(
        stage,
        key,
        make=lambda work: (make or unexpected)(work.path),
        save=lambda text, path: path.write_text(text) and None,
        load=Path.read_text,
        suffix=".txt",
    )


def files(store: Store) -> list[str]:
    return sorted(f.name for f in store.folder.iterdir())


def test_a_result_is_made_once(store: Store) -> None:
    assert get(store, key_of(n=1), lambda _: "one") == ("one", True)
    assert get(store, key_of(n=1)) == ("one", False)
    assert files(store) == [f"count-{key_of(n=1)[:16]}.txt"]


def test_a_changed_key_makes_it_again_and_removes_the_old(store: Store) -> None:
    get(store, key_of(n=1), lambda _: "one")
    assert get(store, key_of(n=2), lambda _: "two") == ("two", True)
    assert files(store) == [f"count-{key_of(n=2)[:16]}.txt"]
    assert get(store, key_of(n=1), lambda _: "one again") == ("one again", True)


def test_what_another_recipe_made_of_the_same_is_taken(store: Store) -> None:
    get(store, "a", lambda _scratch: "made")
    renamed = Store(store.folder.parent / "renamed", store.worker)
    assert get(renamed, "a") == ("made", False)
    assert files(renamed) == files(store)
    assert get(renamed, "b", lambda _scratch: "other") == ("other", True)
    assert get(store, "a") == ("made", False)


def test_stages_do_not_touch_each_other(store: Store) -> None:
    get(store, key_of(n=1), lambda _: "one")
    get(store, key_of(n=1), lambda _: "other", stage="order")
    get(store, key_of(n=2), lambda _: "two", stage="order")
    assert get(store, key_of(n=1)) == ("one", False)


def half(scratch: Path) -> str:
    (scratch / "shard-0").write_text("half done")
    raise KeyboardInterrupt


def test_scratch_is_kept_after_a_kill_and_given_again(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        get(store, key_of(n=1), half)
    assert files(store) == [f"count-{key_of(n=1)[:16]}.work"]
    assert get(store, key_of(n=1), lambda scratch: (scratch / "shard-0").read_text()) == ("half done", True)
    assert files(store) == [f"count-{key_of(n=1)[:16]}.txt"]


def test_scratch_of_other_keys_is_removed(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        get(store, key_of(n=1), half)
    with pytest.raises(KeyboardInterrupt):
        get(store, key_of(n=1), half, stage="order")

    def make(scratch: Path) -> str:
        assert not list(scratch.iterdir())
        return str(sorted(f.name for f in store.folder.glob("*.work")))

    found, _ = get(store, key_of(n=2), make)
    assert found == str([f"count-{key_of(n=2)[:16]}.work", f"order-{key_of(n=1)[:16]}.work"])


def test_a_result_that_fails_keeps_the_old_one(store: Store) -> None:
    get(store, key_of(n=1), lambda _: "one")
    with pytest.raises(KeyboardInterrupt):
        get(store, key_of(n=2), half)
    assert get(store, key_of(n=1)) == ("one", False)


def test_scratch_that_a_kill_after_saving_left_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            get(store, key_of(n=1), lambda _: "one")
    assert len(files(store)) == 2
    assert get(store, key_of(n=1)) == ("one", False)
    assert files(store) == [f"count-{key_of(n=1)[:16]}.txt"]


def test_keys_depend_on_every_input_and_on_no_order() -> None:
    assert key_of(a=1, b=[2, "x"]) == key_of(b=[2, "x"], a=1)
    different = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": [1]}, {"a": None}, {"a": {"b": 1}}]
    assert len({key_of(**inputs) for inputs in different}) == len(different)


def test_what_another_build_works_on_is_left_alone(store: Store, tmp_path: Path) -> None:
    with Worker(tmp_path / "workers", build="two") as worker:
        other = Store(store.folder, worker)
        get(other, key_of(n=2), lambda _: "two")
        with pytest.raises(KeyboardInterrupt):
            get(other, key_of(n=2), half, stage="order")
        get(store, key_of(n=1), lambda _: "one")
        get(store, key_of(n=1), lambda _: "one", stage="order")
        assert get(other, key_of(n=2)) == ("two", False)
        assert get(other, key_of(n=2), lambda folder: (folder / "shard-0").read_text(), "order") == ("half done", True)
    get(store, key_of(n=3), lambda _: "three")
    assert files(store)[0] == f"count-{key_of(n=3)[:16]}.txt"
    assert len(list(store.folder.glob("count-*"))) == 1


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of our sources that `code_digest` reads instead."""
    folder = tmp_path / "pi_compile"
    shutil.copytree(Path(pi_compile.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setitem(store_module._ROOTS, "pi_compile", folder)
    return folder


def test_a_code_digest_changes_with_one_byte_of_what_the_module_imports(sources: Path) -> None:
    before = code_digest("pi_compile.calibration.profiling")
    (sources / "training" / "stage.py").write_text("# not imported by profiling")
    assert code_digest("pi_compile.calibration.profiling") == before
    seen = {before}
    for name in (
        "calibration/profiling.py",
        "checkpoint/families/llama.py",
        "checkpoint/__init__.py",
        "workers/tasks.py",
    ):
        original = (sources / name).read_bytes()
        (sources / name).write_bytes(original + b"\n")
        seen.add(code_digest("pi_compile.calibration.profiling"))
        (sources / name).write_bytes(original)
    assert code_digest("pi_compile.calibration.profiling") == before
    assert len(seen) == 5


def test_imports_are_followed_into_both_packages_and_nowhere_else() -> None:
    found = sources_of("pi_compile.training.stage")
    assert {
        "pi_compile.training.stage",
        "pi_compile.training.rung_choice",
        "pi_compile.torch_model.predictor",
        "pi_runtime.artifact.formats",
    } <= found.keys()
    # A name that a room's face hands on is followed to where it is defined, and no further.
    assert "pi_compile.cost_model.processors" in found
    assert {"pi_compile.packing", "pi_compile.cost_model.workload"}.isdisjoint(found)
    assert all(name.split(".")[0] in ("pi_compile", "pi_runtime") for name in found)
