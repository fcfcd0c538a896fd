"""Compiles every kernel that a run starts, for real GPUs and without one: `compiling.py [--arch 90] ARTIFACT…`.

Triton compiles for any GPU on any machine. A driver that only names the GPU stands in for NVIDIA's. Launches compile
and start nothing, so results stay zero; a run asks for no number and goes on. Prints Triton's version and the kind of
GPU, then each artifact's kernels on a line.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from support.gpu_interpreter import Interpreted
from support.gpu_target import compiling, nvidia
from support.steps import step

from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.devices import configure_libraries
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.plan_choice import allocation

SHARED_BYTES = 99 << 10
"""Shared memory that a program may have on the GPUs of PCs (sm_86, sm_89, sm_120)."""

SUMLESS = ("_dequantise", "_dequantise_words")
"""Kernels that turn stored rows into numbers; their tiles have as many rows as there are tokens."""


class Compiled(Interpreted):
    """Torch's CPU memory, with the tiles of a GPU."""

    tiling = Tiling()

    def __init__(self) -> None:
        configure_libraries()
        self.device, self._memory = torch.device("cpu"), 1 << 40


def run(artifact: Path, arch: int) -> set[str]:
    """Names of the kernels that decoding and reading a prompt start.

    Tokens that are decoded together start the kernels that a token alone does, compiled once: so they get its bits.
    Only kernels that sum nothing may be compiled once more.
    """
    started: set[str] = set()
    compiled: set[str] = set()

    def seen(name: str, kernel: Any) -> None:
        assert kernel.metadata.shared <= SHARED_BYTES, (name, kernel.metadata.shared)
        started.add(name)
        if name not in SUMLESS:
            compiled.add(f"{name} {kernel.hash}")

    with compiling(nvidia(arch), seen):
        opened = Artifact.open(artifact)
        for plan in opened.manifest.plans:
            taken = allocation(opened.manifest, plan, 256, 1 << 40)
            executor = CudaExecutor(Artifact.open(artifact), "auto", 1, taken, Compiled(), stream_from=1)
            cache = executor.new_cache()
            step(executor, [1, 2], cache, select=False)
            step(executor, [3], cache, select=True)
            alone = set(compiled)
            for tokens in range(2, executor.allocation.batch_tokens + 1):
                caches = [executor.new_cache() for _ in range(tokens)]
                executor.step([SequenceStep(cache=c, tokens=np.ones(1, np.int64), select=True) for c in caches])
            assert compiled == alone, sorted(compiled - alone)
            executor.close()
    return started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path, metavar="ARTIFACT")
    parser.add_argument("--arch", type=int, default=90, help="which GPU: 86 for sm_86")
    asked = parser.parse_args()
    print(triton.__version__, asked.arch)
    for artifact in asked.artifacts:
        print(*sorted(run(artifact, asked.arch)))
