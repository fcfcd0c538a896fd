"""Every kernel compiles for a real GPU, on any machine, and needs no more shared memory than a PC's GPU has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_running import EXPERTS, NEURONS, model_with_plan
from support.paths import ROOT

SCRIPT = Path(__file__).with_name("compiling.py")


CUTS = (128, 64, NEURONS)
MOE_KERNELS = {"_apply_route_weights", "_list_expert_neurons", "_route"}


@pytest.mark.parametrize("experts", [False, True], ids=["plain", "experts"])
def test_kernels_compile_for_a_gpu(experts: bool, tmp_path: Path) -> None:
    shape = EXPERTS if experts else {}
    cuts = tuple(cut for n in CUTS for cut in [n, 0, NEURONS][: shape.get("n_experts", 1)])
    path = model_with_plan(tmp_path / "a.pi", cuts, d_model=296, n_heads=2, head_dim=256, **shape)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [str(ROOT / "tests"), str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(roots), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    names = {"_attend", "_attend_block", "_combine", "_compact", "_dequantise", "_dequantise_words", "_gathered_axpy"}
    names |= {
        "_gathered_axpy_words",
        "_linear",
        "_merge",
        "_neuron_activations",
        "_norm",
        "_predict",
        "_select_by_signs",
        "_store_kv",
    }
    names |= MOE_KERNELS if experts else set()
    assert names == set(done.stdout.split()[2:])
