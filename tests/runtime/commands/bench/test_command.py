"""`pi-run --bench` as its user meets it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.documents import assert_as_documented
from support.paths import ROOT
from support.synthetic import random_artifact, small_decoder

from pi_runtime.commands.bench import ram_sweep
from pi_runtime.commands.bench.sequences import Sequences

Run = Callable[..., tuple[int, str, str]]

BRIEF = ("--bench", "--batches", "1,3", "--prompt-tokens", "5,500", "--repetitions", "2", "--device", "cpu")
LEFT_OUT = ["prompt of 500: the context has 96 tokens"]


def test_json(run: Run, random_path: Path) -> None:
    code, out, err = run(random_path, *BRIEF, "--json", "--threads", 1)
    found = json.loads(out)
    assert code == 0
    assert err.endswith("".join(f"left out: {reason}\n" for reason in LEFT_OUT))
    assert_as_documented("pi-run --bench", found)
    assert (found["bytes"], found["device"], found["threads"]) == (random_path.stat().st_size, "cpu", 1)
    assert found["digest"].encode() in random_path.read_bytes()
    assert found["left_out"] == LEFT_OUT
    assert [(r["mode"], r["phase"], r["batch"], r["tokens"]) for r in found["rows"]] == [
        (mode, *test) for test in [("decode", 1, 1), ("decode", 3, 1), ("prompt", 1, 5)] for mode in ("auto", "dense")
    ]
    row = found["rows"][1]
    assert row.keys() == {
        "mode", "phase", "batch", "tokens", "repetitions", "tokens_per_s", "tokens_per_s_deviation", "seconds",
        "times_dense",
    }  # fmt: skip
    assert row["repetitions"] == len(row["seconds"]) == 2


def test_a_table(run: Run, random_path: Path) -> None:
    code, out, _ = run(random_path, *BRIEF)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("artifact   random.pi, ")
    head = next(n for n, line in enumerate(lines) if line.startswith("mode"))
    assert lines[head].split() == ["mode", "test", "tokens/s", "×", "alone", "×", "dense", "ms", "runs"]
    assert [line.split()[:3] for line in lines[head + 1 :]][:3] == [
        ["auto", "decode", "×"], ["dense", "decode", "×"], ["auto", "decode", "×"]
    ]  # fmt: skip
    assert lines[head + 2].endswith(" 2")


def test_markdown(run: Run, random_path: Path) -> None:
    code, out, _ = run(random_path, *BRIEF, "--md")
    told, empty, head, rule, *rows = out.splitlines()
    assert code == 0
    assert told.startswith("random.pi, ")
    assert empty == ""
    assert (head.count("|"), rule.count("|"), len(rows)) == (8, 8, 6)
    assert all(row.count("|") == 8 for row in rows)


@pytest.mark.parametrize("flags", [[], ["--json"], ["--md"]], ids=["text", "json", "markdown"])
def test_ctrl_c_prints_what_there_is(
    run: Run, random_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, measure = [], Sequences.seconds_a_step

    def interrupted(sequences: Sequences, batch: int) -> float:
        calls.append(batch)
        if batch == 3:
            raise KeyboardInterrupt
        return measure(sequences, batch)

    monkeypatch.setattr(Sequences, "seconds_a_step", interrupted)
    code, out, err = run(random_path, *BRIEF, "--seconds", 0, *flags)
    assert (code, calls) == (130, [1] * 6 + [3])
    assert "decode × 1" in out or '"batch": 1' in out
    assert "decode × 3" not in out
    assert "interrupted" in err.splitlines()[-1]


def test_llama_cpp_beside_it(run: Run, random_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    write_gguf(ROOT / "recipes" / "demo", tmp_path / "a.gguf", "f32")
    brief = [str(part) for part in BRIEF]
    code, out, err = run(random_path, *brief, "--beside", tmp_path / "a.gguf", "--json")
    assert code == 0, err
    assert [row["batch"] for row in json.loads(out)["rows"] if row["mode"] == "llama.cpp"] == [1, 1]
    (tmp_path / "b.gguf").write_text("none")
    assert run(random_path, *brief, "--beside", tmp_path / "b.gguf")[0] == 3


def test_ctrl_c_before_anything_is_measured(run: Run, random_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(sequences: Sequences, batch: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sequences, "seconds_a_step", interrupted)
    assert run(random_path, *BRIEF)[:2] == (130, "")


SWEEP = ("--bench", "--ram-budget", "8GiB", "--seconds", "120", "--mode", "predicted")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose FFNs are larger than what a process grows by."""
    decoder = small_decoder(d_model=128, d_ff=8192, n_layers=6, context_length=96)
    path = tmp_path_factory.mktemp("wide") / "wide.pi"
    return random_artifact(path, decoder, format="f16", ranks=[8] * 6, scale=3.0)


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, and time for all of them where other processes test beside: what is read depends on no clock."""
    monkeypatch.setattr(ram_sweep, "MOST_TOKENS", 6)


@pytest.mark.usefixtures("few_tokens")
def test_a_curve_over_budgets(run: Run, wide: Path) -> None:
    code, out, err = run(wide, *SWEEP, "--json", "--threads", 1)
    assert code == 0
    found = json.loads(out)
    rows = found["budgets"]
    assert len(rows) == ram_sweep.BUDGETS
    assert (found["left_out"], err) == ([], "")
    assert (found["device"], found["threads"]) == ("cpu", 1)
    budgets = [row["ram_budget"] for row in rows]
    assert budgets == sorted(budgets, reverse=True)
    assert {len(row["seconds"]) for row in rows} == {6}
    assert budgets[0] < 8 << 30  # no more than holds everything
    assert (rows[0]["disk_hit_rate"], rows[0]["disk_bytes_per_token"]) == (1, 0)
    assert rows[-1]["disk_hit_rate"] < 1
    assert rows[-1]["disk_bytes_per_token"] > 0
    assert all(row["tokens_per_s"] == pytest.approx(len(row["seconds"]) / sum(row["seconds"])) for row in rows)


@pytest.mark.usefixtures("few_tokens")
def test_a_curve_is_drawn(run: Run, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_sweep, "BUDGETS", 2)
    code, out, _ = run(wide, *SWEEP, "--threads", 1)
    assert code == 0
    head = next(n for n, line in enumerate(out.splitlines()) if line.startswith("budget"))
    rows = [line.split() for line in out.splitlines()[head + 1 :]]
    rates, bars = [float(row[2]) for row in rows], [row[-1] for row in rows]
    assert len(bars[rates.index(max(rates))]) == max(map(len, bars)) == 30
    assert all(set(bar) == {"█"} for bar in bars)
    assert len(rows) == 2
    _, out, _ = run(wide, *SWEEP, "--md", "--threads", 1)
    assert out.splitlines()[2].startswith("| budget | tokens/s |")


def test_a_curve_needs_a_budget_that_fits(run: Run, wide: Path) -> None:
    code, _, err = run(wide, "--bench", "--ram-budget", "1MiB")
    assert code == 4
    assert "expected: at least" in err
