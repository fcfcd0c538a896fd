"""`pi-compile plan MODEL` and nothing else: every number format on this machine, which is measured once and kept."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import FIT
from support.planned import CONFIG, MACHINE

from pi_compile.cli.main import app
from pi_compile.machine import Machine, measurement
from pi_compile.machine.doctor import usable_cores
from pi_compile.machine.profile import Disk
from pi_compile.planning.model_config import find_planned
from pi_runtime import console
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.execution.devices import processor_name

DISK = Disk(name="nvme", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])
WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 16, "hidden_act": "silu"}
Plan = Callable[..., dict[str, Any]]


def machine(ram: float, **change: object) -> Machine:
    """A machine with the processor of this one and a disk."""
    found = MACHINE.cpu.model_copy(update={"name": processor_name(), "cores": usable_cores(), "ram_gib": ram})
    return MACHINE.model_copy(update={"cpu": found, "gpu": None, "link": None, "disk": DISK, **change})


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A cache folder of the test's own, a model, and a machine of 4 GiB; a value for each time it is measured."""
    found: list[bool] = []

    def measure(folder: Path, _notice: object, *, briefly: bool) -> Machine:
        assert folder == tmp_path / "cache"
        found.append(briefly)
        return machine(4.0)

    monkeypatch.setenv("PI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measurement, "measure_machine", measure)
    monkeypatch.setattr("pi_compile.machine.this_machine.installed_ram", lambda: 4 << 30)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(WIDE))
    (tmp_path / "bare.toml").write_text(machine(4.0, disk=None, name="bare").to_toml())
    return found


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs `plan`; its JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        assert console.run(app, ["plan", *arguments, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert console.run(app, ["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_this_machine_is_measured_once(
    measured: list[bool], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert console.run(app, ["plan", "model"]) == 0
    assert "measuring this machine, once" in capsys.readouterr().err
    assert console.run(app, ["plan", "model"]) == 0
    assert capsys.readouterr().err == ""
    assert measured == [True]
    kept = tmp_path / "cache" / "machine.toml"
    kept.write_text("version = 1\n")  # of another version
    assert console.run(app, ["plan", "model"]) == 0
    assert measured == [True, True]
    kept.write_text(machine(2.0).to_toml())  # of a machine with less RAM
    assert console.run(app, ["plan", "model"]) == 0
    assert measured == [True, True, True]


def test_every_format_has_its_bytes_and_speeds(plan: Plan) -> None:
    found = plan("model")
    assert [row["format"] for row in found["formats"]] == WEIGHT_FORMATS
    decoder = find_planned("model", Path()).decoder
    for row in found["formats"]:
        layout = "matrices" if not FORMATS[row["format"]].summed else "neurons"
        formats = dict.fromkeys(PARTS, row["format"])
        specs = array_specs(decoder, formats, [None] * decoder.n_layers, profiled=False, layout=layout)
        assert row["bytes"] == sum(spec.nbytes for spec in specs.values())
        assert row["runs"] == "in memory"
        if row["format"] not in ("f16", "q4", "q5_k"):
            continue
        alone = plan("model", "--machine", "./cache/machine.toml", "--format", row["format"])["budgets"][1]
        assert row["decode_tokens_per_s"] == alone["decode_tokens_per_s"]
        seconds = 2000 / alone["prefill_tokens_per_s"] + 1 / alone["decode_tokens_per_s"]
        assert row["first_token_s"] == pytest.approx(seconds)
    assert (found["runs"], found["format"], found["file"]) == ("in memory", "q8", None)


def test_formats_that_are_not_cut_into_neurons_are_left_out_where_they_must_be(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "narrow.json").write_text(json.dumps({**WIDE, "hidden_size": 64}))
    (tmp_path / "sparse.json").write_text(json.dumps({**WIDE, "hidden_act": "relu"}))
    any_width = [name for name in WEIGHT_FORMATS if not FORMATS[name].grouped]
    assert [row["format"] for row in plan("narrow.json")["formats"]] == any_width
    fires = ("--curve", "reglu-70b", "--density", "0.2")
    assert [row["format"] for row in plan("sparse.json", *fires)["formats"]] == ROW_FORMATS


def test_how_the_neurons_fire_is_told(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sparse.json").write_text(json.dumps({**WIDE, "hidden_act": "relu"}))
    fires = ("--curve", "reglu-70b", "--density", "0.2")
    assert "silu: no neuron is ever exactly zero" in text_of(capsys, "model")
    assert "20.0% of the neurons fire for a token" in text_of(capsys, "sparse.json", *fires, "--format", "all")
    found = plan("sparse.json", *fires, "--format", "all")
    assert (found["density"], found["experts"]) == (0.2, 1)
    assert found["activation"].startswith("curve reglu-70b, density 0.2")


def test_the_answer_comes_first(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.match(r"answer +it runs: in q8, within 4\.0 GiB of RAM, at [\d.]+ tokens/s\n", text_of(capsys, "model"))
    rows = {row["format"]: row for row in plan("model")["formats"]}
    for budget, answer in (
        (rows["q8"]["all_in_ram_bytes"] - 1, "it runs: in q6"),
        (min(row["all_in_ram_bytes"] for row in rows.values()) - 1, "it runs from disk: in q4"),
    ):
        text = text_of(capsys, "model", "--ram-budget", str(budget))
        assert text.split(maxsplit=1)[1].startswith(answer), text
    assert re.search(r"\nf16 .* from disk\n", text)
    none = text_of(capsys, "model", "--ram-budget", "1MiB", "--machine", "bare.toml", "--format", "all")
    assert re.match(
        r"answer +it does not run: i?q4\w*, the smallest, takes .*, and no disk in the machine profile\n", none
    )
    assert "take" not in none.split("model")[0].split("\n")[1:]


def test_what_does_not_fit_in_the_format_of_its_config_names_one_that_does(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["format"]: row["all_in_ram_bytes"] for row in plan("model")["formats"]}
    arguments = ["plan", "model", "--machine", "bare.toml", "--ram-budget"]
    for budget, remedy in ((rows["q8"], "--format q8 runs"), (1 << 20, "--format all compares the formats")):
        assert console.run(app, [*arguments, str(budget)]) == FIT
        message = capsys.readouterr().err
        assert f"; {remedy}; bare has no disk in its profile to run from" in message


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ({"m-Q8_0": 1.02, "m-Q4_K_M": 0.6, "m-F16": 2.0}, "m-Q8_0.gguf"),
        ({"m-Q6_K": 0.8, "m-Q4_K_M": 0.6, "m-F16": 2.0, "mmproj-F16": 0.9}, "m-Q6_K.gguf"),
        ({"m-F16-00001-of-00002": 0.9, "m-F16-00002-of-00002": 0.9, "m-Q4_0": 0.5}, "m-Q4_0.gguf"),
        ({"m-F32": 4.0, "m-F16": 2.0}, "m-F16.gguf"),
        ({"mmproj-F16": 0.9}, None),
    ],
)
def test_the_largest_file_of_about_that_format_is_taken(
    sizes: dict[str, float], taken: str | None, plan: Plan, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    (q8,) = (row["bytes"] for row in plan("model")["formats"] if row["format"] == "q8")
    for name, share in sizes.items():
        with (tmp_path / "model" / f"{name}.gguf").open("wb") as file:
            file.truncate(int(share * q8))
    assert plan("model")["file"] == (taken and str(Path("model") / taken))
