"""The same bits at any number of threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import random_artifact, small_decoder

FORMATS = ["f16", "q8", "q4"]
THREADS = (1, 2, 3, 5)
CHILD = Path(__file__).parents[1] / "thread_bits.py"


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_do_not_change_a_bit(fmt: str, tmp_path: Path) -> None:
    decoder = small_decoder(d_model=72, d_ff=300, context_length=100)
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=[9, 9])
    done = subprocess.run(
        [sys.executable, CHILD, fmt, path, *map(str, THREADS)],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_NUM_THREADS": str(max(THREADS)), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 9 + 6 + 3 * 7
    for what, digests in found.items():
        assert len(digests) == len(THREADS)
        assert len(set(digests)) == 1, what
    assert found["dense decode 7"] != found["predicted decode 7"], "nothing was skipped"
