"""A number format is one object: one that a test makes is packed, read and run, and no file of the product changes."""

import os
import subprocess
import sys

import pytest
from support.paths import ROOT

SCRIPT = ROOT / "tests/support/new_format.py"
NEEDS = {"numpy": (), "cpu": (), "gpu": ("torch", "triton"), "compiler": ("gguf", "pydantic")}


@pytest.mark.parametrize("where", NEEDS)
def test_a_format_that_the_product_does_not_have(where: str) -> None:
    for module in NEEDS[where]:
        pytest.importorskip(module)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), where]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("q6_1\n", 0), done.stderr
