"""Keys of `quantization_config`: those that packages write are read, unknown ones are refused unless they are null."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.quantised_files import FORMS

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.quantised.scheme import KEY, Scheme, read_scheme
from pi_compile.errors import CheckpointError

SCHEMES: dict[str, dict[str, Any]] = {
    **{name: dict(FORMS[name].config) for name in ("gptq", "awq", "packed")},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": None},
    "bitnet": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
}
WHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in SCHEMES},
    "a group": ("packed", ("config_groups", "group_0")),
    "a group's weights": ("packed", ("config_groups", "group_0", "weights")),
}
"""Objects whose keys are read: the scheme, and the way to the object in it."""


def scheme_of(fields: dict[str, Any]) -> Scheme | None:
    return read_scheme(Config(Path("config.json"), {KEY: json.loads(json.dumps(fields, default=lambda v: v.value))}))


def changed(where: str, key: str, value: object) -> dict[str, Any]:
    scheme, way = WHERE[where]
    found = inner = deepcopy(SCHEMES[scheme])
    for name in way:
        inner = inner[name]
    inner[key] = value
    return found


@pytest.mark.parametrize("where", WHERE)
def test_an_unknown_key_counts_unless_it_is_null(where: str) -> None:
    assert scheme_of(changed(where, "rotation", None)) == scheme_of(SCHEMES[WHERE[where][0]])
    for value in (False, True, 0, 1, "", "none", [], {}):
        with pytest.raises(CheckpointError, match="rotation: keys whose meaning is known"):
            scheme_of(changed(where, "rotation", value))


@pytest.mark.parametrize(
    ("where", "key", "neutral", "others"),
    [
        ("gptq", "dynamic", ({}, False, None), ({"-:.*down.*": {}}, True, 0)),
        ("gptq", "desc_act", (False, None), ("yes", 0)),
        ("gptq", "extension", ({}, None), ({"a": 1}, "a")),
        ("gptq", "is_marlin_format", (False, None), (True, 1)),
        ("awq", "is_marlin_format", (False,), (True,)),
        ("awq", "desc_act", (False, None), (True, 1)),
        ("packed", "kv_cache_scheme", ({}, None), ({"num_bits": 8}, "FP8", False)),
        ("packed", "transform_config", ({}, None), ({"config_groups": {}}, [])),
        ("bitnet", "quantization_mode", ("offline", None), ("later", False)),
        ("bitnet", "use_rms_norm", (False, None), (True, 0)),
        ("a group", "format", ("pack-quantized", "int-quantized", None), ("float-quantized", False)),
        ("a group's weights", "dynamic", (False, None), (True, "local")),
        ("a group's weights", "symmetric", (True, None), ("no", 1)),
        ("a group's weights", "type", ("int",), ("float", False)),
        ("a group's weights", "block_structure", (None,), ([128, 128], "2:4", False)),
    ],
)
def test_keys_that_count_unless_they_are_neutral(
    where: str, key: str, neutral: tuple[Any, ...], others: tuple[Any, ...]
) -> None:
    for value in neutral:
        assert scheme_of(changed(where, key, value)) == scheme_of(SCHEMES[WHERE[where][0]]), value
    for value in others:
        with pytest.raises(CheckpointError, match=f"{key}: "):
            scheme_of(changed(where, key, value))


@pytest.mark.parametrize("method", ["gptq", "awq", "mxfp4", "bitnet"])
def test_what_transformers_writes_is_read(method: str) -> None:
    tf = pytest.importorskip("transformers")
    written = {
        "gptq": lambda: tf.GPTQConfig(bits=4),
        "awq": lambda: tf.AwqConfig(bits=4),
        "mxfp4": tf.Mxfp4Config,
        "bitnet": tf.BitNetQuantConfig,
    }[method]().to_dict()
    found = scheme_of(written)
    assert found is not None
    assert found.method == method


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_gptqmodel_writes_is_read(method: str) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.config import FORMAT, METHOD, QuantizeConfig

    form = {"gptq": FORMAT.GPTQ, "awq": FORMAT.GEMM}[method]
    found = scheme_of(QuantizeConfig(bits=4, quant_method=METHOD(method), format=form, offload_to_disk=False).to_dict())
    assert found is not None
    assert (found.method, found.bits) == (method, 4)


@pytest.mark.parametrize("activations", [False, True])
def test_what_compressed_tensors_writes_is_read(activations: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    weights = QuantizationArgs(num_bits=8, strategy="group", group_size=32, symmetric=False, actorder="weight")
    inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if activations else None
    group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format="pack-quantized")
    found = scheme_of(QuantizationConfig(config_groups={"a": group}, format="pack-quantized").model_dump())
    assert found is not None
    assert (found.layers[0].permuted, found.layers[0].has_zeros) == (False, True)
