"""A number format that the product does not have, made here as one object: packed, read and run.

`new_format.py numpy|cpu|gpu|compiler`. A process of its own, because other modules make their tables of formats once.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pi_runtime.artifact import formats

NEW = "q6_1"
formats.add(formats.Format(NEW, np.dtype("<u1"), block_bits=6, offset="minimum", gguf="Q8_1", timed_as="q4"))

from pi_runtime.artifact.quantisation import as_stored  # noqa: E402
from pi_runtime.artifact.reader import Artifact  # noqa: E402
from pi_runtime.artifact.schema import Layer  # noqa: E402
from pi_runtime.kernels import reference  # noqa: E402
from support.synthetic import random_artifact, small_decoder  # noqa: E402

IDS = [1, 5, 9, 11, 40]


def model(folder: str, **shape: Any) -> Path:
    """Rows with whole groups of blocks and single ones; a layer whose predictor names neurons, and one that skips."""
    decoder = small_decoder(context_length=128, **{"d_model": 288, "n_heads": 4, "head_dim": 72, "d_ff": 300} | shape)
    layers = Layer(rung="predicted", rank=9), Layer(rung="gate")
    return random_artifact(Path(folder) / "a.pi", decoder, format=NEW, ranks=[9, None], layers=layers)


def check_numpy(folder: str) -> None:
    """A finer grid is nearer, and a file in it says which feature it needs."""
    values = np.random.default_rng(0).standard_normal((8, 300), np.float32)
    values[0] += 7  # far from 0, where a minimum helps
    error, of_q6, of_q5_1 = (np.abs(as_stored(name, values) - values).max(1) for name in (NEW, "q6", "q5_1"))
    assert error[0] < of_q6[0] / 2
    assert (error < of_q5_1).all()
    assert formats.FORMATS[NEW].code == len(formats.WEIGHT_FORMATS) - 1
    with Artifact.open(model(folder)) as artifact:
        assert f"formats.{NEW}" in artifact.manifest.features
        assert np.isfinite(reference.forward(artifact, IDS, "predicted")).all()


def check_cpu(folder: str) -> None:
    """Kernels by themselves, and a model alone and in company."""
    from pi_runtime.execution.executor import SequenceStep
    from pi_runtime.execution.host_executor import in_memory
    from support import isa_checks

    for check in (isa_checks.check_products, isa_checks.check_sums, isa_checks.check_ffn, isa_checks.check_extremes):
        check(NEW)
    artifact = Artifact.open(model(folder))
    wanted_TV = reference.forward(artifact, IDS, "predicted")
    executor = in_memory(artifact, "auto", 128, 2)

    def steps(caches: list[Any], tokens: list[int]) -> list[SequenceStep]:
        return [
            SequenceStep(cache=c, tokens=np.array(tokens[n:] + tokens[:n]), select=True, logits="all")
            for n, c in enumerate(caches)
        ]

    alone = [executor.step([s])[0].logits_TV for s in steps([executor.new_cache() for _ in range(3)], IDS)]
    company = executor.step(steps([executor.new_cache() for _ in range(3)], IDS))
    for one, among in zip(alone, company, strict=True):
        np.testing.assert_array_equal(one, among.logits_TV)
    # An input at an edge rounds to another byte, and by that a predictor may name another neuron.
    assert np.median(np.abs(alone[0] - wanted_TV).max(1)) < 0.05 * np.abs(wanted_TV).max()
    executor.close()


def check_gpu(folder: str) -> None:
    """The same by Triton's interpreter, where inputs are not rounded to bytes."""
    import torch

    from pi_runtime.cuda.kernels.dequantise import dequantise_rows
    from pi_runtime.cuda.kernels.gathered_sum import gathered_sums
    from pi_runtime.cuda.kernels.row_dot import linear
    from pi_runtime.cuda.kernels.tiling import Tiling
    from support.gpu_interpreter import Interpreted
    from support.gpu_kernels import Stored, assert_close, normal
    from support.gpu_running import assert_same, decoded, plan_of, running

    rng, tiling = np.random.default_rng(0), Tiling(dot_rows=8, row_words=32, sum_rows=8, sum_words=16, splits=2)
    w, x_MD, h_MN = Stored(torch.device("cpu"), NEW, normal(rng, 9, 300)), normal(rng, 2, 300), normal(rng, 2, 9)
    y_MN, y_ND, sums_MSD = torch.zeros(2, 9), torch.zeros(9, 300), torch.zeros(2, 2, 300)
    linear(w.matrix, None, torch.from_numpy(x_MD), y_MN, tiling)
    dequantise_rows(w.matrix, None, 0, y_ND)
    gathered_sums(w.matrix, None, torch.from_numpy(h_MN), sums_MSD, tiling)
    assert_close(y_MN, x_MD @ w.values.T)
    assert_close(y_ND, w.values)
    assert_close(sums_MSD.sum(1), h_MN @ w.values)

    path = model(folder, d_model=40, n_heads=5, n_kv_heads=1, head_dim=8, d_ff=64)
    reference.rounded = lambda x_TD: x_TD
    with Artifact.open(path) as artifact, running(path, plan_of(["gpu"] * 2, (64, 40)), Interpreted()) as executor:
        found_TV, _ = decoded(executor, executor.new_cache(), IDS)
        # What the CPU has of a layer is computed with inputs in bytes.
        assert_same(found_TV, reference.forward(artifact, IDS, "predicted"), 0.02)


def check_compiler(_folder: str) -> None:
    """Recipes, files of llama.cpp and the cost model know it."""
    from gguf import GGMLQuantizationType

    from pi_compile.checkpoint.gguf import tensors
    from pi_compile.cost_model import CPU, processors_of
    from pi_compile.machine import find_machine
    from pi_compile.recipe import check_settings

    check_settings(pack={"ffn": NEW})
    assert tensors._GRIDS[GGMLQuantizationType.Q8_1].name == NEW
    for machine in ("pc-low", "stand-in"):
        rates = processors_of(find_machine(machine, Path()))[CPU].bytes_per_s
        assert rates.get(NEW) == rates.get("q4")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        globals()[f"check_{sys.argv[1]}"](name)
    print(NEW)
