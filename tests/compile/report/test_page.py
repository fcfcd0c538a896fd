"""`pi-compile report`: one page, whole, safe, that says what `plan` says; and what users get wrong about it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from support.commands import FIT, USAGE, assert_a_message, child
from support.documents import assert_as_documented
from support.paths import ROOT
from support.synthetic import small_decoder

pytest.importorskip("matplotlib")

from support.planned import CONFIG, MACHINE

from pi_compile.cli.main import app
from pi_compile.cli.options import PlanOptions
from pi_compile.cli.plan_request import plan_request
from pi_compile.cost_model.processors import PICO
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Disk
from pi_compile.pipeline.lock_file import lock_path
from pi_compile.placement.formulation import Problem
from pi_compile.placement.stage import place
from pi_compile.planning.forecast import PlanSpec, activation_profile
from pi_compile.report.drawing import COLOURS, NBSP, digits, duration, percent, span
from pi_compile.report.explanation import Budget, Explanation, busy, explain
from pi_compile.report.page import answer_of, report_page
from pi_compile.results.activation_profile import ActivationProfile
from pi_runtime import console
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.errors import size

VOID = {"meta", "link", "img", "br", "hr", "input", "source", "wbr"}
HERE = ("config.json", "--machine", "m.toml", "--vram-budget", "300KiB", "--counts", "p.npz")
Run = Callable[..., str]


def activations(layers: int = 4, neurons: int = 256, seed: int = 0) -> ActivationProfile:
    """Counts that differ from layer to layer."""
    rng = np.random.default_rng(seed)
    decoder = small_decoder(
        "llama", d_model=64, d_ff=neurons, n_layers=layers, n_kv_heads=4, head_dim=16, vocab_size=500
    )
    counts = (1000 * rng.random((layers, neurons)) ** rng.uniform(2, 8, (layers, 1))).astype(np.uint64)
    order = np.argsort(-counts.astype(np.int64), axis=1).astype(np.uint32)
    return ActivationProfile(decoder=decoder, tokens=1000, counts=counts, order=order, inputs="x")


def fill(folder: Path) -> Path:
    """A model's config, its counts, and two machines."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "m.toml").write_text(MACHINE.to_toml())
    alone = MACHINE.model_copy(update={"gpu": None, "link": None, "name": "alone"})
    (folder / "alone.toml").write_text(alone.to_toml())
    activations().save(folder / "p.npz")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(fill(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of `HERE`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(fill(tmp_path_factory.mktemp("page")))
        assert console.run(app, ["report", *HERE, "-o", "page.html"]) == 0
        return Path("page.html").read_text(encoding="utf-8")


@pytest.fixture
def report(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `report` in the folder; the page."""

    def run(*arguments: object) -> str:
        code = console.run(app, ["report", *map(str, arguments), "-o", "page.html"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return (folder / "page.html").read_text(encoding="utf-8")

    return run


def request(target: str, machine: str | None = None, **options: Any) -> PlanSpec:
    return plan_request(PlanOptions(model=target, machine=None if machine is None else [machine], **options))


def explained(target: str, **options: Any) -> Explanation:
    return explain(request(target, **options))


class Page(HTMLParser):
    """Tags that are closed as they were opened, and what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id" and value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def figures(page: str) -> dict[str, ET.Element]:
    """The page's figures by the prefix of their ids."""
    found = [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]  # noqa: S314
    return {figure.attrib["aria-labelledby"].split("-")[0]: figure for figure in found}


def tables(page: str) -> dict[str, list[list[str]]]:
    """Rows of each table, as HTML: head, body and foot."""
    found = re.findall(r'aria-label="([^"]*)"><table>(.*?)</table>', page, re.S)
    return {
        name: [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", body)]
        for name, body in found
    }


def exact(cell: str) -> int:
    """The number that a cell says to machines."""
    found = re.search(r'<data value="(\d+)">', cell)
    assert found, cell
    return int(found[1])


# What a page is.


def test_a_page_is_well_formed(page: str) -> None:
    found = Page(page)
    assert found.open == []
    assert page.startswith("<!doctype html>\n")
    assert max(found.ids.values()) == 1
    referred = [word for name, value in found.attributes if name == "aria-labelledby" for word in value.split()]
    referred += re.findall(r'(?:href="|url\()#([\w-]+)', page)
    assert set(referred) <= set(found.ids)
    for figure in figures(page).values():
        assert figure.attrib["role"] == "img"
        title, about = list(figure)[:2]
        assert (title.tag, about.tag) == ("title", "desc")
        assert title.text
        assert about.text


def test_a_page_needs_nothing_else(page: str) -> None:
    """No address of anything, no script, and a policy under which a browser would fetch none."""
    found = Page(page)
    assert "://" not in page
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "base", "form"} & set(found.tags)
    assert not {"src", "srcset", "action", "background"} & {name for name, _ in found.attributes}
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "default-src 'none'" in page


def test_every_colour_has_a_light_and_a_dark_value(page: str) -> None:
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= set(COLOURS)
    assert page.count("--ink:") == 2
    assert not re.findall(r"(?:fill|stroke): #", page)


@pytest.mark.slow
def test_the_same_placement_gives_the_same_bytes(page: str, folder: Path) -> None:
    """Also in another process with other hashes, and whatever the user's own matplotlib settings are."""
    (folder / "matplotlibrc").write_text("font.size: 30\naxes.grid: True\nsvg.fonttype: path\n")
    env = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(folder / "matplotlibrc"), "LC_ALL": "C"}
    arguments = [sys.executable, "-m", "pi_compile", "report", *HERE, "-o", "again.html"]
    subprocess.run(arguments, check=True, env=env, capture_output=True)
    assert (folder / "again.html").read_text(encoding="utf-8") == page


def test_names_in_files_are_text(report: Run, folder: Path) -> None:
    bad = '<script>alert(1)</script>"><img src=x onerror=y>&amp;$\\frac{a}$'
    cpu = MACHINE.cpu.model_copy(update={"name": bad})
    hostile = MACHINE.model_copy(update={"name": bad, "source": bad, "cpu": cpu})
    (folder / "m.toml").write_text(hostile.to_toml())
    name = "<b onclick=x>&'"
    (folder / name).mkdir()
    (folder / "config.json").rename(folder / name / "config.json")
    (folder / "p.npz").rename(folder / "<i>.npz")
    page = Page(report(name, *HERE[1:-1], "<i>.npz"))
    assert not {"script", "img", "b"} & set(page.tags)
    assert not {"onerror", "onclick"} & {attribute for attribute, _ in page.attributes}
    assert page.text.count(bad) == 5  # title, heading, machine and its source, processor: escaped, not dropped
    assert name in page.text
    assert "in <i>.npz" in page.text


# What it says.


def test_the_figures_are_those_of_plan(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, ["plan", *HERE, "--json"]) == 0
    less, main, more = json.loads(capsys.readouterr().out)["budgets"]
    by_part, by_budget, by_layer = (
        tables(page)[name] for name in ("Bytes by part", "What other budgets would give", "Layers")
    )
    layers = by_layer[1:-2]
    assert len(layers) == 4
    total = exact(by_layer[-1][-1])
    assert sum(exact(row[-1]) for row in layers) + exact(by_layer[-2][-1]) == total
    assert 1e12 / total == main["decode_tokens_per_s"]
    assert [int(row[2].replace(",", "")) for row in layers] == main["cuts"]
    assert [exact(row[1]) for row in by_part[1:9]] == list(main["gpu_bytes_by_part"].values())
    assert [exact(row[3]) for row in by_part[1:9]] == list(main["ram_bytes_by_part"].values())
    assert exact(by_part[-2][1]) == main["vram_bytes"]
    rates = {row[0].replace(NBSP, " "): row[1] for row in by_budget[1:]}
    for budget in (less, main, more):
        assert rates[size(budget["vram_bytes"])] == digits(budget["decode_tokens_per_s"])


def test_a_part_of_a_layer_takes_its_share(page: str) -> None:
    """Times of a row: the two sides of an FFN work at once."""
    for row in tables(page)["Layers"][1:-2]:
        attention, predictor, gpu, cpu, handover, total = map(exact, row[-6:])
        assert attention + predictor + max(gpu, cpu) + handover == total


def test_bars_are_as_high_as_the_cuts(page: str) -> None:
    cuts = [int(row[2].replace(",", "")) for row in tables(page)["Layers"][1:-2]]
    assert len(set(cuts)) > 1
    first = next(path for path in figures(page)["cuts"].iter("path") if "var(--gpu)" in path.attrib.get("style", ""))
    numbers = np.array(re.findall(r"[-\d.]+", first.attrib["d"]), float).reshape(-1, 4, 2)  # the end is a Z
    heights = np.ptp(numbers[:, :, 1], axis=1)
    np.testing.assert_allclose(heights / heights.max(), [cut / max(cuts) for cut in cuts if cut], atol=0.002)


def test_units_work_no_longer_than_a_token_takes(folder: Path) -> None:
    e = explained("config.json", machine="m.toml", vram_budget="300KiB", counts=Path("p.npz"))
    time, processors = e.placement.time, busy(e.placement)
    assert sum(time.parts.values()) == time.total
    work = {part: sum(processor[part] for processor in processors.values()) for part in time.parts}
    assert {part for part in work if work[part] != time.parts[part]} <= {"ffn"}
    assert (
        processors["GPU"]["ffn"] + processors["CPU"]["ffn"]
        >= time.parts["ffn"]
        >= max(u["ffn"] for u in processors.values())
    )


def test_it_is_the_placement_of_the_lock() -> None:
    recipe = ROOT / "recipes" / "demo.toml"
    lock = lock_path(recipe).read_text(encoding="utf-8")
    e = explained(str(recipe), vram_budget=f"{re.findall(r'^vram_bytes = (.+)', lock, re.M)[2]}B")
    assert f'digest = "{e.placement.digest}"' in lock
    locked = {int(n) for n in re.findall(r"^vram_bytes = (\d+)", lock, re.M)}
    assert locked <= {budget.vram for budget in e.budgets}
    for budget in e.budgets:
        assert budget.placement is not None
        assert (f'digest = "{budget.placement.digest}"' in lock) == (budget.vram in locked)
    assert e.placement.digest in report_page(e)


def test_ranks_are_drawn_where_training_chose_them(page: str) -> None:
    trained = report_page(explained(str(ROOT / "recipes" / "demo.toml")))
    ranks = figures(trained)["ranks"]
    assert [text.text for text in ranks.iter("text")][-5:-1] == ["0", "1", "2", "3"]
    assert "ranks" not in figures(page)
    assert "of rank 32 in every layer, by rule" in page


def test_without_a_gpu(report: Run) -> None:
    page = report("config.json", "--machine", "alone.toml", "--counts", "p.npz")
    assert set(figures(page)) == {"token", "memory", "curves", "layers"}
    assert tables(page)["Bytes by part"][0] == ["part", "RAM", "of RAM budget"]
    assert tables(page)["What other budgets would give"][2][0] == f"1.0{NBSP}GiB"
    assert "Hand-over" not in page


def test_a_model_without_zeros(report: Run, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "silu"}))
    page = report(*HERE[:-2])
    assert "4 layers dense" in page
    assert "Predictor rank" not in page


def test_budgets_that_do_not_fit_are_shown_as_such(report: Run) -> None:
    page = report(*HERE, "--ram-budget", PROCESS_NBYTES + 3_800_000)
    rows = tables(page)["What other budgets would give"][1:]
    lost = [row[1] == "does not fit" for row in rows]
    assert lost == sorted(lost, reverse=True)
    assert {True, False} == set(lost)
    assert "does not fit into memory" in page


def test_many_layers_stay_readable(folder: Path) -> None:
    """96 that all differ: a page of bounded size, a key of at most six colours."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 96}))
    activations(layers=96).save(folder / "p.npz")
    spec = request("config.json", machine="m.toml", vram_budget="4MiB", counts=Path("p.npz"))
    activation = activation_profile(spec)
    work = Workload.of(activation, spec.formats, spec.context)
    # The greedy solver answers at once, and the page is the same.
    placement = place(Problem.of(work, spec.machine), spec.vram, spec.ram, solver="greedy")
    rates = {"prefill_tokens_per_s": 1.0, "layer_split_tokens_per_s": 1.0, "powerinfer_tokens_per_s": 1.0}
    asked = Budget(vram=spec.vram, ram=spec.ram, asked=True, placement=placement, **rates)
    e = Explanation(
        spec=spec,
        source=activation.source,
        trained=bool(activation.layers),
        curves=activation.cumulative_curve(),
        work=work,
        placement=placement,
        budgets=(asked,),
        all_on_gpu=spec.vram,
        ram_budgets=(),
    )
    page = report_page(e)
    assert Page(page).open == []
    assert len(page.encode()) < 400_000
    assert len(tables(page)["Layers"]) == 1 + 96 + 2
    key = re.search(r"<ul class=\"key\">(?:(?!</ul>).)*layers</li>(.*?)</ul>", page)
    assert key is not None
    assert key[1].startswith('<li><i class="dot" style="background:var(--layer0)"></i>0–')
    assert key[1].count("<li>") == 6


def test_the_answer_is_in_plain_words(folder: Path) -> None:
    e = explained("config.json", machine="m.toml", vram_budget="300KiB", counts=Path("p.npz"))
    text = answer_of(e)
    assert text.startswith("It fits into 300.0 KiB of GPU memory and 1.0 GiB of RAM: ")
    assert "A quarter more GPU memory would give " in text
    assert text.isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (digits(1234.5), "1,234"),
        (digits(15.93), "15.9"),
        (digits(0.0123), "0.0123"),
        (digits(0), "0"),
        (duration(15_930_000_000), f"15.9{NBSP}ms"),
        (duration(999), f"0.999{NBSP}ns"),
        (percent(0.0004), f"<{NBSP}0.1{NBSP}%"),
        (percent(0), f"0{NBSP}%"),
        (percent(0.081), f"8.1{NBSP}%"),
        (span("1", "1"), "1"),
        (span("1", "2"), "1 to 2"),
    ],
)
def test_quantities(text: str, expected: str) -> None:
    assert text == expected


# The command.


def test_json_keys_are_documented(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, ["report", *HERE, "-o", "page.html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert_as_documented("report", found)
    assert found["bytes"] == (folder / "page.html").stat().st_size


def test_only_reports_are_replaced(page: str, report: Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "page.html").write_text(page.replace("config.json on small", "older"), encoding="utf-8")
    assert report(*HERE) == page
    for name, said in (("p.npz", "is no report"), ("lost/page.html", "no folder"), (".", "is a folder")):
        before = (folder / "p.npz").read_bytes()
        assert console.run(app, ["report", *HERE, "-o", name]) == USAGE
        captured = capsys.readouterr()
        assert_a_message(captured.err)
        assert said in captured.err
        assert (folder / "p.npz").read_bytes() == before


def test_what_does_not_fit_leaves_no_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "report",
        *HERE[:3],
        "--vram-budget",
        "100KB",
        "--ram-budget",
        PROCESS_NBYTES + 3_800_000,
        *HERE[-2:],
        "-o",
        "page.html",
    ]
    assert console.run(app, arguments) == FIT
    captured = capsys.readouterr()
    assert_a_message(captured.err)
    assert "does not fit" in captured.err
    assert sorted(path.name for path in folder.iterdir()) == ["alone.toml", "config.json", "m.toml", "p.npz"]


@pytest.mark.slow
def test_a_missing_extra_is_named(folder: Path) -> None:
    process = child("import sys; sys.modules['matplotlib'] = None", "report", *HERE, "-o", "page.html")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (USAGE, ""), err
    assert_a_message(err)
    assert "pip install '.[report]'" in err
    assert not (folder / "page.html").exists()


def test_a_disk_has_a_figure_a_table_and_a_part_of_the_time(folder: Path, report: Run) -> None:
    disk = Disk(name="nvme", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])
    alone = MACHINE.model_copy(update={"gpu": None, "link": None, "disk": disk})
    (folder / "disk.toml").write_text(alone.to_toml())
    (folder / "wide.json").write_text(json.dumps({**CONFIG, "hidden_size": 256, "intermediate_size": 4096}))
    model = ("wide.json", "--machine", "disk.toml", "--curve", "reglu-70b", "--density", "0.2")
    text = report(*model, "--ram-budget", "220MiB")
    page = Page(text)
    assert page.open == []
    assert "What less RAM would give" in page.text
    assert "waiting for the disk" in page.text
    assert "nvme; 400 MB/s in reads of" in page.text
    e = explained("wide.json", machine="disk.toml", curve="reglu-70b", density="0.2", ram_budget="220MiB")
    for placement in e.ram_budgets:
        assert f"{digits(PICO / placement.time.total)} tokens/s" in page.text
    assert "What less RAM would give" not in report("wide.json", "--machine", "alone.toml", *model[3:])
