"""`pi-compile plan` with several machines: one table, with a row for each."""

import json
from pathlib import Path

import pytest
from support.commands import FIT, USAGE
from support.planned import CONFIG, MACHINE

from pi_compile.cli.main import app
from pi_runtime import console

FIRES = ("--curve", "reglu-70b", "--density", "0.2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    small = MACHINE.cpu.model_copy(update={"ram_gib": 1e-6})
    machines = {
        "m": MACHINE,
        "alone": MACHINE.model_copy(update={"gpu": None, "link": None, "name": "alone"}),
        "tiny": MACHINE.model_copy(update={"gpu": None, "link": None, "disk": None, "cpu": small, "name": "tiny"}),
    }
    for name, machine in machines.items():
        (tmp_path / f"{name}.toml").write_text(machine.to_toml())
    monkeypatch.chdir(tmp_path)


def plan(*machines: str) -> list[str]:
    return ["plan", "config.json", *(part for name in machines for part in ("--machine", f"{name}.toml")), *FIRES]


def test_every_machine_has_a_row_of_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, plan("m", "alone", "tiny", "m")) == 0
    blocks = capsys.readouterr().out.rstrip().split("\n\n")
    assert len(blocks) == 2
    head, *rows = blocks[1].splitlines()
    assert head.split()[:3] == ["machine", "GPU", "RAM"]
    assert [row.split()[0] for row in rows] == [MACHINE.name, "alone", "tiny"]
    assert "does not fit" in rows[2]
    assert "does not fit" not in rows[0] + rows[1]


def test_as_json_each_machine_has_the_plan_that_it_has_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, [*plan("m", "alone", "tiny"), "--json"]) == 0
    together = json.loads(capsys.readouterr().out)["machines"]
    for name, found in zip(("m", "alone"), together, strict=False):
        assert console.run(app, [*plan(name), "--json"]) == 0
        assert found == {"fits": True, **json.loads(capsys.readouterr().out)}
    assert together[2].keys() == {"machine", "fits", "vram_bytes", "ram_bytes", "why"}
    assert not together[2]["fits"]


def test_a_model_that_fits_no_machine_is_refused() -> None:
    assert console.run(app, plan("tiny", "tiny")) == FIT


def test_a_report_is_of_one_machine() -> None:
    arguments = ["report", *plan("m", "alone")[1:], "-o", "page.html"]
    assert console.run(app, arguments) == USAGE
    assert not Path("page.html").exists()
