"""Every kernel compiles for a real GPU, on any machine, and needs no more shared memory than a PC's GPU has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_running import EXPERTS, NEURONS, model_with_plan
from support.gpu_target import kept
from support.paths import ROOT

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compiling.py")

CUTS = (128, 64, NEURONS)
KERNELS = {
    "_attend",
    "_attend_block",
    "_combine",
    "_compact",
    "_dequantise",
    "_dequantise_words",
    "_gathered_axpy",
    "_gathered_axpy_words",
    "_linear",
    "_merge",
    "_neuron_activations",
    "_norm",
    "_predict",
    "_store_kv",
}
MOE_KERNELS = {"_apply_route_weights", "_list_expert_neurons", "_route"}


def test_kernels_compile_for_a_gpu(tmp_path: Path, long: bool) -> None:
    """Those of a mixture of experts, which are all there are; in the long form those of another model too."""
    models, paths = {"experts": EXPERTS, "plain": {}}, []
    for name, shape in list(models.items())[: 2 if long else 1]:
        cuts = tuple(cut for n in CUTS for cut in [n, 0, NEURONS][: shape.get("n_experts", 1)])
        paths.append(model_with_plan(tmp_path / f"{name}.pi", cuts, d_model=296, n_heads=2, head_dim=256, **shape))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [str(ROOT / "tests"), str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(roots), "TRITON_CACHE_DIR": str(kept("gpu"))}
    env |= {} if long else {"DISABLE_PTXAS_OPT": "1"}  # the last step is the quicker
    done = subprocess.run([sys.executable, str(SCRIPT), *paths], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    _, experts, *plain = (set(line.split()) for line in done.stdout.splitlines())
    assert experts == KERNELS | MOE_KERNELS
    assert plain == [KERNELS] * long
