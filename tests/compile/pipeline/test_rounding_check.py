"""What rounding costs is measured before anything is packed, and refused beyond the recipe's limit."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from support.paths import ROOT
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
    said = [line for line in said if line.startswith("measuring what")]
    assert said[0].startswith("measuring what embedding in q4, attention in q4, ffn in q4 costs, on 192 tokens: about")
    assert said[0].endswith("[quality] rounding_increase = 0 leaves it out")
    loss = report["rounding_loss"]
    assert isinstance(loss, dict)
    assert loss["tokens"] == 192
    assert loss["standard_error"] > 0
    # The runtime rounds inputs of q4's products to 8 bits.
    found = evaluate(project / "a.pi", [project / "held-out.txt"], project / "model", tokens=192, window=32)
    expected = found["perplexity"]["dense"] / found["perplexity"]["checkpoint"] - 1
    assert loss["perplexity_increase"] == pytest.approx(expected, rel=0.1)


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
    assert re.search(r'\[pack\] attention = "(q\w+)", ffn = "\1" keeps it, at ', str(caught.value))
    assert "KiB in place of " in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "formats"),
    [(0.0, {"ffn": "q4"}), (0.0, {"ffn": "f16"}), (None, {"ffn": "f32"}), (None, {})],
    ids=["not wanted", "not wanted in f16", "wider", "as it is"],
)
def test_nothing_is_measured(project: Path, limit: float | None, formats: dict[str, str]) -> None:
    report, said = pack(project, limit, **formats)
    assert "rounding_loss" not in report
    assert not any("measuring" in line for line in said)


def test_text_is_read_where_something_is_measured_only(project: Path) -> None:
    for text in (project / "text").iterdir():
        text.unlink()
    (project / "held-out.txt").unlink()
    pack(project, None, ffn="f32")
    for fmt in ("q8", "q4", "f16"):
        with pytest.raises(CorpusError):
            pack(project, None, ffn=fmt)


def test_the_key_may_be_missing(project: Path) -> None:
    recipe = default_recipe("m")
    assert recipe.quality.rounding_increase == 0.01
    assert "rounding_increase" not in recipe.to_toml()
    (project / "r.toml").write_text(small_recipe(quality={"rounding_increase": 0.0}).to_toml())
    assert "rounding_increase = 0.0" in (project / "r.toml").read_text()
    assert read_recipe(project / "r.toml").quality.rounding_increase == 0


@pytest.mark.parametrize("fmt", ["q8", "q6", "f16", "bf16"])
@pytest.mark.parametrize("part", ["embedding", "attention", "ffn"])
def test_whatever_is_not_kept_is_measured(project: Path, part: str, fmt: str) -> None:
    """The source is in f32, which only f32 holds."""
    report, said = pack(project, 1.0, **{part: fmt})
    loss = report["rounding_loss"]
    assert isinstance(loss, dict)
    assert any(line.startswith(f"measuring what {part} in {fmt} costs, on 192 tokens") for line in said)
    assert loss["perplexity_increase"] != 0


def test_one_window_has_no_standard_error(project: Path) -> None:
    (project / "r.toml").write_text(
        small_recipe(pack={"ffn": "q8"}, corpus={"report_tokens": 64}, profile={"window": 64}).to_toml()
    )
    said: list[str] = []
    report = pack_plain(project / "r.toml", project / "a.pi", progress=no_progress, notice=said.append)
    loss = report["rounding_loss"]
    assert isinstance(loss, dict)
    assert (loss["standard_error"], loss["tokens"]) == (None, 64)
    assert any("(of one window alone)" in line for line in said)
    assert not any("standard error" in line for line in said)


def rescaled(folder: Path, power: int) -> Path:
    """The demo model, with every other input of a matrix so much larger and its weights so much smaller: the same."""
    shutil.copytree(ROOT / "recipes/demo", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    factors = torch.ones(192)
    factors[::2] = 2.0**power
    for n in range(4):
        layer = f"model.layers.{n}."
        tensors[f"{layer}input_layernorm.weight"] *= factors
        tensors[f"{layer}post_attention_layernorm.weight"] *= factors
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            tensors[f"{layer}{name}.weight"] /= factors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("fmt", "power", "better"), [("q8", 12, "f16"), ("f16", 26, "bf16"), ("f16", 0, None), ("bf16", 26, None)]
)
def test_a_rescale_that_changes_no_function_is_seen_in_what_it_costs(
    tmp_path: Path, fmt: str, power: int, better: str | None
) -> None:
    """The weights' own error says nothing of it: the small ones hardly count in Σ w²."""
    rescaled(tmp_path / "model", power)
    data = small_recipe(pack={"attention": fmt, "ffn": fmt}).model_dump()
    data["corpus"] |= {"text": ["python"], "report": ["python"], "report_tokens": 2048, "tune_tokens": 256}
    data["profile"] |= {"window": 256}
    (tmp_path / "r.toml").write_text(type(small_recipe()).model_validate(data).to_toml())

    def packed() -> dict[str, object]:
        return pack_plain(tmp_path / "r.toml", tmp_path / "a.pi", progress=no_progress, notice=lambda _line: None)

    if better is None:
        loss = packed()["rounding_loss"]
        assert isinstance(loss, dict)
        assert abs(loss["perplexity_increase"]) < 0.01
        assert loss["tokens"] == 256  # four windows of 64: far below the limit
        return
    with pytest.raises(NotMetError, match="rounding loses too much") as caught:
        packed()
    assert not (tmp_path / "a.pi").exists()
    assert f'[pack] attention = "{better}", ffn = "{better}" keeps it' in str(caught.value)
