"""A run within a budget: what it takes, what it leaves in the page cache, what it tells, and how it bears faults."""

import ctypes
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import from_disk, rows_of
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import PIECE_NBYTES
from pi_runtime.artifact.schema import Text
from pi_runtime.errors import ArtifactError, UsageError
from pi_runtime.execution import devices, disk_ahead, ram_budget
from pi_runtime.execution.executor import SequenceStep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose FFNs are most of it."""
    decoder = small_decoder(d_model=128, d_ff=4096, n_layers=4, context_length=128)
    path = tmp_path_factory.mktemp("disk") / "model.pi"
    random_artifact(path, decoder, format="f16", ranks=[8] * 4, seed=5, scale=3.0, text=Text(prefix_ids=(), end_ids=()))
    return path


def decoded(model: Model, tokens: int = 8) -> list[np.ndarray]:
    cache = model.new_cache()
    return [model.decode(token, cache)[0] for token in range(tokens)]


def cached_pages(path: Path) -> int:
    """Pages of the FFNs' rows that are in the page cache."""
    with Artifact.open(path) as artifact, path.open("rb") as file:
        size = path.stat().st_size
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        begin = np.frombuffer(mapping, np.uint8).ctypes.data
        found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)) == 0
        rows = [a for name, a in artifact.manifest.arrays.items() if name.endswith(("ffn/first", "ffn/rest"))]
        return sum(int((found[a.offset // 4096 + 1 : (a.offset + a.nbytes) // 4096] & 1).sum()) for a in rows)


def evict(path: Path) -> None:
    """Drop the file's pages from the page cache, which the system does at once or a little later."""
    for _ in range(50):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(path) == 0:
            return
        time.sleep(0.1)
    pytest.skip("the page cache keeps the file")


def bytes_from_devices() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def test_what_is_read_is_counted_and_not_left_in_the_page_cache(path: Path) -> None:
    evict(path)
    with from_disk(path, 0.2) as model:
        reader = rows_of(model).reader
        if not reader.direct:
            pytest.skip("the file system has no direct reads")
        decoded(model, 2)
        before, counted = bytes_from_devices(), reader.bytes_read
        decoded(model)
        found, counted = bytes_from_devices() - before, reader.bytes_read - counted
        assert counted > 0
        assert abs(found - counted) <= 0.01 * counted
    assert cached_pages(path) == 0


def test_buffered_reads(path: Path) -> None:
    with load(path, device="cpu") as model:
        expected = decoded(model)
    with from_disk(path, 0.2, reader={"direct": False}) as model:
        np.testing.assert_array_equal(decoded(model), expected)


def test_figures(path: Path) -> None:
    with from_disk(path, 0.3) as model:
        assert model.executor.disk is not None
        assert (model.executor.disk.hit_rate, model.executor.disk.wait_share) == (None, None)
        decoded(model, 3)
        disk = model.executor.disk
    assert disk.tokens == 3
    assert disk.hit_rate is not None
    assert 0 < disk.hit_rate < 1
    assert disk.bytes_per_token is not None
    assert disk.misses * 256 <= disk.bytes_read
    assert disk.wait_share is not None
    assert 0 < disk.wait_share < 1


def test_the_tokens_of_a_block_share_their_reads(path: Path) -> None:
    """A row that several of them need is read once: dense, all of them need all."""
    with from_disk(path, 0.2, "dense") as model:
        cache, reader = model.new_cache(), rows_of(model).reader

        def read_for(tokens: int) -> int:
            before, ids = reader.bytes_read, np.arange(tokens) + cache.length
            model.executor.step([SequenceStep(cache=cache, tokens=ids, select=True, logits="all")])
            return reader.bytes_read - before

        read_for(1)
        one = read_for(1)
        assert one > 0
        assert read_for(8) <= 1.05 * one


def test_stats_of_the_command(run: Run, path: Path) -> None:
    flags = "--max-tokens", "4", "--speculate", "off", "--json", "--temperature", "0"
    code, out, err = run(path, "--prompt", "abc", "--ram-budget", "2GiB", *flags)
    assert code == 0, err
    answer = json.loads(out)
    assert answer["stats"]["disk_hit_rate"] == 1
    assert answer["stats"]["disk_bytes_per_token"] == 0
    code, out, _ = run(path, "--prompt", "abc", *flags)
    assert code == 0
    assert json.loads(out)["text"] == answer["text"]
    assert "disk_hit_rate" not in json.loads(out)["stats"]


def test_a_fault_is_an_error_and_afterwards_the_text_is_the_same(path: Path) -> None:
    libc, state = ctypes.CDLL(None, use_errno=True), {"broken": False}
    kind = ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
    )
    libc.pread.restype = ctypes.c_ssize_t
    libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]

    def pread(*arguments: Any) -> int:
        if state["broken"]:
            ctypes.set_errno(errno.EIO)
            return -1
        return int(libc.pread(*arguments))

    callback = kind(pread)
    with load(path, device="cpu") as model:
        expected = decoded(model)
    with from_disk(path, 0.2, reader={"pread": ctypes.cast(callback, ctypes.c_void_p).value, "workers": 2}) as model:
        state["broken"] = True
        with pytest.raises(ArtifactError, match="cannot be read"):
            decoded(model)
        state["broken"] = False
        np.testing.assert_array_equal(decoded(model), expected)


def test_ctrl_c_while_waiting_for_the_disk(path: Path) -> None:
    libc, state = ctypes.CDLL(None, use_errno=True), {"slow": False}
    kind = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    libc.pread.restype = ctypes.c_ssize_t
    libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]

    def pread(*arguments: Any) -> int:
        if state["slow"]:
            time.sleep(0.5)
        return int(libc.pread(*arguments))

    callback = kind(pread)
    with load(path, device="cpu") as model:
        expected = decoded(model)
    with from_disk(path, 0.2, reader={"pread": ctypes.cast(callback, ctypes.c_void_p).value, "workers": 2}) as model:
        decoded(model, 1)
        state["slow"] = True
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            decoded(model)
        assert time.monotonic() - began < 5
        state["slow"] = False
        np.testing.assert_array_equal(decoded(model), expected)


def test_a_model_larger_than_the_free_memory_runs_from_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = path.stat().st_size
    for free, fixed, from_disk_now in ((nbytes, 0, False), (nbytes - 1, 0, True), (nbytes - 1, 1 << 40, False)):
        monkeypatch.setattr(devices, "free_memory", lambda free=free: free)
        monkeypatch.setattr(ram_budget, "fixed_bytes", lambda *_, fixed=fixed: fixed)
        with load(path, device="cpu", context=32) as model:
            assert (model.executor.disk is not None) == from_disk_now
            assert (model.notice is not None) == from_disk_now


def test_the_faster_way_is_taken_and_the_other_tried_again() -> None:
    way, taken = disk_ahead.FasterWay(), []
    for token in range(200):
        taken.append(way.second)
        fast = taken[-1] if token < 100 else not taken[-1]
        way.count(9.0 if token < 4 else 0.1 if fast else 0.2)
    assert taken[:12] == [False] * 4 + [True, False] * 4
    assert all(taken[12:64])
    assert taken[64:72] == [False, True] * 4
    assert all(taken[72:100])
    assert sum(taken[140:]) <= 8


def test_a_text_that_grows_easier_favours_neither_way() -> None:
    """Both ways take equally long, and every token less than the one before: few tokens go the second way."""
    way, taken = disk_ahead.FasterWay(), []
    for token in range(64):
        taken.append(way.second)
        way.count(1.0 - token // 2 / 100)
    assert not any(taken[12:])


def test_a_closed_model_refuses(path: Path) -> None:
    model = from_disk(path, 0.2)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        decoded(model, 1)


def test_the_smallest_budget_is_named(run: Run, path: Path) -> None:
    code, _, err = run(path, "--prompt", "a", "--ram-budget", "1MiB")
    assert code == 4
    assert "expected: at least" in err
    assert "--ram-budget" in err


_PEAK = r"""
import json, re, sys
from pathlib import Path
from numba.core.event import install_recorder
from pi_runtime import Engine, load
from pi_runtime.errors import DoesNotFitError
path, more, kv = sys.argv[1], int(sys.argv[2]), 16 << 20
try:
    load(path, ram_budget=1, kv_budget=kv)
except DoesNotFitError as error:
    budget = int(re.search("[0-9]+", str(error.expected))[0]) + more
with install_recorder("numba:compile") as compiled, load(path, ram_budget=budget, kv_budget=kv) as model:
    model.warm_up()
    if len(sys.argv) > 3:
        with Engine(model, slots=16) as engine:
            answers = [engine.generate([1 + n] * 60, max_tokens=20) for n in range(32)]
            texts = ["".join(answer) for answer in answers]
            assert engine.stats.pages_used > 16
    else:
        text = "".join(model.generate([1] * 90, max_tokens=20))
    plan, disk = model.executor.rows.plan, model.executor.disk
peak = int(re.search(r"VmHWM:\s+([0-9]+)", Path("/proc/self/status").read_text())[1]) << 10
found = {"budget": budget, "peak": peak, "fixed": plan.fixed, "read": disk.bytes_read}
print(json.dumps({**found, "compiled": len(compiled.buffer)}))
"""


@pytest.mark.parametrize("serves", [False, True])
def test_the_peak_stays_within_the_budget(path: Path, serves: bool) -> None:
    command = [sys.executable, "-c", _PEAK, str(path), str(8 << 20), *(["engine"] if serves else [])]
    for _ in range(5):  # compiling takes memory, and which kernels an engine needs depends on who comes when
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        if not found["compiled"]:
            break
    assert found["compiled"] == 0
    assert found["read"] > 0
    assert found["peak"] <= 1.05 * found["budget"], found


@pytest.mark.parametrize("reader", [{}, {"ring": False, "workers": 1}, {"direct": False, "workers": 1}])
def test_rows_wider_than_a_usual_read(tmp_path: Path, reader: dict[str, Any]) -> None:
    decoder = small_decoder(d_model=20_000, d_ff=40, n_layers=1, context_length=64)
    path = random_artifact(tmp_path / "wide.pi", decoder, text=Text(prefix_ids=(), end_ids=()))
    with load(path, device="cpu") as model:
        wanted = decoded(model, 2)
    with from_disk(path, 0, reader=reader) as model:
        assert rows_of(model).store.arenas["rest"].nbytes > PIECE_NBYTES
        assert rows_of(model).reader.piece >= rows_of(model).store.arenas["rest"].nbytes
        for found, logits_V in zip(decoded(model, 2), wanted, strict=True):
            np.testing.assert_array_equal(found, logits_V)
