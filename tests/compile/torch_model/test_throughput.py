"""What a stage announces before it begins."""

import pytest

pytest.importorskip("torch")

from pi_compile.torch_model.throughput import LONG_S, Estimate


def test_what_takes_long_says_how_to_have_less() -> None:
    short = Estimate(seconds=LONG_S, disk_bytes=0, memory_bytes=1 << 30)
    assert "for less" not in short.announced("profiling", 1_000_000, 1, "[corpus] fit_tokens")
    long = Estimate(seconds=4 * LONG_S, disk_bytes=0, memory_bytes=1 << 30)
    line = long.announced("profiling", 1_000_000, 2, "[corpus] fit_tokens")
    assert line.startswith("profiling on 1,000,000 tokens: about 1,200 s, ")
    assert "[corpus] fit_tokens = 500_000 (about 600 s)" in line
    assert "for less" not in long.announced("profiling", 1_000_000, 4, "[corpus] fit_tokens")
