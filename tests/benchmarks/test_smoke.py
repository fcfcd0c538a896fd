"""Every benchmark can be imported, and the engine that most of them ask measures what a run computes."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numba
import numpy as np
import pytest
from support.paths import ROOT
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.schema import Layer

pytest.importorskip("torch")
pytest.importorskip("gguf")
pytest.importorskip("httpx")

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths that `nox -s bench` sets."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "demo"))
    monkeypatch.syspath_prepend(str(HERE))


MODULES = sorted(path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.rglob("[!_]*.py"))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("test_")])
def test_a_benchmark_is_there(name: str) -> None:
    try:
        found = import_module(name.replace("/", "."))
    except ModuleNotFoundError as missing:
        if missing.name != "llama_cpp":
            raise
        pytest.skip("llama-cpp-python is not installed")
    assert "/" in name or callable(found.main)


def test_the_engine_measures_what_a_run_computes(tmp_path: Path) -> None:
    from side_by_side import ours

    layers = (Layer(rung="predicted", rank=3), Layer(rung="gate"))
    path = random_artifact(tmp_path / "a.pi", small_decoder(), ranks=[3, None], layers=layers, scale=3.0)
    ours.open_model("a", str(path), "auto", 64)
    assert len(ours.decode("a", 8, 2)["seconds"]) == 2
    assert ours.changed_by_company("a", 3, 8) == 0
    one, three = ours.shares("a", [1, 3], 8, 2)
    assert one["own"] == pytest.approx(one["union"])
    assert 0 < one["own"] < three["union"] < 1


def test_a_plain_file_computes_what_its_source_does(tmp_path: Path) -> None:
    from side_by_side import ours
    from side_by_side.plain_file import write_plain
    from sparse_model import bytes_per_token

    path = random_artifact(tmp_path / "a.pi", small_decoder(), ranks=[3, 3], scale=3.0)
    write_plain(path, tmp_path / "plain.pi")
    for name, file in {"by neuron": path, "whole": tmp_path / "plain.pi"}.items():
        ours.open_model(name, str(file), "dense", 64)
        assert ours.decode(name, 8, 2)["density"] == 1
    one, other = (ours._models[name] for name in ("by neuron", "whole"))
    assert other.manifest.ffn_layout == "matrices"
    np.testing.assert_allclose(other.logits([5, 9, 11]), one.logits([5, 9, 11]), rtol=1e-4, atol=1e-4)
    assert bytes_per_token(other.manifest) == bytes_per_token(one.manifest)


def test_the_kernels_of_a_prompt_are_timed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import prompts

    sizes = {"d-model": 64, "d-ff": 128, "heads": 2, "kv-heads": 1, "vocabulary": 300, "rank": 16}
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", ["prompts", "--formats", "q8", "--prompts", "64", "--rounds", "1", *flags])
    threads = numba.get_num_threads()
    prompts.main()
    numba.set_num_threads(threads)
    fmt, tokens, *figures = capsys.readouterr().out.splitlines()[-1].split()
    assert (fmt, tokens) == ("q8", "64")
    assert all(float(figure) > 0 for figure in (*figures[:3], *figures[4:]))


def test_the_bench_of_a_gpu_runs_on_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(HERE / "gpu.py"), "--device", "cpu", "--tiny", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["what"] for row in rows} >= {"ours", "ours, gate", "ours, dense", "layers, sparse", "layers, dense"}
    assert all(row["decode"] > 0 for row in rows[1:])
