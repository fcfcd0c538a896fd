"""How threads wait is told to libgomp and to nobody else, and a user's own word stands."""

import os
import subprocess
import sys

import pytest
from support.paths import GOLDEN

from pi_runtime.kernels.codegen.threads import threading_layer

SCRIPT = """
import os, sys
from pi_runtime import load
with load(sys.argv[1]) as model:
    model.logits([1, 2, 3])
print(os.environ.get("GOMP_SPINCOUNT", "none"), numba.threading_layer() if (numba := sys.modules.get("numba")) else "")
"""


def test_the_threading_layer_has_a_name() -> None:
    assert threading_layer() in ("omp", "tbb", "workqueue")


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "0", "1000", "100000", "300"])
def test_libgomp_is_told_once_and_a_users_own_value_stands(own: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if own is None else {"GOMP_SPINCOUNT": own})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(GOLDEN)], capture_output=True, text=True, env=environment, check=True
    )
    left, layer = done.stdout.split()
    assert left == (own or "none")
    if layer == "omp":
        told = [line.split("=")[1].strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
        assert told == [f"'{own or 1000}'"]
