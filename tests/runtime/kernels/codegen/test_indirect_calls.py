"""Calls by address: compiled when first called, once for all callers; whatever goes wrong then comes out."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import pytest
from numba import prange

from pi_runtime.kernels.codegen import indirect_calls
from pi_runtime.kernels.codegen.indirect_calls import by_address, compile_all, watched

Floats = npt.NDArray[np.float32]


class Pair(NamedTuple):
    factor: int
    offset_D: Floats


def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    """Of a function without the code that Python calls it by, as kernels are compiled."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **more}


def scale(pair: Pair, by: np.float32, x_TD: Floats, flat: Floats) -> None:
    for t in range(x_TD.shape[0]):
        for j in range(x_TD.shape[1]):
            x_TD[t, j] = x_TD[t, j] * pair.factor * by + pair.offset_D[j]
    flat[0] = x_TD.size


def test_one_compilation_when_first_called_for_all_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = numba.njit(**options(tmp_path, monkeypatch))(scale)
    far = by_address(inside)

    @numba.njit(nogil=True)
    def one(run: bool, pair: Pair, x_TD: Floats, flat: Floats) -> None:
        if run:
            far(pair, 2, x_TD, flat)

    @numba.njit(nogil=True)
    def other(pair: Pair, x_TD: Floats, flat: Floats) -> None:
        far(pair, 0.5, x_TD, flat)

    pair, x_TD, flat = Pair(3, np.float32([1, 10])), np.float32([[1, 2], [3, 4]]), np.zeros(1, np.float32)
    one(False, pair, x_TD, flat)
    assert not inside.signatures
    one(True, pair, x_TD, flat)
    np.testing.assert_array_equal(x_TD, [[7, 22], [19, 34]])
    other(pair, x_TD, flat)
    np.testing.assert_array_equal(x_TD, [[11.5, 43], [29.5, 61]])
    assert flat == [4]
    assert len(inside.signatures) == 1


def twice(n: int, x_D: Floats) -> None:
    x_D[n] *= 2


def halve(n: int, x_D: Floats) -> None:
    x_D[n] /= 2


def test_who_watches_is_told_of_each_that_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far, other = (by_address(numba.njit(**options(tmp_path, monkeypatch))(f)) for f in (twice, halve))

    @numba.njit(nogil=True)
    def call(x_D: Floats) -> None:
        far(0, x_D)
        other(1, x_D)

    told: list[tuple[int, int]] = []
    with watched(lambda ready, total: told.append((ready, total))):
        call(np.ones(2, np.float32))
        call(np.ones(2, np.float32))
    ready, total = told[0]
    assert told == [(ready, total), (ready + 1, total)]
    assert 0 < ready < total


def test_all_are_compiled_callers_last(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    kernels = [SimpleNamespace(compile=partial(order.append, name)) for name in ("innermost", "its caller")]
    monkeypatch.setattr(indirect_calls, "_KERNELS", kernels)
    compile_all()
    assert order == ["innermost", "its caller"]


def test_threads_find_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = numba.njit(**options(tmp_path, monkeypatch))(twice)
    far = by_address(inside)

    def loop(x_D: Floats) -> None:
        for n in prange(x_D.shape[0]):
            far(n, x_D)

    all_of_them = by_address(numba.njit(**options(tmp_path, monkeypatch, parallel=True))(loop), [far])

    @numba.njit(nogil=True)
    def call(x_D: Floats) -> None:
        all_of_them(x_D)

    none_D, x_D = np.empty(0, np.float32), np.arange(100, dtype=np.float32)
    call(none_D)
    assert len(inside.signatures) == 1
    call(x_D)
    np.testing.assert_array_equal(x_D, 2 * np.arange(100))


def test_other_arguments_than_annotated_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout would be read as if it were contiguous."""
    far = by_address(numba.njit(**options(tmp_path, monkeypatch))(twice))
    apart = numba.njit(lambda x_TD: far(0, x_TD[:, 0]))
    whole = numba.njit(lambda x_TD: far(0, x_TD))
    more = numba.njit(lambda x_TD: far(0, 1, x_TD[0]))
    constant_TD = np.ones((2, 3), np.float32)
    constant_TD.flags.writeable = False
    for call, x_TD, found in (
        (apart, np.ones((2, 3), np.float32), r"argument 1 .*float32, 1d, C.*found .*float32, 1d, A"),
        (apart, constant_TD, "argument 1 .*found readonly"),
        (whole, np.ones((2, 3), np.float32), "argument 1 .*found .*float32, 2d, C"),
        (whole, np.ones(3), "argument 1 .*found .*float64, 1d, C"),
        (more, np.ones((2, 3), np.float32), "twice takes 2 arguments, found 3"),
    ):
        with pytest.raises(numba.TypingError, match=found):
            call(x_TD)


def at_least(limit: int, x_D: Floats) -> None:
    if x_D[0] < limit:
        raise ValueError("too small")


def test_its_errors_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = by_address(numba.njit(**options(tmp_path, monkeypatch))(at_least))

    @numba.njit(nogil=True)
    def check(x_D: Floats) -> int:
        far(5, x_D)
        return 1

    assert check(np.float32([5])) == 1
    with pytest.raises(ValueError, match="too small"):
        check(np.float32([4]))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_ends_a_compilation_comes_out_and_the_next_call_compiles(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = numba.njit(**options(tmp_path, monkeypatch))(twice)
    far = by_address(inside)

    @numba.njit(nogil=True)
    def call(x_D: Floats) -> int:
        far(0, x_D)
        return 1

    def stopped(*_: object) -> None:
        raise error

    x_D = np.float32([3])
    call.compile((numba.float32[::1],))
    with monkeypatch.context() as m:
        m.setattr(inside._compiler, "compile", stopped)
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                call(x_D)
            assert raised.value is error
    assert call(x_D) == 1
    assert x_D == [6]
