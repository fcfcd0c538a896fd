"""Which instructions the kernels are made of, decided before anything is compiled.

    amx       what avx512 has, and tiles for products of block formats with many vectors (AMX-INT8, on Linux)
    avx512    512-bit vectors and the integer dot product vpdpbusd (AVX-512 F, BW, DQ, VL, VNNI)
    avxvnni   256-bit vectors and vpdpbusd, in its VEX form or, on processors without that, in AVX-512's
    avx2      256-bit vectors, integer dot products from vpmaddubsw and vpmaddwd (AVX2, FMA, F16C)
    neon      pairs of 128-bit vectors and the integer dot product sdot (arm64 with dotprod, on Linux)
    portable  whatever LLVM makes of plain loops

`PI_ISA` forces one. An instruction the processor lacks would end the process inside LLVM, so it is refused here.
Tiles are asked for unless another set is forced: Linux hands out their 8 KiB a thread on demand. A process asks once,
before its threads start; the answer holds for all of them.
"""

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Set
from dataclasses import dataclass
from functools import cache

import llvmlite.binding
import numba

from pi_runtime.errors import UsageError

TILES = frozenset({"amx-tile", "amx-int8"})
"""LLVM's names of what products of bytes need. It lists them where the system has switched the registers on."""
_TILE_PROCESSORS = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")
"""LLVM's names of processors that have tiles."""
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_REASONS = {
    errno.EINVAL: "this system is older than Linux 5.16, which knows them first",
    errno.EOPNOTSUPP: "the system or its virtual machine has them switched off",
    errno.ENOSPC: "a thread's signal stack is too small for them",
}


def refusal(features: Set[str], processor: str) -> str:
    """Why tiles cannot be used on a processor with these LLVM features; '' where they can, or where it has none."""
    if features >= TILES and (number := ask()):
        why = _REASONS.get(number, os.strerror(number))
        return f"the system refuses them ({errno.errorcode.get(number, number)}): {why}"
    if processor in _TILE_PROCESSORS and not features >= TILES:
        return "the system or its virtual machine does not show them"
    return ""


@cache
def ask() -> int:
    """Ask for tiles; returns 0, or the number of the system's error."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(_ARCH_PRCTL, ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA))
    return ctypes.get_errno() if refused else 0


_AVX2 = {"avx2", "fma", "f16c"}
_NEON = {"neon", "dotprod"}
_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20
_VNNI_512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}


@dataclass(frozen=True)
class Isa:
    """One instruction set. `lanes`: float32 numbers in a vector, 0 where loops are left to LLVM."""

    name: str
    lanes: int
    dot: bool
    """Whether there is vpdpbusd: four products of bytes added to each 32-bit lane, without saturation."""
    tiles: bool = False
    """Whether there are AMX's tiles of bytes."""


_ISAS = (
    Isa("amx", 16, True, tiles=True),
    Isa("avx512", 16, True),
    Isa("avxvnni", 8, True),
    Isa("avx2", 8, False),
    Isa("neon", 8, False),
    Isa("portable", 0, False),
)
NAMES = tuple(isa.name for isa in _ISAS)


def available(features: set[str]) -> tuple[str, ...]:
    """Names of what a processor with these LLVM features can run, best first."""
    there = {
        "amx": features >= _AVX2 | _VNNI_512 | TILES,
        "avx512": features >= _AVX2 | _VNNI_512,
        "avxvnni": features >= _AVX2 and ("avxvnni" in features or features >= _VNNI_512),
        "avx2": features >= _AVX2,
        "neon": features >= _NEON,
        "portable": True,
    }
    return tuple(name for name in NAMES if there[name])


def choose(features: set[str], wanted: str | None) -> Isa:
    """The best instruction set, or the one asked for. Raises UsageError for one that is not there.

    Without permission there are no tiles.
    """
    refused = wanted in (None, "amx") and refusal(features, llvmlite.binding.get_host_cpu_name())
    there = available(features - TILES if refused else features)
    name = there[0] if wanted is None else wanted
    if name not in there:
        why = f"not on this processor: {refused}" if refused else "not on this processor"
        raise UsageError(f"PI_ISA={name}: {why}", expected=" or ".join(there))
    return _ISAS[NAMES.index(name)]


def target_features(isa: Isa, features: set[str]) -> str:
    """LLVM's feature string for code that keeps to `isa` on a processor with `features`; '' leaves all as it is."""
    if isa.name in ("amx", "avx512", "portable"):
        return ""
    if isa.name == "neon":
        return _flags(features)
    if isa.name == "avxvnni" and "avxvnni" not in features:
        return _flags(features) + ",+prefer-256-bit"
    kept = {f for f in features if not f.startswith("avx512") and (isa.dot or not f.startswith("avxvnni"))}
    return _flags(kept) + "," + ",".join(f"-{f}" for f in sorted(features - kept))


def _flags(features: set[str]) -> str:
    return ",".join(f"+{f}" for f in sorted(features))


def host_features() -> set[str]:
    """LLVM's names of what this processor has; empty where it is neither x86-64 nor an arm64 on Linux."""
    if platform.machine() in ("x86_64", "AMD64"):
        return {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    if platform.machine() == "aarch64" and sys.platform == "linux":
        # LLVM does not list the dot product; the kernel does. Every arm64 has NEON.
        hwcap = ctypes.CDLL(None).getauxval(_AT_HWCAP)
        return {"neon", "dotprod"} if hwcap & _HWCAP_ASIMDDP else {"neon"}
    return set()


def _activate() -> Isa:
    features = host_features()
    isa = choose(features, os.environ.get("PI_ISA"))
    if forced := target_features(isa, features):
        # numba compiles for the whole processor unless told otherwise, before its first compilation.
        numba.config.CPU_NAME = llvmlite.binding.get_host_cpu_name()
        numba.config.CPU_FEATURES = forced
    return isa


ISA = _activate()
"""What this process compiles for."""
