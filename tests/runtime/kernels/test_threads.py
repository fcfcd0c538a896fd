"""The same bits at any number of threads. `test_isa.py` has them for kernels just compiled and for loaded ones."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.long_form import marked_long
from support.paths import SUPPORT
from support.synthetic import random_artifact, small_decoder

pytestmark = pytest.mark.slow

FORMATS = ["f16", "q8", "q4"]
THREADS = (1, 2, 3, 5)
CHILD = SUPPORT / "thread_bits.py"


def bits(fmt: str, folder: Path, threads: Sequence[int]) -> dict[str, list[str]]:
    """Digests of what operators and two models give, one for each number of threads, in a process of its own."""
    shape = {"d_model": 72, "d_ff": 300, "context_length": 100}
    paths = [
        random_artifact(folder / f"{name}.pi", small_decoder(**shape, **more), format=fmt, ranks=[9, 9])
        for name, more in (("one", {}), ("experts", {"n_experts": 5, "experts_per_token": 2}))
    ]
    own = {"NUMBA_NUM_THREADS": str(max(threads)), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, CHILD, fmt, os.pathsep.join(map(str, paths)), *map(str, threads)],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("fmt", marked_long(FORMATS, ["q8"]))
def test_threads_do_not_change_a_bit(fmt: str, tmp_path: Path) -> None:
    found = bits(fmt, tmp_path, THREADS)
    assert len(found) == 6 + 3 * 4 + 2 * 3 * 7
    for what, digests in found.items():
        assert len(digests) == len(THREADS)
        assert len(set(digests)) == 1, what
    for name in ("one", "experts"):
        assert found[f"{name} dense decode 7"] != found[f"{name} predicted decode 7"], "nothing was skipped"
