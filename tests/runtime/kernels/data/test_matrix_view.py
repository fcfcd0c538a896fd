"""Where rows and vectors lie."""

import numpy as np
import pytest
from support.stored import ROW_FORMATS, WEIGHT_FORMATS, store

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.data import matrix_view
from pi_runtime.kernels.data.matrix_view import rows_from, strided_rows, vector


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_rows_are_as_far_apart_as_the_format_says(fmt: str, columns: int) -> None:
    assert matrix_view.row_stride(FORMATS[fmt].code, columns) == FORMATS[fmt].nbytes((1, columns))
    if FORMATS[fmt].quantised:
        f, m = FORMATS[fmt], matrix_view.matrix(FORMATS[fmt].code, 0, 0, columns)
        assert m.scales_stride == FORMATS[f.scale_format].nbytes(f.scales_shape((1, columns)))
        assert m.offsets == (m.scales_stride // 2 if f.offset and not f.grouped else 0)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_some_of_the_rows(fmt: str) -> None:
    """`rest` has k rows a neuron: rows of one kind are k strides apart, in values and in scales."""
    rest = store(fmt, np.random.default_rng(0).standard_normal((7, 3, 70)))
    for which in range(3):
        part = strided_rows(rest.view, 3, which)
        for neuron in range(7):
            for m, row in ((part, neuron), (rows_from(part, neuron), 0), (rows_from(rest.view, 3 * neuron + which), 0)):
                assert m.values + row * m.stride == rest.stored[neuron, which].ctypes.data
                if rest.scales is not None:
                    assert m.scales + row * m.scales_stride == rest.scales[neuron, which].ctypes.data
                assert (m.fmt, m.columns) == (rest.fmt, 70)


def test_a_vector() -> None:
    b_D = np.float32([1, 2, 3])
    np.testing.assert_array_equal(vector(b_D.ctypes.data, 3), b_D)
