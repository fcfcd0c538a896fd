"""64 clients on 4 slots, half of them leaving, for a while: `--minutes` of it, and seconds in the suite.

Keys and values go to disk too. Servers are killed, and others go on with what they left.
"""

import random
from pathlib import Path

import pytest
from support.serve_process import serve_process
from support.soak import check, questions, soak
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.schema import Text

CLIENTS, SLOTS = 64, 4
SHORT_S = 4.0
LARGEST_DRIFT = 0.02
KILLS = 3
"""Servers that are killed before the last one, which has most of the time."""
TO_DISK = "from pi_runtime.engine.store import DiskStorey; DiskStorey.pays = True"
"""A small model computes a page faster than any disk reads it."""


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_grows(tmp_path: Path, minutes: float | None) -> None:
    decoder = small_decoder(context_length=192, n_layers=3)
    text = Text(prefix_ids=(), end_ids=(3, 77))
    path = random_artifact(tmp_path / "random.pi", decoder, ranks=[4, None, 6], scale=3.0, text=text)
    with load(path, device="cpu") as model:
        asked = questions(model, 96 if minutes else 40, random.Random(1))
    # Places for clients who have left too, until that is seen. Room for a third of what is asked, so that pages are
    # kept, and dropped again, all the time.
    folder = tmp_path / "pages"
    options = ["--slots", SLOTS, "--queue", 2 * CLIENTS, "--device", "cpu", "--kv-budget", "512KiB"]
    options += ["--kv-disk", folder, "--kv-disk-budget", "200MB"]
    seconds = SHORT_S if minutes is None else 60 * minutes
    for n in range(KILLS):
        with serve_process(path, *options, log=tmp_path / f"log {n}", before=TO_DISK, killed=True) as served:
            wrong = soak(served, asked, clients=CLIENTS, seconds=seconds / 10, seed=n + 1).wrong
        assert not wrong, wrong[:3]
    with serve_process(path, *options, log=tmp_path / "log", before=TO_DISK) as served:
        found = soak(served, asked, clients=CLIENTS, seconds=seconds)
        # Seconds are too short to tell growth from warming up.
        figures = check(served, found, None if minutes is None else LARGEST_DRIFT)
    assert minutes is None or figures["kv_disk_tokens_total"] > 0
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 200e6
    assert not [file.name for file in folder.glob(".*") if file.name != ".budget.lock"]
    print(
        f"\n{figures['kv_disk_tokens_total']:.0f} tokens of prompts read from disk"
        f"\n{found.answered} answers, {found.cancelled} cancelled, {figures['preemptions_total']:.0f} preempted; "
        f"memory {found.resident[-1][1] / 2**20:.1f} MiB, {found.drift:+.2%} since the warm-up; "
        f"pages used {figures['kv_pages_used']:.0f}, all of them kept for later prompts"
    )
