"""What rounding costs is measured before anything is packed, and refused beyond the recipe's limit."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.small_project import no_progress, prose, small_project, small_recipe

from pi_compile.errors import CorpusError
from pi_compile.evaluation import evaluate
from pi_compile.pipeline.packed import pack_plain
from pi_compile.recipe import default_recipe, read_recipe
from pi_runtime.errors import NotMetError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return small_project(tmp_path)


def pack(project: Path, limit: float | None, **formats: str) -> tuple[dict[str, object], list[str]]:
    """The report of a plain packing, and what was said."""
    quality = {} if limit is None else {"rounding_increase": limit}
    (project / "r.toml").write_text(small_recipe(pack=formats, quality=quality).to_toml())
    said: list[str] = []
    report = pack_plain(project / "r.toml", project / "a.pi", progress=no_progress, notice=said.append)
    return report, said


def test_the_loss_is_that_of_an_evaluation(project: Path) -> None:
    (project / "held-out.txt").write_text(prose(5, 300))  # one passage, which a corpus does not shuffle
    report, said = pack(project, 1.0, attention="q4", ffn="q4", embedding="q4")
    assert said[0].startswith("measuring what embedding in q4, attention in q4, ffn in q4 costs, on 192 tokens: about")
    assert said[0].endswith("[quality] rounding_increase = 0 leaves it out")
    loss = report["rounding_loss"]
    assert isinstance(loss, dict)
    assert loss["tokens"] == 192
    assert loss["standard_error"] > 0
    # The runtime rounds inputs of q4's products to 8 bits.
    found = evaluate(project / "a.pi", [project / "held-out.txt"], project / "model", tokens=192, window=32)
    expected = found["perplexity"]["dense"] / found["perplexity"]["checkpoint"] - 1
    assert loss["perplexity_increase"] == pytest.approx(expected, abs=1e-3)


def test_more_than_the_limit_is_refused_with_what_would_keep_it(project: Path) -> None:
    report, _ = pack(project, 1.0, attention="q4", ffn="q4")
    loss = report["rounding_loss"]
    assert isinstance(loss, dict)
    (project / "a.pi").unlink()
    limit = loss["perplexity_increase"] / 2
    assert limit > 0
    with pytest.raises(NotMetError) as caught:
        pack(project, limit, attention="q4", ffn="q4")
    assert not (project / "a.pi").exists()
    assert f"at most {limit:.2%} higher" in str(caught.value)
    assert '[pack] attention = "q8", ffn = "q8" keeps it, at ' in str(caught.value)
    assert "KiB in place of " in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "formats"),
    [(0.0, {"ffn": "q4"}), (None, {"ffn": "q8"}), (None, {"attention": "bf16"}), (None, {})],
    ids=["not wanted", "8 bits", "no blocks", "as it is"],
)
def test_nothing_is_measured(project: Path, limit: float | None, formats: dict[str, str]) -> None:
    report, said = pack(project, limit, **formats)
    assert "rounding_loss" not in report
    assert not any("measuring" in line for line in said)


def test_text_is_read_where_something_is_measured_only(project: Path) -> None:
    for text in (project / "text").iterdir():
        text.unlink()
    (project / "held-out.txt").unlink()
    pack(project, None, ffn="q8")
    with pytest.raises(CorpusError):
        pack(project, None, ffn="q4")


def test_the_key_may_be_missing(project: Path) -> None:
    recipe = default_recipe("m")
    assert recipe.quality.rounding_increase == 0.01
    assert "rounding_increase" not in recipe.to_toml()
    (project / "r.toml").write_text(small_recipe(quality={"rounding_increase": 0.0}).to_toml())
    assert "rounding_increase = 0.0" in (project / "r.toml").read_text()
    assert read_recipe(project / "r.toml").quality.rounding_increase == 0
