"""The same bits at any number of threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import SUPPORT
from support.synthetic import random_artifact, small_decoder

pytestmark = pytest.mark.slow

FORMATS = ["f16", "q8", "q4"]
THREADS = (1, 2, 3, 5)
CHILD = SUPPORT / "thread_bits.py"


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_do_not_change_a_bit(fmt: str, tmp_path: Path) -> None:
    shape = {"d_model": 72, "d_ff": 300, "context_length": 100}
    paths = [
        random_artifact(tmp_path / f"{name}.pi", small_decoder(**shape, **more), format=fmt, ranks=[9, 9])
        for name, more in (("one", {}), ("experts", {"n_experts": 5, "experts_per_token": 2}))
    ]
    done = subprocess.run(
        [sys.executable, CHILD, fmt, os.pathsep.join(map(str, paths)), *map(str, THREADS)],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_NUM_THREADS": str(max(THREADS)), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6 + 3 * 5 + 2 * 3 * 7
    for what, digests in found.items():
        assert len(digests) == len(THREADS)
        assert len(set(digests)) == 1, what
    for name in ("one", "experts"):
        assert found[f"{name} dense decode 7"] != found[f"{name} predicted decode 7"], "nothing was skipped"
