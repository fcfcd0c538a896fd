"""The ladder of rungs: how much of a layer's FFN is computed, from all of it to what a selector names.

With h the activation of `first` (gate, or fc1) and `rest` the rows that are needed only where h is not 0:

    dense      `first` and `rest` of every neuron
    gate       `first` of every neuron, `rest` where h ≠ 0
    threshold  `first` of every neuron, `rest` where |h| > threshold (CATS, arXiv 2404.08763)
    predicted  `first` of the neurons whose score  up · (down · x) + bias  is above 0, then as gate

docs/how-to/extend.md lists the files that a further rung touches.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The properties of one rung."""

    name: str
    exact: bool = False
    """Whether it leaves out nothing, or zeros only."""
    dense: bool = False
    """Whether `rest` is read for every neuron, fired or not."""
    picks: bool = False
    """Whether `first` is read only for the neurons that a predictor names."""
    parameter: Literal["rank", "threshold"] | None = None
    """The field of a layer (see `schema.Layer`) that sets how much this rung leaves out."""

    @property
    def needs_all_first(self) -> bool:
        """Whether `first` is read for every neuron, and `rest` only for those that then turn out to fire."""
        return not self.picks and not self.dense


RUNGS = {
    rung.name: rung
    for rung in (
        Rung(name="dense", exact=True, dense=True),
        Rung(name="gate", exact=True),
        Rung(name="threshold", parameter="threshold"),
        Rung(name="predicted", picks=True, parameter="rank"),
    )
}
"""By name, in the order of the ladder."""
DENSE = next(rung.name for rung in RUNGS.values() if rung.dense)
"""The rung that skips nothing."""
GATE = next(rung.name for rung in RUNGS.values() if rung.exact and not rung.dense)
"""The rung that skips zeros only."""
PREDICTED = next(rung.name for rung in RUNGS.values() if rung.picks)
"""The rung that skips what a trained predictor leaves out."""


def rung_in_mode(stored: str, mode: str) -> Rung:
    """The rung that a layer runs on in a mode: the mode itself where that is an exact rung, else the stored one."""
    return RUNGS[mode if mode in RUNGS and RUNGS[mode].exact else stored]


def exact_rung(sparse: bool) -> str:
    """The fastest rung that loses nothing: it skips zeros where the activation has any (`sparse`), else it is dense."""
    return GATE if sparse else DENSE
