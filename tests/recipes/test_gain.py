"""The demo's comparison on a made-up model: its figures, its words, and what it leaves behind."""

import io
from dataclasses import replace
from pathlib import Path

import gain
import pytest
from rich.console import Console
from sparse_model import Spec

from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.sizes import ArraySpec
from pi_runtime.errors import size

TOKENIZER = (Path(gain.__file__).parent / "tokenizer.json").read_bytes()


@pytest.fixture
def small() -> Spec:
    """The made-up model's shape, a hundred times smaller."""
    decoder = replace(gain.MODEL.decoder, n_layers=2, d_model=256, d_embedding=256, d_ff=1024, n_heads=4, n_kv_heads=2)
    return replace(gain.MODEL, decoder=decoder, rank=64)


def speeds(*rates: float) -> list[gain.Speed]:
    sizes = (600e6, 300e6, 200e6)
    return [
        gain.Speed(mode=mode, tokens_per_s=rate, bytes_per_token=nbytes, share=rate * nbytes / 10e9)
        for mode, rate, nbytes in zip(gain.MODES, rates, sizes, strict=True)
    ]


def test_the_model_has_the_size_that_is_promised() -> None:
    assert gain.nbytes(gain.MODEL) == pytest.approx(0.6e9, rel=0.05)
    assert set(gain.MODEL.formats.values()) <= set(WEIGHT_FORMATS)


@pytest.mark.slow
def test_modes_are_measured_and_the_file_is_deleted(small: Spec, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gain, "READ_BYTES", 1 << 22)
    bandwidth, (dense, gate, predicted) = gain.measure(small, tmp_path, TOKENIZER, rounds=2)
    assert bandwidth > 0
    assert dense.bytes_per_token > gate.bytes_per_token > predicted.bytes_per_token > 0
    # Dense reads all rows of `up`, and of `down` those whose factor is not 0, as gate does.
    up = ArraySpec(small.formats["ffn"], (small.decoder.n_layers * small.decoder.d_ff, small.decoder.d_model))
    more = dense.bytes_per_token - gate.bytes_per_token
    assert more == pytest.approx((1 - small.density) * up.nbytes_with_scales, rel=0.05)
    assert all(speed.tokens_per_s > 0 and speed.share > 0 for speed in (dense, gate, predicted))
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_a_bar_for_each_mode() -> None:
    screen = Console(width=80, color_system=None, record=True, file=io.StringIO())
    screen.print(gain.table(gain.MODEL, 10e9, speeds(10.0, 20.0, 40.0)))
    lines = screen.export_text().splitlines()
    bars = [line.count("█") for line in lines if line.startswith(gain.MODES)]
    assert bars[2] == 2 * bars[1] == 4 * bars[0] > 0
    assert "80 %" in next(line for line in lines if line.startswith("predicted"))
    assert any("10.0 GB/s" in line for line in lines)


def test_the_sentence_says_what_one_sees() -> None:
    told = gain.sentence(speeds(15.0, 30.0, 60.0))
    assert "600 MB" in told
    assert "200 MB" in told
    assert told.endswith("4.0 times as many tokens a second.")
    assert "other programs" in gain.sentence(speeds(5.0, 5.0, 5.0))


def test_what_is_short_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gain, "available_memory", lambda: 1 << 40)
    assert gain.shortage(gain.MODEL, tmp_path) is None
    monkeypatch.setattr(gain, "available_memory", lambda: 1 << 30)
    assert gain.shortage(gain.MODEL, tmp_path) == f"{size(4 * gain.nbytes(gain.MODEL))} of memory, 1.0 GiB free"
    monkeypatch.setattr(gain.shutil, "disk_usage", lambda _: gain.shutil._ntuple_diskusage(0, 0, 1 << 20))
    assert "of disk space, 1.0 MiB free and" in (gain.shortage(gain.MODEL, tmp_path) or "")
