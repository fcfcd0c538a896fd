"""Faults of a disk, a file or a user while a model runs: a clear error or the same text, never a hang."""

import ctypes
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import FaultyPread, from_disk
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.schema import Text
from pi_runtime.disk import reader as reader_module
from pi_runtime.disk.ring import OpenRing
from pi_runtime.errors import ArtifactError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = small_decoder(d_model=64, d_ff=2500, n_layers=3, context_length=160)
    path = tmp_path_factory.mktemp("faults") / "model.pi"
    text = Text(prefix_ids=(), end_ids=())
    return random_artifact(path, decoder, format="f16", ranks=[4, None, 6], seed=5, scale=3.0, text=text)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[np.ndarray]:
    with load(path, device="cpu") as model:
        return outputs(model)


@pytest.fixture
def disk() -> FaultyPread:
    return FaultyPread()


@pytest.fixture
def model(path: Path, disk: FaultyPread) -> Iterator[Model]:
    with from_disk(path, 0.1, reader={"pread": disk.address, "workers": 2}) as model:
        yield model


@pytest.fixture
def answers(disk: FaultyPread) -> Iterator[threading.Event]:
    """What the reads of a stalled disk wait for."""
    event = threading.Event()
    yield event
    event.set()


def stalled_until(answers: threading.Event) -> Callable[[Any, int], None]:
    def fault(_read: Any, _call: int) -> None:
        answers.wait(60)

    return fault


def outputs(model: Model) -> list[np.ndarray]:
    """Logits of a prompt, and of tokens after it."""
    cache = model.new_cache()
    found = [model.logits(range(1, 30), last=1, cache=cache)]
    return found + [model.decode(token, cache)[0] for token in range(4)]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def failing(code: int) -> Callable[[Any, int], int]:
    def fault(_read: Any, _call: int) -> int:
        ctypes.set_errno(code)
        return -1

    return fault


def test_interrupted_and_short_reads_change_nothing(
    model: Model, disk: FaultyPread, expected: list[np.ndarray]
) -> None:
    def fault(read: Callable[[int], int], call: int) -> int | None:
        if call % 3 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        return read(512) if call % 3 == 1 else None

    disk.fault = fault
    same(outputs(model), expected)
    assert disk.calls > 100


@pytest.mark.parametrize("good", [0, 1, 7, 40, 90])
def test_an_error_at_any_read(model: Model, disk: FaultyPread, expected: list[np.ndarray], good: int) -> None:
    for _ in range(2):
        last = disk.calls + good
        disk.fault = lambda read, call, last=last: None if call <= last else failing(errno.EIO)(read, call)
        with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
            outputs(model)
        assert found.value.found == os.strerror(errno.EIO)
        disk.fault = lambda _read, _call: None
        same(outputs(model), expected)


def test_a_file_that_is_cut_off(path: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(path, tmp_path / "own.pi"))
    with from_disk(own, 0.1) as model:
        outputs(model)
        with own.open("r+b") as file:
            file.truncate(own.stat().st_size // 2)
        with pytest.raises(ArtifactError, match="was changed while it was in use"):
            outputs(model)


def test_a_file_that_is_cut_off_within_a_step(model: Model, disk: FaultyPread, expected: list[np.ndarray]) -> None:
    disk.fault = lambda _read, call: 0 if call % 20 == 0 else None
    with pytest.raises(ArtifactError, match="ends too early"):
        outputs(model)
    disk.fault = lambda _read, _call: None
    same(outputs(model), expected)


def test_a_file_that_is_replaced(path: Path, tmp_path: Path, expected: list[np.ndarray]) -> None:
    own = Path(shutil.copy(path, tmp_path / "own.pi"))
    with from_disk(own, 0.1) as model:
        same(outputs(model), expected)
        other = tmp_path / "other.pi"
        other.write_bytes(bytes(own.stat().st_size))
        other.rename(own)
        same(outputs(model), expected)


def test_a_disk_that_stalls(
    path: Path, disk: FaultyPread, answers: threading.Event, expected: list[np.ndarray]
) -> None:
    settings = {"pread": disk.address, "workers": 2, "stall_seconds": 1.0}
    with from_disk(path, 0.1, reader=settings) as model:
        outputs(model)
        disk.fault = stalled_until(answers)
        with pytest.raises(ArtifactError, match="does not answer"):
            outputs(model)
        disk.fault = lambda _read, _call: None
        answers.set()
        same(outputs(model), expected)


def test_closing_while_the_disk_stalls(path: Path, disk: FaultyPread, answers: threading.Event) -> None:
    others = threading.enumerate()
    model = from_disk(path, 0.1, reader={"pread": disk.address, "workers": 2, "stall_seconds": 0.2})
    disk.fault = stalled_until(answers)
    with pytest.raises(ArtifactError, match="does not answer"):
        outputs(model)
    readers = [t for t in threading.enumerate() if t not in others and t.name.startswith("pi-disk")]
    model.close()
    assert any(thread.is_alive() for thread in readers)  # they still wait for the disk: closing did not
    answers.set()
    for thread in readers:  # the reads end before their memory is needed by others
        thread.join(60)
        assert not thread.is_alive()


def timed(call: Callable[[Model], object], model: Model) -> float:
    began = time.perf_counter()
    call(model)
    return time.perf_counter() - began


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_at_any_point(path: Path, expected: list[np.ndarray], threads: int, long: bool) -> None:
    points = 25 if long else 10

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        with from_disk(path, 0.1, threads=threads) as model:
            same(outputs(model), expected)  # which may load kernels
            taken = timed(outputs, model)
            for turn in range(200):  # more than the points only where runs became much faster than the first one
                try:
                    signal.setitimer(signal.ITIMER_REAL, (0.02 + (turn % points) / points) * taken)
                    taken = min(taken, timed(outputs, model))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                same(outputs(model), expected)
                if turn >= points - 1 and interrupted >= 5:
                    break
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted >= 5


def test_faults_of_the_command(run: Run, path: Path, disk: FaultyPread, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reader_module.c_address
    monkeypatch.setattr(reader_module, "c_address", lambda name: disk.address if name == "pread" else real(name))
    monkeypatch.setattr(OpenRing, "several", lambda *_: [])
    command = path, "--prompt", "abc", "--max-tokens", 3, "--ram-budget", "2GiB"
    assert run(*command)[0] == 0
    loading = disk.calls
    disk.fault = failing(errno.EIO)
    code, _, err = run(*command)
    assert code == 3
    assert "cannot be read at byte" in err
    assert os.strerror(errno.EIO) in err
    last = disk.calls + loading // 2

    def interrupt(_read: Any, call: int) -> None:
        if call == last:
            os.kill(os.getpid(), signal.SIGINT)

    disk.fault = interrupt
    code, _, _ = run(*command)
    assert code == 130
