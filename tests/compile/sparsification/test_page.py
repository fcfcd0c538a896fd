"""The page of a training: what each curve is of, and numbers that can be read off it."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from support.sparsifying import small_recipe

from pi_compile.sparsification.page import curves_charts, curves_page
from pi_compile.sparsification.training import Point


def points(count: int, *, layers: int = 0, wanted: float = 0.0, penalty: float = 0.0) -> list[Point]:
    """Evaluations of a training that comes from a perplexity of 112 to one of about 93."""
    found = []
    for n in range(count):
        done = (n + 1) / count
        sparsity = [0.5 + 0.35 * done + 0.02 * layer for layer in range(layers)]
        perplexity = 112 - 19 * done + (2 if layers else 0)
        found.append(
            Point(n + 1, (n + 1) * 256, math.log(perplexity), penalty * done, perplexity, sparsity, 0.0, wanted * done)
        )
    return found


def record(*, control: bool, **changes: Any) -> dict[str, Any]:
    """What `sparsify.json` says, as far as the page shows it."""
    return {
        "recipe": small_recipe(**changes).model_dump(),
        "perplexity": {"base": 112.3, "model": 93.5, "control": 92.4 if control else None},
        "perplexity_increase": 0.012,
        "interval": [0.008, 0.015],
        "sparsity": 0.852,
        "dead": 0.004,
        "sparsity_by_layer": [0.85, 0.86],
        "dead_by_layer": [0.0, 0.008],
        "activation": "fatrelu",
        "threshold": 0.0123456789,
        "steps": 8,
        "schedule": 8,
        "tokens": 2048,
        "ended": "",
        "base": {"digest": "0" * 64},
        "held_out": {"windows": 128, "tokens": 16_384},
        "text": {"position": {"digest": "0" * 64}},
    }


def page_of(record: dict[str, Any], base: float, model: list[Point], control: list[Point]) -> str:
    return curves_page(record, curves_charts(record, base, model, control), model)


def figures(page: str) -> dict[str, str]:
    """Each figure of a page by its title."""
    found = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    return {re.search(r"<h3>(.*?)</h3>", text)[1]: text for text in found}  # type: ignore[index]


def texts(figure: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", figure)


def test_all_curves_are_there_with_what_they_are_of() -> None:
    wanted = {"steer": {"sparsity": 0.85}}
    shown = figures(
        page_of(record(control=True, **wanted), 112.3, points(8, layers=2, wanted=0.85, penalty=0.1), points(8))
    )
    assert list(shown) == ["Perplexity", "Sparsity", "Loss", "What was set"]
    for title in ("Perplexity", "Sparsity"):
        assert "On the tune text" in shown[title]
        assert "held-out" not in shown[title]
    assert "On the text trained on" in shown["Loss"]
    assert "loss, nats a token" in texts(shown["Loss"])
    assert "learning rate" in texts(shown["What was set"])
    assert "weight of the penalty" in texts(shown["What was set"])
    assert "wanted</li>" in shown["Sparsity"]
    assert "the control</li>" in shown["Perplexity"]
    assert "the control</li>" in shown["Loss"]
    assert all("thousand tokens trained on" in texts(figure) for figure in shown.values())


def test_what_there_was_not_is_not_shown() -> None:
    shown = figures(page_of(record(control=False), 112.3, points(8, layers=2), []))
    assert "wanted" not in shown["Sparsity"]
    assert "the control" not in shown["Perplexity"]
    assert "weight of the penalty" not in shown["What was set"]


def test_perplexity_can_be_read_off_its_axis() -> None:
    shown = figures(page_of(record(control=True), 112.3, points(8, layers=2), points(8)))
    numbers = [float(text) for text in texts(shown["Perplexity"]) if re.fullmatch(r"[\d.]+", text)]
    assert {95.0, 100.0, 105.0, 110.0} <= set(numbers)


def test_a_single_evaluation_is_seen() -> None:
    """A line through one point is none."""
    shown = figures(page_of(record(control=True), 112.3, points(1, layers=2), points(1)))
    for title in ("Perplexity", "Sparsity", "Loss"):
        assert "<use" in shown[title]


def test_held_out_means_one_text(tmp_path: Path) -> None:
    page = page_of(record(control=True), 112.3, points(8, layers=2), points(8))
    plain = " ".join(re.sub(r"<[^>]*>", " ", page[page.index("<body>") :]).split())
    said = [plain[found.end() : found.end() + 30] for found in re.finditer("held-out text ?", plain)]
    assert said == [". Perplexity 93.5 of this mode", ", which is looked at once, at "]
