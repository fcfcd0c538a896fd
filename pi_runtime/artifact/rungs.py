"""The ladder: on which rungs a layer's FFN can be run, from computing all of it to what a predictor picks.

With h the activation of `first` (gate, or fc1) and `rest` the rows that are needed only where h is not 0:

    dense      `first` and `rest` of every neuron
    gate       `first` of every neuron, `rest` where h ≠ 0
    threshold  `first` of every neuron, `rest` where |h| > threshold (CATS, arXiv 2404.08763)
    predicted  `first` of the neurons whose score  up · (down · x) + bias  is above 0, then as gate
    sign       `first` of the neurons for which columns with equal signs of weight and input, less those with different
               ones, are more than `margin` (SparseInfer, arXiv 2411.12692), then as gate

docs/development.md lists the files that a further rung touches.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What all parts of the project need to know of a rung."""

    name: str
    exact: bool = False
    """Whether it leaves out nothing, or zeros only."""
    dense: bool = False
    """Whether `rest` is read for every neuron, fired or not."""
    selector: Literal["low-rank", "signs"] | None = None
    """What names the rows of `first` to read; None where all are read."""

    @property
    def picks(self) -> bool:
        """Whether `first` is read only for the neurons that a selector names."""
        return self.selector is not None


RUNGS = {
    rung.name: rung
    for rung in (
        Rung(name="dense", exact=True, dense=True),
        Rung(name="gate", exact=True),
        Rung(name="threshold"),
        Rung(name="predicted", selector="low-rank"),
        Rung(name="sign", selector="signs"),
    )
}
"""By name, in the order of the ladder."""
