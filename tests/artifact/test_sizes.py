"""The list of arrays, spelled out for one decoder of each family."""

from synthetic import small_decoder

from pi_runtime.artifact.sizes import PARTS, ArraySpec, array_specs

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


def test_nbytes_counts_padded_rows() -> None:
    assert ArraySpec("f16", (40, 3)).nbytes == 40 * 64
    assert ArraySpec("f32", (5, 2, 17)).nbytes == 5 * 2 * 128
    assert ArraySpec("f32", (17,)).nbytes == 68
