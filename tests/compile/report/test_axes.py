"""Numbers on axes: plain ones, and enough of them."""

import re

import pytest

pytest.importorskip("matplotlib")

from pi_compile.report.drawing import count_axis, figure, log_axis, svg


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (3.0, 700.0, ["2", "5", "10", "20", "50", "100", "200", "500"]),
        (92.4, 112.3, ["90", "95", "100", "105", "110", "115"]),
        (0.2, 90_000.0, ["0.1", "1", "10", "100", "1,000", "10,000"]),
        (14.72, 14.75, ["14.4", "14.6", "14.8", "15"]),
        (20.0, 20.0, ["19.6", "19.8", "20", "20.2", "20.4", "20.6"]),
        (1_100_000.0, 1_200_000.0, ["1,100,000", "1,200,000"]),
    ],
)
def test_a_logarithmic_axis_has_plain_numbers(low: float, high: float, shown: list[str]) -> None:
    with figure(3) as (drawn, (axis,)):
        axis.plot([0, 1], [low, high])
        log_axis(axis, low, high, 1.03)
        text = svg(drawn, "x", "x", "x")
    bottom, top = axis.get_ylim()
    ticks = [tick for tick in axis.get_yticks() if bottom <= tick <= top]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert len(ticks) >= 3
    assert all(re.fullmatch(r"[\d,]+(\.\d+)?", label) for label in labels)
    assert [float(label.replace(",", "")) for label in labels] == pytest.approx(axis.get_yticks())
    assert set(shown) <= set(labels)
    assert all(f">{label}</text>" in text for label in labels if float(label.replace(",", "")) in ticks)


@pytest.mark.parametrize(
    ("most", "said", "shown"),
    [
        (614_400, "thousand tokens", "600"),
        (819, "tokens", "800"),
        (3.5e9, "billion tokens", "3.5"),
        (2e6, "million tokens", "2"),
    ],
)
def test_a_count_has_its_unit(most: float, said: str, shown: str) -> None:
    with figure(3) as (drawn, (axis,)):
        axis.plot([0, most], [0, 1])
        count_axis(axis, "tokens", most)
        text = svg(drawn, "x", "x", "x")
    assert axis.get_xlabel() == said
    assert f">{shown}</text>" in text
