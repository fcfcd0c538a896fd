"""What the fuzzers and the faults found: each was a traceback, a burst of memory or a half-written folder once."""

import errno
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT

from pi_runtime.errors import DoesNotFitError, InputError, NotMetError, UsageError
from pi_runtime.errors.exit_codes import code_and_message
from pi_runtime.sequence.sampling import Sampling, parse_logit_bias

DEEP = "[" * 5000
GIANT = f"0x{'f' * 20_000}"
"""A number that Python reads and does not spell."""


@pytest.mark.parametrize("text", [f"x = {DEEP}", f"version = {GIANT}", f"version = {'9' * 5000}"], ids=lambda t: t[:12])
def test_toml_that_is_deep_or_has_giant_numbers(tmp_path: Path, text: str) -> None:
    pytest.importorskip("pydantic")
    from pi_compile.machine.profile import read_machine
    from pi_compile.recipe import default_recipe, read_recipe

    path = tmp_path / "x.toml"
    path.write_text(text)
    for read in (read_recipe, read_machine):
        with pytest.raises(InputError):
            read(path)
    recipe = default_recipe("model").to_toml()
    assert "seed = 0" in recipe
    path.write_text(recipe.replace("seed = 0", f"seed = {GIANT}"))
    with pytest.raises(InputError) as caught:
        read_recipe(path)
    assert "an integer of more than 64 bits" in str(caught.value)


def test_json_that_is_deep(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    from pi_compile.checkpoint.config import read_json

    (tmp_path / "config.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(InputError):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("budget", ['"8 GiB"', "[1]", "{}", "1.5", "true"])
def test_a_lock_whose_budgets_are_no_numbers(tmp_path: Path, budget: str) -> None:
    pytest.importorskip("highspy")
    from pi_compile.pipeline.lock_file import check_lock, lock_text
    from pi_compile.pipeline.recipe_placement import place_recipe

    placed, path = place_recipe(ROOT / "recipes" / "demo.toml"), tmp_path / "demo.lock"
    path.write_text(f"{lock_text(placed)}\n[[plan]]\nvram_bytes = {budget}\n")
    with pytest.raises(NotMetError):
        check_lock(path, placed)
    path.write_text(f"x = {DEEP}")
    with pytest.raises(NotMetError):
        check_lock(path, placed)


def test_numbers_that_no_float_holds() -> None:
    for name in ("temperature", "repetition_penalty", "top_p", "min_p"):
        with pytest.raises(UsageError):
            Sampling(**{name: 10**400})
    with pytest.raises(UsageError):
        parse_logit_bias([("1", 10**400)])


def npz(path: Path, **changes: bytes) -> Path:
    """The demo's activation profile with some entries replaced, compressed."""
    with zipfile.ZipFile(ROOT / "profiles" / "activations" / "demo.npz") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    entries |= {f"{name}.npy": data for name, data in changes.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return path


def npy(array: np.ndarray) -> bytes:
    from io import BytesIO

    out = BytesIO()
    np.lib.format.write_array(out, array)
    return out.getvalue()


def test_an_activation_profile_that_lies(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    from support.fuzz.watched import watched

    from pi_compile.results import ActivationProfile

    meta = json.loads(str(np.load(ROOT / "profiles" / "activations" / "demo.npz")["meta"]))
    header = npy(np.arange(3)).replace(b"(3,)", b"(3,(")
    bomb = npy(np.zeros((1, 1 << 29), np.uint8))
    no_experts = {**meta, "decoder": {**meta["decoder"], "n_experts": 0}}
    lies = [
        npz(tmp_path / "a.npz", counts=header),
        npz(tmp_path / "b.npz", counts=bomb),
        npz(tmp_path / "c.npz", meta=npy(np.array(json.dumps(no_experts)))),
        npz(tmp_path / "d.npz", meta=npy(np.array("[" * 100_000))),
    ]
    del bomb
    for path in lies:
        with watched(path.name), pytest.raises(InputError):
            ActivationProfile.load(path)


@pytest.mark.parametrize("name", ["x.claim-", "y.failed-z", ".nfs0001.claim-x"])
def test_files_of_others_in_a_work_folder(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    from pi_compile.workers import Worker, WorkFolder

    folder = tmp_path / "work"
    folder.mkdir()
    (folder / name).write_text("")
    (folder / "a.failed-0").write_text("[1]")
    (folder / "b.failed-0").write_text("{}")
    with Worker(tmp_path / "workers") as worker:
        tasks = {task: lambda task=task: (folder / task).write_text(task) for task in "ab"}
        WorkFolder(folder, worker).run(tasks)
    assert (folder / "a").read_text() == "a"


def test_a_failing_disk_is_no_internal_error() -> None:
    code, message = code_and_message(OSError(errno.EIO, "Input/output error", "x.npz"))
    assert code == 2
    assert "x.npz: Input/output error" in message
    assert "internal" not in message


def test_a_full_disk_is_one_error_wherever_it_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydantic")
    from pi_compile.files import write_text

    (tmp_path / "a.lock").write_text("old")
    for code, kind in ((errno.ENOSPC, DoesNotFitError), (errno.EDQUOT, DoesNotFitError), (errno.EIO, UsageError)):

        def fsync(_fd: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(kind, match=r"a\.lock: "):
            write_text(tmp_path / "a.lock", "new")
        assert [p.name for p in tmp_path.iterdir()] == ["a.lock"]
        assert (tmp_path / "a.lock").read_text() == "old"


def test_what_libraries_say_of_disks(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    from pi_compile.files import library_writes

    full = "Error while serializing: I/O error: No space left on device (os error 28)"
    failing = "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"
    for message, kind in ((full, DoesNotFitError), (failing, UsageError), ("CUDA error", RuntimeError)):
        with pytest.raises(kind), library_writes(tmp_path):
            raise RuntimeError(message)


def test_a_message_that_quotes_a_file_has_an_end() -> None:
    error = InputError("x" * 10**6, expected="y" * 10**6, found=[0] * 10**6, remedy="z")
    assert len(str(error)) < 65_000
    assert str(error).endswith("try: z")
