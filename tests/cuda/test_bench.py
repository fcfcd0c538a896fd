"""The bench runs from end to end, its checks included, on a model of two layers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch
from gpu_bench.model import OPT, REGLU, TINY, make

BENCH = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def test_neurons_fire_as_the_curve_says() -> None:
    for curve in (OPT, REGLU):
        found = curve.frequencies(11008)
        assert abs(found.mean() / curve.density - 1) < 0.02
        assert found.max() <= 1
        assert found[0] > 10 * curve.density / 4 > found[-1]
    artifact = make(TINY, torch.device("cpu")).with_curve(REGLU)
    x = torch.randn(500, TINY.d_model)
    w = {n: torch.from_numpy(artifact.array(f"layers/1/ffn/{n}")).float() for n in ("first", "first_bias")}
    fires = (x @ w["first"].T + w["first_bias"] > 0).float().mean(0)
    assert abs(fires.mean().item() / REGLU.density - 1) < 0.35


def test_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--device", "cpu", "--tiny", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no time for" not in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["what"] for row in rows[:3]] == ["ours", "layers, sparse", "layers, dense"]
    (offload,) = rows[3:]
    real = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers"))
    assert offload["what"].startswith("accelerate " if real else "copy of accelerate")
    assert all(row["decode"] > 0 for row in rows)
    assert 0 < rows[0]["neurons"] < 1
    assert rows[0]["handover_us"] is not None
