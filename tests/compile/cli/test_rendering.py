"""Key–value lists and tables: whole when they are piped, folded but never cut on a terminal."""

from typing import Any

import pytest

from pi_compile.cli.rendering import eval_line, findings_text, print_report
from pi_compile.machine.doctor import Finding
from pi_runtime.console import facts, table, text_of

LONG = "/a/folder/with-a-name-that-has-no-place-to-break" * 5
ROWS = [{f"column {n}": 1234567.0 + n for n in range(12)}, {f"column {n}": None for n in range(12)}]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes stdout a terminal of 60 columns."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_no_digit_of_a_table_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"total": 3, "rows": ROWS, "none": [], "more": [4, 5]})
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == ["total  3", "more   4 5", ""]
    assert all(f"{1234567 + n:,}" in out for n in range(12))
    assert len(out.splitlines()) == 6
    assert "…" not in out


@pytest.mark.usefixtures("narrow")
def test_a_table_keeps_its_rows_on_a_narrow_terminal() -> None:
    lines = text_of(table(ROWS)).splitlines()
    assert len(lines) == 3
    assert "…" not in lines[1]
    assert "\x1b[1m" in lines[0], "heads are bold"


@pytest.mark.parametrize("text", ["word " * 30, LONG, "[red]no[/red] markup :smile:"])
def test_a_piped_value_stays_on_one_line(text: str) -> None:
    assert text_of(facts([("key", text), ("longer key", "x")])).splitlines() == [
        f"key         {text}".rstrip(),
        "longer key  x",
    ]


@pytest.mark.usefixtures("narrow")
def test_a_long_value_is_folded_beside_its_key_on_a_terminal() -> None:
    lines = text_of(facts([("key", "word " * 30), ("path", "y")])).splitlines()
    assert lines[0].startswith("key   word")
    assert all(line.startswith("      word") for line in lines[1:-1])
    assert max(map(len, lines)) <= 60
    assert LONG in text_of(facts([("path", f"in {LONG}")])), "a path can be copied"


@pytest.mark.parametrize("value", ["\x1b[2J", "a\rb", "\x9b1m"])
def test_control_characters_are_replaced(value: str) -> None:
    rows: list[dict[str, Any]] = [{"name": value}]
    assert all(c.isprintable() for c in text_of(facts([(value, value)]), table(rows)).replace("\n", ""))


def test_an_evaluation_in_a_line() -> None:
    found = {
        "perplexity": {"checkpoint": 9.0, "dense": 10.0, "gate": 10.0, "predicted": 10.003},
        "ffn_bytes_per_token": {"dense": 200.0, "gate": 100.0, "predicted": 60.0},
        "bytes_per_token": {"dense": 300.0, "gate": 200.0, "predicted": 147.0},
        "layers": [{"rung": "gate", "rank": None}, *[{"rung": "predicted", "rank": rank} for rank in (8, 16, 8)]],
    }
    assert eval_line(found) == (
        "predicted: 4 layers, 1 gate, 3 predicted; predictor ranks 8 to 16; "
        "a token reads 30% of the FFN's bytes of dense, and 49% of all; perplexity +0.03%"
    )


def test_findings_are_aligned_and_remedies_stand_below() -> None:
    findings = [Finding("python", "3.11"), Finding("extra cuda", "missing triton", "install it")]
    assert findings_text(findings).splitlines() == [
        "python      3.11",
        "extra cuda  missing triton",
        "            → install it",
    ]
