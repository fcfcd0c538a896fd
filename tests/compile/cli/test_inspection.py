"""What `inspect` counts, for every number format."""

from pathlib import Path

import pytest
from support.paths import GOLDEN
from support.synthetic import random_artifact, small_decoder

from pi_compile.cli.rendering import artifact_text
from pi_runtime.artifact.formats import ROW_FORMATS
from pi_runtime.artifact.inspection import inspect


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_parameters_do_not_depend_on_the_format(tmp_path: Path, fmt: str) -> None:
    decoder = small_decoder("opt", n_layers=1)
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=[3], profiled=True)
    attention = 64 * 32 + 64 + 32 * 32 + 32
    ffn = 2 * 40 * 32 + 40 + 32
    assert inspect(path)["parameters"] == 257 * 32 + 66 * 32 + attention + ffn + 3 * 2 * 32


def test_bytes_of_the_golden_artifact() -> None:
    """Scales are counted with what they scale: 72 columns are 128 bytes in q8, 64 in q4, and 8 bytes of scales."""
    report = inspect(GOLDEN)
    assert report["formats"] == {"embedding": "bf16", "attention": "q8", "ffn": "q4", "head": "f16", "predictor": "f32"}
    layer = 40 * 3 * (64 + 8) + 40 * (4 + 8) + 72 * 4
    assert report["bytes_by_part"] == {
        "embedding": 257 * 192,
        "attention": 2 * (40 * (128 + 8) + 72 * (64 + 8) + 72 * 4),
        "ffn": 2 * layer,
        "predictor": 3 * 320 + 40 * 64 + 40 * 4,
        "head": 257 * 192 + 72 * 4,
        "other": report["bytes"] - sum(n for part, n in report["bytes_by_part"].items() if part != "other"),
    }
    assert any(line.split()[:2] == ["ffn", "q4"] for line in artifact_text(report).splitlines())


def test_scales_of_embedding_and_head_belong_to_them(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(n_layers=1), format="q8")
    assert inspect(path)["bytes_by_part"].keys() == {"embedding", "attention", "ffn", "head", "other"}
    assert inspect(path)["bytes_by_part"]["embedding"] == 257 * (64 + 8)
