"""Products by AMX's tiles have the bits of `row_products`.

Processors without AMX run them twice: with tiles that NumPy computes, for what is where and in which order; and as they
are compiled for AMX, with a handler of SIGILL that carries out what the processor does not know. A whole process is
held so too, with all that lays vectors as tiles.
"""

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import pytest
from support.paths import SUPPORT
from support.plain_tiles import PlainTiles
from support.row_products import at_the_end_of_memory, products
from support.stored import BLOCK_FORMATS, GROUPED_FORMATS, quantised_inputs, store, store_integers
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.codegen import amx, isa
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, Vectors
from pi_runtime.kernels.ops import row_products, tile_products
from pi_runtime.kernels.ops.row_products import portable_row_products, vector_row_products
from pi_runtime.kernels.ops.tile_packing import FEWEST, TILE, TILED

OTHERS = vector_row_products if ISA.lanes else portable_row_products
SIGNATURE = numba.void(
    *(numba.types.NamedUniTuple(numba.intp, len(kind._fields), kind) for kind in (MatrixView, RowList, Vectors)),
    *[numba.intp] * 2,
)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def compiled() -> tuple[Any, Any]:
    """The kernel compiled anew, and kept nowhere; the first one leaves to vectors what fills no tile."""
    jit, split = numba.njit(SIGNATURE, error_model="numpy", nogil=True), row_products.tiled_row_products.py_func
    tiles = jit(tile_products.tile_row_products.py_func)
    assert tiles.signatures
    return jit(FunctionType(split.__code__, split.__globals__ | {"tile_row_products": tiles})), tiles


@pytest.fixture(scope="module")
def by_numpy() -> Callable[..., None]:
    """The kernel with the twins of AMX's instructions."""
    tiles = PlainTiles()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(amx, "instruction", tiles.instruction)
        patched.setattr(amx, "allow", lambda *_: None)
        kernel, _ = compiled()

    def run(*arguments: Any) -> None:
        kernel(*arguments)
        assert not tiles.errors, tiles.errors
        assert tiles.rows is None, "tiles are not released"

    return run


@pytest.fixture(scope="module")
def native() -> tuple[Any, Any]:
    """The kernel as it is compiled for AMX."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("no x86-64")
    return compiled()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that carries out AMX's instructions where it is loaded, if the processor lacks them."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cc"):
        pytest.skip("no C compiler on Linux to stand in for AMX")
    library = tmp_path_factory.mktemp("amx") / "amx.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SUPPORT / "amx.c"], check=True)
    return library


@pytest.fixture(scope="module")
def by_amx(native: tuple[Any, Any], request: pytest.FixtureRequest) -> Callable[..., None]:
    """The same on a processor with AMX, or with a handler that carries out its instructions; all that fills tiles goes
    by them."""
    if ISA.name != "amx" and isa.ask():
        met = ctypes.c_long.in_dll(ctypes.CDLL(str(request.getfixturevalue("emulator"))), "met")
    else:
        met = None

    def run(m: MatrixView, rows: RowList, x: Vectors, *out: int) -> None:
        before = 0 if met is None else met.value
        native[0](m, rows, x, *out)
        if met is not None and m.fmt in TILED:
            listed = x.listed != 0 and not np.array_equal(at(x.listed, x.tokens), np.arange(x.tokens))
            whole = x.tokens >= FEWEST and rows.rows >= TILE and not listed
            assert (met.value > before) == whole

    return run


def at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def check(kernel: Any, fmt: str, shape: tuple[int, int, int], **chosen: Any) -> None:
    tokens, rows, columns = shape
    w, x_TD = store(fmt, random(columns, rows, columns)), random(1, tokens, columns)
    np.testing.assert_array_equal(products(kernel, w, x_TD, **chosen), products(OTHERS, w, x_TD, **chosen))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(32, 16, 1), (32, 17, 257), (47, 33, 480), (33, 48, 1312), (80, 16, 97)], ids=str)
def test_tiles_have_the_bits_of_vectors(fmt: str, shape: tuple[int, int, int], by_numpy: Any) -> None:
    """Tokens, rows and columns: with a rest of each, one tile and several, groups and blocks outside them."""
    check(by_numpy, fmt, shape)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_what_is_compiled_for_amx_has_the_bits_of_vectors(fmt: str, by_amx: Any) -> None:
    for tokens in (15, 31, 32, 40, 48, 63, 64, 130):
        check(by_amx, fmt, (tokens, 37, 700 + tokens))
    for columns in (1, 31, 32, 33, 64, 225, 256, 1024, 1120, 3 * 1024 + 255):
        check(by_amx, fmt, (33, 18, columns))
    check(by_amx, fmt, (32, 15, 300))


@pytest.mark.long
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_any_number_of_vectors(fmt: str, by_amx: Any) -> None:
    for tokens in range(1, 131):
        check(by_amx, fmt, (tokens, tokens % 70 + 1, 577 + 32 * tokens))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("turned", [False, True], ids=["in turn", "in part"])
def test_listed_rows_and_vectors(fmt: str, turned: bool, by_amx: Any) -> None:
    """A list of vectors in turn goes by tiles, another one does not."""
    rng = np.random.default_rng(3)
    rows, tokens = rng.integers(0, 50, 41).tolist(), [*range(39), *([3, 39] if turned else [39])]
    check(by_amx, fmt, (40, 50, 800), rows=rows, tokens=tokens)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_the_largest_integers(fmt: str, by_amx: Any) -> None:
    for integer in (-8, 7) if fmt != "q8" else (-127, 127):
        w, x_TD = store_integers(fmt, np.full((16, 600), integer), 1.0), np.full((32, 600), np.float32(-127))
        np.testing.assert_array_equal(products(by_amx, w, x_TD), products(OTHERS, w, x_TD))


@pytest.mark.parametrize("columns", [45, 256, 1056])
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_nothing_past_the_last_row_and_vector_is_read(fmt: str, columns: int, by_amx: Any) -> None:
    w, x_TD = store(fmt, random(0, 32, columns)), random(1, 32, columns)
    assert w.scales is not None
    last = replace(w, stored=at_the_end_of_memory(w.stored), scales=at_the_end_of_memory(w.scales))
    x, found = at_the_end_of_memory(quantised_inputs(w.fmt, x_TD)), np.empty((32, 32), np.float32)
    vectors = Vectors(x.ctypes.data, x.strides[0], 0, 32)
    by_amx(last.view, RowList(0, 0, 32, 32), vectors, found.ctypes.data, found.strides[0])
    np.testing.assert_array_equal(found, products(OTHERS, w, x_TD))


def test_the_machine_code(native: tuple[Any, Any]) -> None:
    """For the first processor that has tiles; the function asks for them itself, whatever the processor."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    (code,) = native[1].inspect_llvm().values()
    machine = llvmlite.binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        cpu="sapphirerapids", opt=3
    )
    assembly = machine.emit_assembly(llvmlite.binding.parse_assembly(code))
    found = re.findall(r"^\t(\w*tile\w*|tdp\w+)\t?(.*)$", assembly, re.M)
    names = [name for name, _ in found]
    assert names.count("ldtilecfg") == 1
    assert names.count("tilerelease") >= 1
    assert names.count("tdpbssd") == names.count("tilezero") == names.count("tilestored") > 0
    assert names.count("tileloadd") == 2 * names.count("tdpbssd")
    assert {operands for name, operands in found if name == "tdpbssd"} == {
        "%tmm6, %tmm4, %tmm0",
        "%tmm7, %tmm5, %tmm1",
        "%tmm6, %tmm4, %tmm2",
        "%tmm7, %tmm5, %tmm3",
    }


@pytest.mark.parametrize("fmt", [name for name in GROUPED_FORMATS if FORMATS[name].scales == 1])
def test_groups_with_scales_of_their_own(fmt: str, by_numpy: Any, by_amx: Any) -> None:
    check(by_numpy, fmt, (33, 18, 512))
    for tokens, rows, columns in ((32, 16, 256), (33, 18, 1280), (64, 37, 3072)):
        check(by_amx, fmt, (tokens, rows, columns))
    w, x_TD = store(fmt, random(0, 16, 512)), random(1, 32, 512)
    assert w.scales is not None
    last = replace(w, stored=at_the_end_of_memory(w.stored), scales=at_the_end_of_memory(w.scales))
    for kernel in (by_amx, OTHERS):
        np.testing.assert_array_equal(products(kernel, last, x_TD), products(OTHERS, w, x_TD))


@pytest.mark.slow
@pytest.mark.timeout(2400)  # all kernels are compiled for both
def test_a_process_with_amx_has_the_bits_of_one_without(emulator: Path, tmp_path: Path) -> None:
    """Operators, and models that read prompts of 64 tokens, by any number of threads: all lay inputs as tiles."""
    if "avx512" not in isa.available(isa.host_features()):
        pytest.skip("no AVX-512, which kernels for AMX are made of besides")
    latents = {"n_kv_heads": 1, "latent_rank": 37, "value_dim": 17, "rotary_frequencies": (1.0, 0.03)}
    paths = []
    for name, facts in (("one", {}), ("latents", latents)):
        decoder = small_decoder(d_model=72, d_ff=300, context_length=100, **facts)
        paths.append(str(random_artifact(tmp_path / f"{name}.pi", decoder, format="q8", ranks=[9, 9])))
    given = {"NUMBA_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    amx, vectors = (
        subprocess.run(
            [sys.executable, *with_amx, SUPPORT / "thread_bits.py", "q8", os.pathsep.join(paths), "1", "3"],
            capture_output=True,
            text=True,
            env=os.environ | given | {"PI_ISA": "avx512"},
            check=True,
        ).stdout
        for with_amx in ([SUPPORT / "with_amx.py", emulator], [])
    )
    assert json.loads(amx) == json.loads(vectors)
