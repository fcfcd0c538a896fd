"""Layers of 4 bits become q4z, or q4, bit for bit where each block of 32 columns lies in one group."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.quantised_files import FORMS, Form, layer_tensors

from pi_compile.checkpoint.quantised.layouts import LAYOUTS, QuantisedMatrix
from pi_compile.checkpoint.quantised.scheme import Scheme
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import dequantise, pack_rows


def opened(form: Form, columns: int = 256) -> tuple[QuantisedMatrix, np.ndarray]:
    parts, meant = layer_tensors(form, np.random.default_rng(0), 24, columns)
    method = form.config["quant_method"]
    stored_zero = 0 if form.config.get("checkpoint_format") == "gptq_v2" or method != "gptq" else 1
    tensors = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in parts.items()}
    scheme = Scheme(method=method, bits=form.bits, stored_zero=stored_zero)
    return LAYOUTS[method][0].open(tensors, scheme), meant.numpy()


@pytest.mark.parametrize("groups", [2, 4, 8], ids=["of 128", "of 64", "of 32"])
@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq", "packed-zeros", "packed-old-zeros"])
def test_zeros_stay(name: str, groups: int) -> None:
    matrix, meant = opened(replace(FORMS[name], groups=groups))
    for rows in (slice(None), slice(3, 9), np.array([5, 2, 17])):
        found = matrix.on_grid(FORMATS["q4z"], rows)
        assert found is not None
        values = dequantise(FORMATS["q4z"], *pack_rows(FORMATS["q4z"], *found), 256)
        np.testing.assert_array_equal(values, matrix[rows])
        np.testing.assert_array_equal(values, meant[rows])
    assert matrix.on_grid(FORMATS["q4"], slice(None)) is None
    assert matrix.grids == (("q4z",) if FORMS[name].scale == torch.float16 else ())


def test_symmetric_layers_are_q4_as_well() -> None:
    matrix, meant = opened(replace(FORMS["packed"], groups=4, scale=torch.float16))
    for name in ("q4", "q4z"):
        found = matrix.on_grid(FORMATS[name], slice(None))
        assert found is not None
        np.testing.assert_array_equal(dequantise(FORMATS[name], *pack_rows(FORMATS[name], *found), 256), meant)


@pytest.mark.parametrize(
    "form",
    [
        replace(FORMS["gptq"], groups=16),
        replace(FORMS["gptq-act-order"], groups=4),
        replace(FORMS["gptq-8-bits"], groups=4),
        replace(FORMS["gptq"], groups=4, scale=torch.float32),
    ],
    ids=["groups of 16", "act-order", "8 bits", "scales that are no float16"],
)
def test_what_does_not_fit_is_quantised(form: Form) -> None:
    assert opened(form)[0].on_grid(FORMATS["q4z"], slice(None)) is None
    assert not opened(form)[0].grids


def test_other_formats_and_other_widths() -> None:
    matrix, _ = opened(replace(FORMS["gptq"], groups=4))
    assert matrix.on_grid(FORMATS["q5"], slice(None)) is None
    narrow, _ = opened(replace(FORMS["gptq"], groups=1), columns=72)
    assert narrow.on_grid(FORMATS["q4z"], slice(None)) is None
