"""Products of queries with a page's keys: the fast kernel against the definition, and the same bits in company."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.ops.key_products import portable_key_products, vector_key_products

COMPUTE = vector_key_products if ISA.lanes else portable_key_products


def products(compute: Any, keys_ES: np.ndarray, q_NE: np.ndarray, index: list[int]) -> np.ndarray:
    fmt, number = "f16" if keys_ES.dtype == np.float16 else "f32", np.array(index)
    out, at = np.full((len(index), POSITIONS), np.nan, np.float32), keys_ES.ctypes.data
    addresses = q_NE.ctypes.data, number.ctypes.data
    compute(FORMATS[fmt].code, at, at, at, len(keys_ES), *addresses, len(index), out.ctypes.data)
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 90), st.lists(st.integers(0, 29), min_size=1, max_size=40), st.sampled_from(["f2", "f4"]))
def test_a_query_has_the_same_bits_alone_and_in_company(width: int, index: list[int], dtype: str) -> None:
    rng = np.random.default_rng(width)
    keys_ES, q_NE = rng.standard_normal((width, POSITIONS)).astype(dtype), rng.standard_normal((30, width), np.float32)
    found = products(COMPUTE, keys_ES, q_NE, index)
    wanted = q_NE[index].astype(np.float64) @ keys_ES
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max()))
    np.testing.assert_allclose(products(portable_key_products, keys_ES, q_NE, index), wanted, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(found, np.concatenate([products(COMPUTE, keys_ES, q_NE, [n]) for n in index]))


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_positions_do_not_mix(dtype: str) -> None:
    keys_ES, q_NE = np.full((40, POSITIONS), np.nan, dtype), np.ones((1, 40), np.float32)
    keys_ES[:, 3] = 2
    found = products(COMPUTE, keys_ES, q_NE, [0])[0]
    assert found[3] == 80
    assert np.isnan(np.delete(found, 3)).all()
