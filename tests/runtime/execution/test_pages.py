"""The pool of pages: an allocation that fails, and what finalizers may do."""

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.buffers import Buffer
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS, Allowance, PagePool


def test_an_allocation_that_fails_takes_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = model.executor.new_pool().page_nbytes
    allowance = Allowance(5 * nbytes)
    pool = PagePool(model.manifest, allowance=allowance)
    held, real, good = pool.take(1), Buffer.in_ram, [1]

    def in_ram(buffer: Buffer) -> npt.NDArray[np.float32]:
        if not good:
            raise MemoryError
        good.pop()
        return real(buffer)

    monkeypatch.setattr(Buffer, "in_ram", in_ram)
    with pytest.raises(MemoryError):
        pool.take(3)
    assert (pool.in_use, allowance.left) == (1, 4 * nbytes)
    monkeypatch.undo()
    held += pool.take(4)
    assert (len(set(held)), pool.in_use, allowance.left) == (5, 5, 0)
    assert len({pool.address(page) for page in held}) == 5


def test_caches_that_are_dropped_while_two_pools_are_locked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector does it: each thread drops a cache of the pool that the other one is about to use."""
    pools = [PagePool(model.manifest) for _ in range(2)]
    caches: dict[str, list[KVCache]] = {}
    for name, pool in (("first", pools[1]), ("second", pools[0])):
        caches[name] = [KVCache(pool, PAGE_POSITIONS)]
        caches[name][0].reserve(1)
    both, real = threading.Barrier(2, timeout=30), Buffer.in_ram

    def in_ram(buffer: Buffer) -> npt.NDArray[np.float32]:
        both.wait()
        caches[threading.current_thread().name].clear()
        return real(buffer)

    monkeypatch.setattr(Buffer, "in_ram", in_ram)
    threads = [
        threading.Thread(target=pool.take, args=(1,), name=name, daemon=True)
        for name, pool in zip(("first", "second"), pools, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "each waits for the lock of the other"
    assert [pool.in_use for pool in pools] == [1, 1]


def test_a_pool_that_is_dropped_while_its_allowance_is_locked(model: Model) -> None:
    allowance = Allowance(1 << 30)
    pools = [PagePool(model.manifest, 1 << 20, allowance=allowance)]
    assert allowance.left < 1 << 30
    dropping = threading.Thread(target=pools.clear, daemon=True)
    with allowance._lock:
        dropping.start()
        dropping.join(30)
        assert not dropping.is_alive(), "a finalizer waits for a lock"
    assert allowance.left == 1 << 30


def test_pages_that_are_wanted_now_are_not_freed_for_others(tmp_path: Path) -> None:
    """A page of the first class is unused, and one of the second must be allocated."""
    path = random_artifact(tmp_path / "a.pi", small_decoder(n_layers=2, window=16, windowed_layers=(0,)))
    with load(path) as model:
        pool = PagePool(model.manifest)
        (page,) = pool.take(1, 0)
        pool.release(page)
        assert pool.take(1, 1)[0] == page
        assert pool.in_use == 2
