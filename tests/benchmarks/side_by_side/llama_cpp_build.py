"""Compile and install llama.cpp for this processor: `python llama_cpp_build.py llama-cpp-python==VERSION [PROGRAM …]`.

Programs, as llama-server, are of the sources that the package carries; without any it is the package's library.

`-DGGML_NATIVE=ON` also takes AMX where the processor lists it, and a virtual machine may list AMX and not allow it: the
process then dies of SIGILL. So every instruction set that ggml knows is switched by name, and AMX only where Linux
grants it. `LLAMA_CPP_AMX=off` leaves it out there too: a ratio is quoted against both. With `PI_ISA=avx2` the peer
keeps to AVX2 as ours does.

AMX as it is published dies of SIGILL all the same: GCC takes all but eight bytes of the tile configuration for unused,
and leaves them zero (llama.cpp#26954; GCC 12's code shows it). So one line keeps them. That pull request also asks for
permission in each thread, which Linux gives to a process as a whole.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

_AMX = {"amx_tile", "amx_int8"}
# ggml's options, and the flags of /proc/cpuinfo that each needs.
_AVX512 = {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}
_OPTIONS = {
    "GGML_SSE42": {"sse4_2"},
    "GGML_AVX": {"avx"},
    "GGML_AVX2": {"avx2"},
    "GGML_FMA": {"fma"},
    "GGML_F16C": {"f16c"},
    "GGML_BMI2": {"bmi2"},
    "GGML_AVX_VNNI": {"avx_vnni"},
    "GGML_AVX512": _AVX512,
    "GGML_AVX512_VBMI": _AVX512 | {"avx512vbmi"},
    "GGML_AVX512_VNNI": _AVX512 | {"avx512_vnni"},
    "GGML_AVX512_BF16": _AVX512 | {"avx512_bf16"},
    "GGML_AMX_TILE": _AVX512 | {"avx512_vnni"} | _AMX,
    "GGML_AMX_INT8": _AVX512 | {"avx512_vnni"} | _AMX,
}
PATCHED = "(its tile configuration kept by a patch, llama.cpp#26954)"
"""What a build with AMX is not as published."""
_CONFIGURED = "_tile_loadconfig(&tc);"
_KEPT = '__asm__ volatile("" : : "r"(&tc) : "memory"); ' + _CONFIGURED

SERVER = Path(sys.prefix, "llama-server")
"""Where this environment has llama-server."""
# One file, and nothing that is fetched while it is built.
_SERVER_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def cmake_arguments(flags: Set[str]) -> list[str]:
    """Arguments for a processor with these flags; empty flags, as off x86, leave the choice to the compiler."""
    if not flags:
        return ["-DGGML_NATIVE=ON"]
    switches = {option: needed <= flags for option, needed in _OPTIONS.items()}
    # Those that are missing are named too: without GGML_NATIVE ggml takes AVX2 and what belongs to it for granted.
    return ["-DGGML_NATIVE=OFF", *(f"-D{option}={'ON' if there else 'OFF'}" for option, there in switches.items())]


def processor_flags() -> set[str]:
    """Flags of the first processor in /proc/cpuinfo; empty where it lists none, as off x86 and off Linux.

    AMX is left out where it may not be used, and with `PI_ISA=avx2` what is beyond AVX2.
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found: set[str] = next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())
    if os.environ.get("PI_ISA") == "avx2":
        return {flag for flag in found if not flag.startswith(("avx512", "avx_vnni", "amx"))}
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    granted = (
        found >= _AMX and os.environ.get("LLAMA_CPP_AMX") != "off" and not ctypes.CDLL(None).syscall(158, 0x1023, 18)
    )
    return found if granted else found - _AMX


def _described(package: str, arguments: str) -> str:
    return f"{package} {arguments}" + (f" {PATCHED}" if "AMX_INT8=ON" in arguments else "")


@contextmanager
def sources_of(package: str) -> Iterator[Path]:
    """The unpacked sources of a package, patched."""
    with tempfile.TemporaryDirectory() as folder:
        name = package.partition("=")[0]
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "--dest", folder, package]
        subprocess.run(fetch, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (found,) = (path for path in Path(folder).iterdir() if path.is_dir())
        patch(found / "vendor" / "llama.cpp" / "ggml/src/ggml-cpu/amx/mmq.cpp")
        yield found


def patch(mmq: Path) -> None:
    """Keep the whole tile configuration. Raises RuntimeError where the source is another one."""
    text = mmq.read_text()
    if text.count(_CONFIGURED) != 1:
        raise RuntimeError(f"{mmq.name}: {_CONFIGURED} is not there once: look at llama.cpp#26954 again")
    mmq.write_text(text.replace(_CONFIGURED, _KEPT))


def install(package: str) -> None:
    """Build with pip, unless this environment holds what was built from the same package with the same arguments."""
    arguments = " ".join(cmake_arguments(processor_flags()))
    built, wanted = Path(sys.prefix, "llama_cpp_build.txt"), _described(package, arguments)
    if built.is_file() and built.read_text() == wanted:
        return
    print(f"building {wanted}", flush=True)
    pip, env = [sys.executable, "-m", "pip", "install"], {**os.environ, "CMAKE_ARGS": arguments}
    # Neither pip's cache of wheels nor what is installed tells with which arguments it was built.
    with sources_of(package) as sources:
        fresh = ["--no-cache-dir", "--force-reinstall", "--no-deps", str(sources)]
        subprocess.run([*pip, *fresh], env=env, check=True)
    subprocess.run([*pip, package], env=env, check=True)  # what it depends on
    built.write_text(wanted)


def install_programs(package: str, *programs: str) -> None:
    """Build programs, unless this environment has them of the same package, built with the same arguments."""
    arguments = [*cmake_arguments(processor_flags()), *_SERVER_OPTIONS]
    built, wanted = Path(sys.prefix, f"{'-'.join(programs)}.txt"), _described(package, " ".join(arguments))
    targets = [Path(sys.prefix, program) for program in programs]
    if all(target.is_file() for target in targets) and built.is_file() and built.read_text() == wanted:
        return
    print(f"building {', '.join(programs)} of {wanted}", flush=True)
    with sources_of(package) as folder:
        sources, build = folder / "vendor" / "llama.cpp", folder / "build"
        subprocess.run(["cmake", "-S", sources, "-B", build, *arguments], check=True)
        subprocess.run(
            ["cmake", "--build", build, "--target", *programs, "--parallel", str(os.cpu_count())], check=True
        )
        for target in targets:
            shutil.copy2(build / "bin" / target.name, target)
    built.write_text(wanted)


if __name__ == "__main__":
    (install_programs if sys.argv[2:] else install)(*sys.argv[1:])
