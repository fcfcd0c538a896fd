"""The list of arrays, spelled out for one decoder of each family."""

import pytest
from support.synthetic import small_decoder

from pi_runtime.artifact.sizes import (
    PARTS,
    ArraySpec,
    FfnBytes,
    active_parameters,
    array_specs,
    is_scales,
    parameters,
    scales_name,
)

F16 = dict.fromkeys(PARTS, "f16")


def test_gated_untied_with_predictor() -> None:
    specs = array_specs(small_decoder(n_layers=1), {**F16, "head": "bf16"}, [3], True)
    assert specs == {
        "embedding": ArraySpec("f16", (257, 32)),
        "layers/0/attention/norm/weight": ArraySpec("f32", (32,)),
        "layers/0/attention/qkv": ArraySpec("f16", (64, 32)),
        "layers/0/attention/out": ArraySpec("f16", (32, 32)),
        "layers/0/ffn/norm/weight": ArraySpec("f32", (32,)),
        "layers/0/ffn/first": ArraySpec("f16", (40, 32)),
        "layers/0/ffn/rest": ArraySpec("f16", (40, 2, 32)),
        "layers/0/ffn/order": ArraySpec("u32", (40,)),
        "layers/0/ffn/counts": ArraySpec("u64", (40,)),
        "layers/0/predictor/down": ArraySpec("f16", (3, 32)),
        "layers/0/predictor/up": ArraySpec("f16", (40, 3)),
        "layers/0/predictor/bias": ArraySpec("f32", (40,)),
        "final_norm/weight": ArraySpec("f32", (32,)),
        "head": ArraySpec("bf16", (257, 32)),
    }


def test_zeros_of_dense_layers_and_experts_that_a_token_does_not_take_are_no_parameters_of_it() -> None:
    experts = {"n_experts": 7, "experts_per_token": 3, "experts_shared": 1, "router_score": "sigmoid"}
    dense = {"dense_layers": (0,), "dense_ff": 100}
    one = small_decoder(n_layers=1)
    around = parameters(one) - 3 * 40 * 32
    both = small_decoder(n_layers=2, **experts, **dense)
    attention = parameters(small_decoder(n_layers=2)) - parameters(one) - 3 * 40 * 32
    assert parameters(both) == around + attention + 3 * 32 * (100 + 7 * 40) + 6 * 32
    assert active_parameters(both) == around + attention + 3 * 32 * (100 + 3 * 40) + 6 * 32
    assert active_parameters(one) == parameters(one)


def test_plain_tied_with_biases() -> None:
    specs = array_specs(small_decoder("opt", n_layers=1), F16, [None], False)
    assert specs == {
        "embedding": ArraySpec("f16", (257, 32)),
        "positions": ArraySpec("f16", (66, 32)),
        "layers/0/attention/norm/weight": ArraySpec("f32", (32,)),
        "layers/0/attention/norm/bias": ArraySpec("f32", (32,)),
        "layers/0/attention/qkv": ArraySpec("f16", (64, 32)),
        "layers/0/attention/qkv_bias": ArraySpec("f32", (64,)),
        "layers/0/attention/out": ArraySpec("f16", (32, 32)),
        "layers/0/attention/out_bias": ArraySpec("f32", (32,)),
        "layers/0/ffn/norm/weight": ArraySpec("f32", (32,)),
        "layers/0/ffn/norm/bias": ArraySpec("f32", (32,)),
        "layers/0/ffn/first": ArraySpec("f16", (40, 32)),
        "layers/0/ffn/rest": ArraySpec("f16", (40, 1, 32)),
        "layers/0/ffn/first_bias": ArraySpec("f32", (40,)),
        "layers/0/ffn/down_bias": ArraySpec("f32", (32,)),
        "final_norm/weight": ArraySpec("f32", (32,)),
        "final_norm/bias": ArraySpec("f32", (32,)),
    }


def test_gated_with_biases_has_one_for_up() -> None:
    specs = array_specs(small_decoder(n_layers=1, ffn_bias=True), F16, [None], False)
    assert specs["layers/0/ffn/up_bias"] == ArraySpec("f32", (40,))


def test_quantised_matrices_have_scales_beside_them() -> None:
    formats = {"embedding": "q8", "attention": "q4", "ffn": "q8", "head": "f16", "predictor": "q4"}
    specs = array_specs(small_decoder(n_layers=1, d_model=72), formats, [3], True)
    assert list(specs.items()) == [
        ("embedding", ArraySpec("q8", (257, 72))),
        ("embedding_scales", ArraySpec("scale", (257, 3))),
        ("layers/0/attention/norm/weight", ArraySpec("f32", (72,))),
        ("layers/0/attention/qkv", ArraySpec("q4", (64, 72))),
        ("layers/0/attention/qkv_scales", ArraySpec("scale", (64, 3))),
        ("layers/0/attention/out", ArraySpec("q4", (72, 32))),
        ("layers/0/attention/out_scales", ArraySpec("scale", (72, 1))),
        ("layers/0/ffn/norm/weight", ArraySpec("f32", (72,))),
        ("layers/0/ffn/first", ArraySpec("q8", (40, 72))),
        ("layers/0/ffn/first_scales", ArraySpec("scale", (40, 3))),
        ("layers/0/ffn/rest", ArraySpec("q8", (40, 2, 72))),
        ("layers/0/ffn/rest_scales", ArraySpec("scale", (40, 2, 3))),
        ("layers/0/ffn/order", ArraySpec("u32", (40,))),
        ("layers/0/ffn/counts", ArraySpec("u64", (40,))),
        ("layers/0/predictor/down", ArraySpec("q4", (3, 72))),
        ("layers/0/predictor/down_scales", ArraySpec("scale", (3, 3))),
        ("layers/0/predictor/up", ArraySpec("q4", (40, 3))),
        ("layers/0/predictor/up_scales", ArraySpec("scale", (40, 1))),
        ("layers/0/predictor/bias", ArraySpec("f32", (40,))),
        ("final_norm/weight", ArraySpec("f32", (72,))),
        ("head", ArraySpec("f16", (257, 72))),
    ]
    assert {name for name in specs if is_scales(name)} == {scales_name(n) for n, s in specs.items() if s.scales}


def test_positions_are_quantised_like_the_embedding() -> None:
    specs = array_specs(small_decoder("opt", n_layers=1), {**F16, "embedding": "q4"}, [None], False)
    assert specs["positions"] == ArraySpec("q4", (66, 32))
    assert specs["positions_scales"] == ArraySpec("scale", (66, 1))


@pytest.mark.parametrize(
    ("fmt", "columns", "row", "scales"),
    [
        ("q8", 1, 64, 8),
        ("q8", 64, 64, 8),
        ("q8", 65, 128, 8),
        ("q8", 129, 192, 16),
        ("q4", 1, 32, 8),
        ("q4", 128, 64, 8),
        ("q4", 129, 96, 16),
        ("q4", 4096, 2048, 256),
    ],
)
def test_bytes_of_a_quantised_row(fmt: str, columns: int, row: int, scales: int) -> None:
    spec = ArraySpec(fmt, (3, columns))
    assert spec.scales is not None
    assert (spec.nbytes, spec.scales.nbytes, spec.nbytes_with_scales) == (3 * row, 3 * scales, 3 * (row + scales))


def test_bytes_of_an_ffn_count_scales() -> None:
    """d_model 72: a row of q8 is 128 bytes and 8 of scales, of q4 64 and 8; rank 3: 32 and 8."""
    neuron = FfnBytes.of(small_decoder(d_model=72), {**F16, "ffn": "q8", "predictor": "q4"})
    assert (neuron.first, neuron.rest) == (136, 272)
    assert neuron.predictor_row(3) == 32 + 8 + 4
    assert neuron.predictor(3) == 3 * (64 + 8) + 40 * (32 + 8 + 4)


def test_nbytes_counts_padded_rows() -> None:
    assert ArraySpec("f16", (40, 3)).nbytes == 40 * 64
    assert ArraySpec("f32", (5, 2, 17)).nbytes == 5 * 2 * 128
    assert ArraySpec("f32", (17,)).nbytes == 68
