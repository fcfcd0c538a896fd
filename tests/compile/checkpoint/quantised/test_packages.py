"""Quantised tensors as the packages that write them unpack them: `nox -s quantised` has these packages.

They multiply in the format of the scales, so what is read here is rounded to it once, and equal to the last bit.
"""

from collections.abc import Mapping

import pytest

pytest.importorskip("torch")

import torch

from pi_compile.checkpoint.quantised.layouts import LAYOUTS
from pi_compile.checkpoint.quantised.scheme import Scheme
from pi_compile.checkpoint.tensors import Array, stored_of_torch

ROWS, COLUMNS, GROUP = 72, 96, 32


def drawn(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def scales(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.001).to(dtype)


def stored_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: stored_of_torch(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("permuted", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, permuted: bool) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, METHOD

    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    group = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    if permuted:
        group = group[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))]
    scale = scales(ROWS, COLUMNS // GROUP, dtype=torch.float16).float() * 16 / (1 << bits)
    zero = drawn(1, 1 << bits, ROWS, COLUMNS // GROUP)
    stored = TorchLinear(
        bits=bits, group_size=GROUP, sym=False, desc_act=permuted, in_features=COLUMNS, out_features=ROWS, bias=False,
        pack_dtype=torch.int32, register_buffers=True, format=FORMAT.GPTQ_V2, method=METHOD.GPTQ,
    )  # fmt: skip
    stored.pack_original(linear, scale, zero.float(), group)
    stored.post_init()
    tensors = {name: getattr(stored, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    (layout,) = LAYOUTS["gptq"]
    ours = layout.open(stored_tensors(tensors), Scheme(method="gptq", bits=bits))
    assert torch.equal(torch.from_numpy(ours[:]).half(), stored.dequantize_weight().t().half())


def test_awq() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    words = drawn(-(2**31), 2**31 - 1, COLUMNS, ROWS // 8)
    zeros = drawn(-(2**31), 2**31 - 1, COLUMNS // GROUP, ROWS // 8, seed=3)
    scale = scales(COLUMNS // GROUP, ROWS, dtype=torch.float16)
    (layout,) = LAYOUTS["awq"]
    ours = layout.open(
        stored_tensors({"qweight": words, "qzeros": zeros, "scales": scale}), Scheme(method="awq", bits=4)
    )
    assert torch.equal(torch.from_numpy(ours[:]).half(), dequantize_gemm(words, zeros, scale, 4, GROUP).t())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("strategy", ["channel", "group"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors(dtype: torch.dtype, bits: int, strategy: str, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=GROUP if strategy == "group" else None
    )
    middle, groups = 1 << bits - 1, COLUMNS // GROUP if strategy == "group" else 1
    tensors = {
        "weight_packed": pack_to_int32(drawn(-middle, middle, ROWS, COLUMNS).to(torch.int8), bits),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
        "weight_scale": scales(ROWS, groups, dtype=dtype),
    }
    if not symmetric:
        zero = drawn(-middle, middle, ROWS, groups, seed=4).to(torch.int8)
        tensors["weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0)
    theirs = PackedQuantizationCompressor.decompress(tensors, QuantizationScheme(targets=["Linear"], weights=args))
    ours = LAYOUTS["compressed-tensors"][0].open(stored_tensors(tensors), Scheme(method="compressed-tensors"))
    assert torch.equal(torch.from_numpy(ours[:]).to(dtype), theirs["weight"])
