"""Runs on damaged weights, and on decoders that nobody made: they end in text or in an error, never in a crash."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import SystemRandom

import pytest
from support.fuzz.cases import SHARES
from support.paths import GOLDEN, ROOT
from support.stored import GROUPED_FORMATS
from support.synthetic import counted_artifact, random_artifact, small_decoder

SHORT, AT_ONCE = 60, 200
SECONDS = 10
"""For a run in the mean; each takes a few milliseconds where kernels are compiled."""


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("long_form")
def test_runs_on_damaged_weights_do_not_crash(
    tmp_path: Path, minutes: float | None, pytestconfig: pytest.Config
) -> None:
    shutil.copy(GOLDEN, tmp_path / "golden.pi")
    experts = small_decoder(n_experts=3, experts_per_token=2)
    random_artifact(tmp_path / "experts.pi", experts, format="q8", ranks=[2, None])
    random_artifact(tmp_path / "opt.pi", small_decoder("opt"), format="f16", ranks=[2, None], profiled=True)
    random_artifact(tmp_path / "plain.pi", small_decoder(activation="silu"), format="q4")
    for name in GROUPED_FORMATS:
        counted_artifact(tmp_path / f"{name}.pi", small_decoder(d_model=256, n_heads=8, head_dim=32, d_ff=256), name)
    seed = pytestconfig.getoption("--seed")
    if seed is None:
        seed = 1 if minutes is None else SystemRandom().randrange(1 << 32)
    print(f"--seed {seed}")
    first, until = 0, time.monotonic() + 60 * (minutes or 0) / SHARES
    while first == 0 or time.monotonic() < until:
        first += watched_runs(tmp_path, seed, first, SHORT if minutes is None else AT_ONCE)
    print(f"{first:,} runs")


def watched_runs(folder: Path, seed: int, first: int, count: int) -> int:
    """Run some cases in a process; returns how many. Fails naming the case that went wrong."""
    command = [sys.executable, "-m", "support.fuzz.running", str(folder), str(seed), str(first), str(count)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60 + SECONDS * count, env=environment, check=False
    )
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if not line.endswith(" ok")]
    assert not wrong, f"--seed {seed}: run {wrong[0]}\n{done.stderr[-3000:]}"
    assert (done.returncode, len(lines)) == (0, count), f"--seed {seed}: exit {done.returncode}\n{done.stderr[-3000:]}"
    return count
