"""The table of buffers: what is counted is what is allocated, and it follows from the model alone."""

import numpy as np
import pytest
from support.synthetic import small_decoder

from pi_runtime.artifact.buffers import (
    Buffer,
    cache_format,
    cpu_workspace,
    kv_bytes,
    kv_cache,
    kv_page,
    rotary_table,
    rotary_tables,
    table_bytes,
    workspace_bytes,
)
from pi_runtime.artifact.footprint import GEMM_NEURONS, POSITIONS, PartBytes
from pi_runtime.artifact.gpu_buffers import (
    WEIGHT_ALIGN,
    gpu_workspace_bytes,
    streamed_bytes,
    weight_chunk,
    weight_padding,
)
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.kernels.data.workspace import Workspace, allocate_workspace

SHAPES = {"plain": {}, "experts": {"n_experts": 3, "experts_per_token": 2}, "narrow": {"d_embedding": 16}}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_cpus_workspace_is_what_is_counted(family: str, shape: dict[str, int]) -> None:
    decoder = small_decoder(family, d_ff=200, **shape)
    workspace = allocate_workspace(decoder, 7, tokens=5)
    assert tuple(cpu_workspace(decoder, 7, 5)) == Workspace._fields
    allocated = sum(array.nbytes for array in (*workspace, *rotary_table(decoder, 50)))
    assert allocated == workspace_bytes(decoder, 7, 5, 50)
    assert [b.shape for b in rotary_tables(decoder, 50).values()] == [t.shape for t in rotary_table(decoder, 50)]


def test_a_buffer_holds_at_first_what_its_table_says() -> None:
    assert (Buffer((2, 3), "int64", fill=0).in_ram() == 0).all()
    assert (Buffer((2, 3), fill=1).in_ram() == 1).all()
    for dtype in ("float32", "float16", "int64", "uint64", "int32", "int8", "uint8"):
        buffer = Buffer((4, 5), dtype)
        assert buffer.in_ram().nbytes == buffer.nbytes == 20 * np.dtype(dtype).itemsize
    assert Buffer((4, 5), "bfloat16").nbytes == 40


def test_the_cache_is_half_as_large_where_weights_are_not_float32() -> None:
    decoder = small_decoder(n_layers=3)
    wide, narrow = (kv_cache(decoder, fmt, 10, layers=3) for fmt in ("f32", "q4"))
    assert wide.nbytes == 2 * narrow.nbytes == 3 * kv_bytes(decoder, "f32", 10)
    assert wide.shape == narrow.shape == (3, 1, 2, decoder.n_kv_heads, POSITIONS, decoder.head_dim)
    assert kv_cache(decoder, "f32", POSITIONS + 1, layers=3).nbytes == 2 * wide.nbytes
    for fmt in ("f32", "q4"):
        assert kv_page(decoder, cache_format(fmt), 3).nbytes == kv_cache(decoder, fmt, POSITIONS, layers=3).nbytes
    for head_dim, row in ((64, 68), (65, 102), (8, 34)):
        d = small_decoder(n_layers=3, head_dim=head_dim)
        assert kv_page(d, cache_format("f32", "q8"), 3).shape[-1] == 2 * d.n_kv_heads * POSITIONS * row
        # 50 bytes of 32 columns in q4 for 68.
        assert 34 * kv_page(d, "q4", 3).nbytes == 25 * kv_page(d, "q8", 3).nbytes


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16", "q8", "q4"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_chunk_of_streamed_weights_holds_whole_neurons(family: str, fmt: str) -> None:
    for d_ff in (200, GEMM_NEURONS + 1):
        d = small_decoder(family, d_ff=d_ff, n_experts=2)
        specs = array_specs(d, dict.fromkeys(PARTS, fmt), [None] * d.n_layers, profiled=True)
        neuron = PartBytes.of(specs, d).neuron
        assert streamed_bytes(specs, d) == 2 * min(GEMM_NEURONS, d_ff) * neuron
        assert table_bytes(weight_chunk(specs, d)) == streamed_bytes(specs, d) // 2


def test_padding_is_counted_for_every_array_that_runs_read() -> None:
    d = small_decoder()
    names, profiled = (list(array_specs(d, dict.fromkeys(PARTS, "q4"), [3, None], has)) for has in (False, True))
    assert weight_padding(names) == weight_padding(profiled) == WEIGHT_ALIGN * len(names)


def test_a_gpus_buffers_grow_with_what_they_are_for() -> None:
    d = small_decoder(d_ff=200)
    one = gpu_workspace_bytes(d, 7, 50, 1, 1)
    assert gpu_workspace_bytes(d, 8, 50, 1, 1) == one + 4
    assert gpu_workspace_bytes(d, 7, 51, 1, 1) == one + 4 * d.rotary_dim
    assert gpu_workspace_bytes(d, 7, 65, 1, 1) == one + 4 * d.rotary_dim * 15 + 8, "a page more"
    assert gpu_workspace_bytes(d, 7, 50, 1, 64) > one
    assert one < gpu_workspace_bytes(d, 7, 50, 8, 1) < 8 * one
