"""Which instructions are chosen, that each set computes the same, and what the 256-bit dot product becomes."""

import ctypes
import errno
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding
import pytest
from llvmlite import ir
from support.golden_logits import FORMATS
from support.long_form import marked_long
from support.paths import SUPPORT
from support.stored import ROW_FORMATS

from pi_runtime.errors import UsageError
from pi_runtime.kernels.codegen import isa, simd

AVX2 = {"sse2", "avx", "avx2", "fma", "f16c"}
VNNI_512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
ASK = isa.ask
AMX = {"amx-tile", "amx-int8"}
PROCESSORS = {
    "neither x86 nor arm64": (set(), ("portable",)),
    "Cortex-A72": ({"neon"}, ("portable",)),
    "Neoverse N1": ({"neon", "dotprod"}, ("neon", "portable")),
    "Nehalem": ({"sse2", "sse4.2"}, ("portable",)),
    "Sandy Bridge": ({"sse2", "avx"}, ("portable",)),
    "AVX2 without F16C": (AVX2 - {"f16c"}, ("portable",)),
    "Haswell": (AVX2, ("avx2", "portable")),
    "Skylake-X": (AVX2 | VNNI_512 - {"avx512vnni"}, ("avx2", "portable")),
    "Knights Landing": (AVX2 | {"avx512f", "avx512cd"}, ("avx2", "portable")),
    "Alder Lake": (AVX2 | {"avxvnni"}, ("avxvnni", "avx2", "portable")),
    "Ice Lake": (AVX2 | VNNI_512, ("avx512", "avxvnni", "avx2", "portable")),
    "Sapphire Rapids without tiles": (AVX2 | VNNI_512 | {"avxvnni"}, ("avx512", "avxvnni", "avx2", "portable")),
    "Sapphire Rapids": (AVX2 | VNNI_512 | {"avxvnni"} | AMX, ("amx", "avx512", "avxvnni", "avx2", "portable")),
}


@pytest.fixture(autouse=True)
def _tiles_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "ask", lambda: 0)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_best_there_is_unless_another_is_named(processor: str) -> None:
    features, there = PROCESSORS[processor]
    assert isa.available(features) == there
    assert isa.choose(features, None).name == there[0]
    for name in there:
        assert isa.choose(features, name).name == name


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("wanted", [*isa.NAMES, "AVX2", "", "sse"])
def test_what_is_not_there_is_refused(processor: str, wanted: str) -> None:
    features, there = PROCESSORS[processor]
    if wanted in there:
        return
    with pytest.raises(UsageError) as raised:
        isa.choose(features, wanted)
    message = str(raised.value)
    assert f"PI_ISA={wanted}" in message
    assert " or ".join(there) in message


def test_what_a_set_has() -> None:
    found = {name: isa.choose(AVX2 | VNNI_512 | AMX | {"neon", "dotprod"}, name) for name in isa.NAMES}
    assert [name for name, i in found.items() if i.tiles] == ["amx"]
    assert {name: (i.lanes, i.dot) for name, i in found.items()} == {
        "amx": (16, True), "avx512": (16, True),
        "avxvnni": (8, True), "avx2": (8, False), "neon": (8, False), "portable": (0, False)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EINVAL, "Linux 5.16"),
        (errno.EOPNOTSUPP, "switched off"),
        (errno.ENOSPC, "signal stack"),
        (errno.EPERM, "Operation not permitted"),
    ],
)
def test_without_permission_there_are_no_tiles(number: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lists them, and does not hand them out."""
    asked: list[tuple[int, ...]] = []

    def syscall(code: int, *arguments: Any) -> int:
        asked.append((code, *(argument.value for argument in arguments)))
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(isa, "ask", ASK.__wrapped__)
    features, _ = PROCESSORS["Sapphire Rapids"]
    assert isa.choose(features, None).name == "avx512"
    assert asked == [(158, 0x1023, 18)]
    with pytest.raises(UsageError, match=rf"PI_ISA=amx: .*{reason}"):
        isa.choose(features, "amx")
    asked.clear()
    assert isa.choose(features, "avx512").name == "avx512"
    assert not asked, "nobody asks for what is not wanted"


def flags(processor: str, name: str) -> set[str]:
    features = PROCESSORS[processor][0]
    found = isa.target_features(isa.choose(features, name), features)
    return set(found.split(",")) - {""}


def test_the_best_set_leaves_the_processor_as_it_is() -> None:
    assert not flags("Sapphire Rapids", "amx")
    assert not flags("Ice Lake", "avx512")
    assert not flags("Haswell", "portable")
    assert not flags("Cortex-A72", "portable")
    assert not flags("neither x86 nor arm64", "portable")
    assert not {f for f in flags("Haswell", "avx2") | flags("Alder Lake", "avxvnni") if f.startswith("-")}


@pytest.mark.parametrize("processor", ["Ice Lake", "Sapphire Rapids"])
def test_avx2_forgets_wider_vectors_and_dot_products(processor: str) -> None:
    found = flags(processor, "avx2")
    assert {f"+{f}" for f in AVX2} <= found
    assert {f"-{f}" for f in VNNI_512} <= found
    assert "+avxvnni" not in found
    assert ("-avxvnni" in found) == (processor == "Sapphire Rapids")


def test_avxvnni_keeps_to_its_own_form_where_the_processor_has_it() -> None:
    found = flags("Sapphire Rapids", "avxvnni")
    assert "+avxvnni" in found
    assert {f"-{f}" for f in VNNI_512} <= found


def test_avxvnni_through_avx512_keeps_to_256_bits() -> None:
    """LLVM's intrinsic is the same; its EVEX form needs AVX512VL."""
    found = flags("Ice Lake", "avxvnni")
    assert {"+prefer-256-bit", "+avx512vl", "+avx512vnni"} <= found
    assert not any(f.startswith("-") for f in found)


GOLDEN = ("f16", "q6", "q4_1", "q4_k", "q6_k", "iq4_nl", "nvfp4")
"""Numbers, blocks, blocks with an offset, groups, and tables: in the short form these have golden logits.

Others have checks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", marked_long(isa.NAMES, ["avxvnni"]))
def test_each_set_computes_the_same(name: str, tmp_path: Path, long: bool) -> None:
    """Those that this machine has, each in processes of its own. In the long form the portable one's first compiles.

    In the short form it does so after each change of a kernel or of how kernels are compiled, whose folder is another.
    One has vectors as wide as avx2's, and multiplies as avx512 does. Sets that are not the best share the formats out.
    """
    features = isa.host_features()
    there = isa.available(features - AMX if ASK() else features)
    environment = {**os.environ, "PI_ISA": name, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "3"}
    if name == "portable" and long:
        environment["PI_CACHE_DIR"] = str(tmp_path / "cache")
    logits, operators = SUPPORT / "golden_logits.py", SUPPORT / "isa_checks.py"
    golden, others = list(FORMATS), list(ROW_FORMATS)
    if name != there[0] and not long:
        golden, others = list(GOLDEN), [fmt for fmt in ROW_FORMATS if fmt not in GOLDEN]
    children = [(logits, tmp_path, "1", *golden), (logits, tmp_path, "3", *golden), (operators, *others)]
    if name != there[0] and not long:
        del children[0]
    for child, *arguments in children:
        command = [sys.executable, child, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if name in there:
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == [name]
        else:
            assert f"PI_ISA={name}: not on this processor" in done.stderr


def dot_bytes(*arguments: Any) -> Any:
    return simd.dot_bytes(*arguments, signed=False)


def signed_dot_bytes(*arguments: Any) -> Any:
    return simd.dot_bytes(*arguments, signed=True)


def assembly(features: str, monkeypatch: pytest.MonkeyPatch, name: str, emit: Callable[..., Any], bits: int = 8) -> str:
    """What a product of integers of so many bits becomes in an instruction set, on a processor with these features.

    It is not run.
    """
    chosen = isa.choose(AVX2 | VNNI_512 | {"avxvnni", "neon", "dotprod"}, name)
    monkeypatch.setattr(simd, "ISA", chosen)
    ints, small = simd.vec(simd.I32, chosen.lanes), simd.vec(ir.IntType(bits), 32 // bits * chosen.lanes)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ints, [ints, small, small]), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(emit(builder, *function.args))
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    cpu, triple = ("generic", "aarch64-linux-gnu") if name == "neon" else ("x86-64", "x86_64-unknown-linux-gnu")
    try:
        target = llvmlite.binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this LLVM has no {triple}")
    machine = target.create_target_machine(cpu=cpu, features=features, opt=2)
    return str(machine.emit_assembly(llvmlite.binding.parse_assembly(str(module))))


@pytest.mark.parametrize("signed", [False, True])
def test_the_256_bit_dot_product_has_its_vex_form_on_avxvnni(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembly("+avx2,+avxvnni", monkeypatch, "avxvnni", signed_dot_bytes if signed else dot_bytes)
    assert "{vex}" in found
    assert "vpdpbusd\t%ymm" in found


def test_the_256_bit_dot_product_through_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembly("+avx2,+avx512vl,+avx512vnni", monkeypatch, "avxvnni", dot_bytes)
    assert "{vex}" not in found
    assert "vpdpbusd\t%ymm" in found


def test_the_512_bit_dot_product(monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembly("+avx512f,+avx512bw,+avx512vnni", monkeypatch, "avx512", dot_bytes)
    assert "vpdpbusd\t%zmm" in found


@pytest.mark.parametrize("signed", [False, True])
def test_the_dot_product_of_avx2_needs_nothing_newer(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembly("+avx2", monkeypatch, "avx2", signed_dot_bytes if signed else dot_bytes)
    assert "vpmaddubsw" in found
    assert "vpmaddwd" in found
    assert ("vpsignb" in found) == signed
    assert "vpdp" not in found
    assert "zmm" not in found


@pytest.mark.parametrize(("most", "times"), [(15, 1), (31, 2), (63, 4), (128, 8)])
def test_avx2_widens_pairs_when_16_bits_are_full(most: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def eight(b: Any, sums: Any, weights: Any, x: Any) -> Any:
        found = simd.ByteSums(sums, most, signed=False)
        for _ in range(8):
            found.add(b, weights, x)
        total = found.total(b)
        assert str(b.function).count('call <8 x i32> @"llvm.x86.avx2.pmadd.wd"') == times
        return total

    assembly("+avx2", monkeypatch, "avx2", eight)


@pytest.mark.parametrize("emit", [dot_bytes, signed_dot_bytes])
def test_the_dot_product_of_neon(emit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembly("+neon,+dotprod", monkeypatch, "neon", emit)
    assert len(re.findall(r"\tsdot\tv\d+\.4s, v\d+\.16b, v\d+\.16b", found)) == 2


def test_neon_multiplies_words_four_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembly("+neon,+dotprod", monkeypatch, "neon", simd.dot_words, bits=16)
    assert re.search(r"\tsm(ull|lal)2?\tv\d+\.4s", found)
    assert "\tmul\tw" not in found
