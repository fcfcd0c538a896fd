"""Compares a bench's rows with the targets of the GPU tier."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from support.gpu_bench.predicting import OFFLOAD, TARGETS

PREDICTED, HANDOVER, BANDWIDTH, PLANNED = 0.8, 30.0, 0.7, 0.2
"""Least speed ÷ predicted speed at every budget; most microseconds a layer; least fraction of the memory's bandwidth
that a dense token reaches all on the GPU, and that hot rows reach by themselves; how far `plan` may be off, as a
fraction of the speed that it says."""
REACHED, MISSED = "reached", "missed"
"""The last word of a verdict."""
Row = Mapping[str, Any]


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each target that rows exist for: the figure found, and the target."""
    for model, curve in dict.fromkeys((row["model"], row["curve"]) for row in rows):
        of_one = [row for row in rows if (row["model"], row["curve"]) == (model, curve) and "failed" not in row]
        for what, found, wanted, most in _found(of_one, curve):
            reached = found <= wanted if most else found >= wanted
            yield f"{model} {curve}: {what} {found:.2f} (target {wanted:g}): {REACHED if reached else MISSED}"


def plan_verdicts(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each speed that `plan` says: how far it is off."""
    for row in rows:
        off = abs(row["measured/planned"] - 1)
        reached = REACHED if off <= PLANNED else MISSED
        yield f"{row['budget']}, {row['mode']}: plan is off by {off:.2f} (target {PLANNED:g}): {reached}"


def _found(rows: Iterable[Row], curve: str) -> Iterator[tuple[str, float, float, bool]]:
    """(what, found, wanted, whether that is the most)."""
    rows = list(rows)
    split = {target.name: wanted for target, wanted in TARGETS.items()}[curve]
    for row in rows:
        if "share" in row:
            yield "share of bandwidth", row["share"], BANDWIDTH, False
            yield "share of bandwidth by hot rows", row["picked"], BANDWIDTH, False
    quarter = {row["what"]: row for row in rows if row["budget"].startswith("25 % of the model")}
    ours = quarter.pop("ours", None)
    for what, row in quarter.items():
        if ours is None:
            break
        ratio = ours["decode"] / row["decode"]
        if what == "layers, dense":
            yield f"ours ÷ {what} at 25 %", ratio, split, False
        elif "offload" in what and row["format"] == ours["format"]:
            yield f"ours ÷ {what} at 25 %", ratio, OFFLOAD, False
    own = [row for row in rows if row["what"].startswith("ours")]
    if shares := [row["measured/predicted"] for row in own]:
        yield "least of measured ÷ predicted", min(shares), PREDICTED, False
    if times := [row["handover_us"] for row in own if row["handover_us"] is not None]:
        yield "longest handover, µs a layer,", max(times), HANDOVER, True
