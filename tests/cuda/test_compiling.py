"""Every kernel compiles for a real GPU, on any machine."""

import os
import subprocess
import sys
from pathlib import Path

from gpu_running import NEURONS, model_with_plan

SCRIPT = Path(__file__).with_name("compiling.py")


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    path = model_with_plan(tmp_path / "a.pi", (128, 64, NEURONS))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2]), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(roots), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    names = {"_add_up", "_attend", "_attend_block", "_close", "_combine", "_fire", "_linear", "_merge", "_norm"}
    assert names | {"_agree", "_predict", "_remember", "_unpack"} == set(done.stdout.split()[2:])
