"""A fact of a decoder is one record: a test makes one, and no file of the product changes but the bodies."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from support.paths import ROOT

SCRIPT = ROOT / "tests/support/new_fact.py"


def test_a_fact_that_the_product_does_not_have() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("damped\n", 0), done.stderr
