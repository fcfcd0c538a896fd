"""What changes from step to step: the learning rate, and the weight of the penalty or the thresholds.

Steps are counted from 0; everything is a function of the step, but for steering, whose fields are saved with the model.
Shape letters: L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pi_compile.sparsification.recipe import SparsifyTrainSection, StageSection


def learning_rate(train: SparsifyTrainSection, steps: int, step: int) -> float:
    """Linear warm-up, then a cosine from `learning_rate` to `final_learning_rate` at the last step, and that beyond."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = min(1.0, (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps))
    low, high = train.final_learning_rate, train.learning_rate
    return low + (high - low) * (1 + math.cos(math.pi * done)) / 2


def penalty_weight(stages: Sequence[StageSection], step: int) -> float:
    """The penalty's weight: each stage goes from the weight of the one before to its own (ProSparse, equation 5).

    sine: w₀ + (w₁ − w₀) (1 + sin(π (t/T − ½))) / 2, with t of the stage's T steps done.
    """
    before = 0.0
    for stage in stages:
        if step < stage.steps:
            return before + (stage.penalty - before) * rise(stage.curve, (step + 1) / stage.steps)
        step -= stage.steps
        before = stage.penalty
    return before


def rise(curve: str, done: float) -> float:
    """How far a curve has risen from 0 to 1 when a share `done` of its steps is over."""
    match curve:
        case "constant":
            return 1.0
        case "linear":
            return done
        case _:
            return (1 + math.sin(math.pi * (done - 0.5))) / 2


RISE = 0.4
"""Share of the steps through which a goal rises: later on the learning rate is too low to follow it."""


def _goal(start: float, wanted: float, steps: int, step: int) -> float:
    """The sparsity wanted after a step, on the way from that of the first one."""
    done = min(1.0, (step + 1) / max(1, round(steps * RISE)))
    return start + (wanted - start) * rise("sine", done)


@dataclass
class Steering:
    """Sets the penalty's weight so that the sparsity follows a goal, which rises to the wanted one.

    A controller of the weight's logarithm with three terms: the error, its sum, and the slope of the sparsity, because
    neurons answer to a weight only after many steps. The weight changes by a bounded factor in a step. Times are shares
    of the training: the sooner it ends, the more is done in a step.
    """

    wanted: float
    steps: int
    start: float = -1.0
    """The sparsity of the first step; negative before it."""
    measured: float = 0.0
    """Sparsity of the last steps: an exponential mean over some of them."""
    slope: float = 0.0
    """Its change in a step, likewise."""
    integral: float = 0.0
    """The logarithm of the weight but for the error of the moment."""
    weight: float = 0.0
    """The penalty's weight at the next step."""
    loss: float = 0.0
    """Language loss of the last steps, likewise."""
    lowest: float = math.inf
    """The lowest that it has been."""
    gap: float = 0.0
    """How much sparser the text trained on is than the tune text, at the last evaluation."""

    HORIZON = 0.04
    """How far ahead the sparsity is extrapolated."""
    PROPORTIONAL, INTEGRAL = 12.0, 160.0
    FASTEST = 25.0
    """Largest change of the logarithm, if it went on through the whole training."""
    FIRST_SHARE = 0.01
    """The first weight makes the penalty this share of the language loss."""
    MOST_SHARE, MOST_NATS = 0.5, 0.25
    """The penalty is at most this share of the lowest loss, and so much more: beyond, the model would fall apart."""

    def goal(self, step: int) -> float:
        """The sparsity wanted after a step, of the tune text."""
        return _goal(self.start, self.wanted, self.steps, step)

    def observe(self, step: int, sparsity: float, loss: float, magnitude: float) -> None:
        """Take in a step's sparsity, language loss and mean magnitude of the neurons; set the next step's weight."""
        if self.start < 0:
            self.start, self.measured, self.loss = sparsity, sparsity, loss
            self.weight = self.FIRST_SHARE * loss / max(magnitude, 1e-12)
            self.integral = math.log(self.weight)
            return
        keep = 1 - 1 / max(2.0, min(50.0, self.steps / 60))
        before, self.measured = self.measured, keep * self.measured + (1 - keep) * sparsity
        self.slope = keep * self.slope + (1 - keep) * (self.measured - before)
        error = self.goal(step) + self.gap - self.measured - self.HORIZON * self.steps * self.slope
        most = self.FASTEST / self.steps
        self.integral += min(most, max(-most, self.INTEGRAL / self.steps * error))
        self.loss = keep * self.loss + (1 - keep) * loss
        self.lowest = min(self.lowest, self.loss)
        highest = math.log((self.MOST_SHARE * self.lowest + self.MOST_NATS) / max(magnitude, 1e-12))
        self.integral = min(highest, self.integral)
        change = self.integral + self.PROPORTIONAL * error - math.log(self.weight)
        self.weight = min(math.exp(highest), self.weight * math.exp(min(most, max(-most, change))))

    def compare(self, tune_L: Sequence[float]) -> None:
        """Take in each layer's sparsity on the tune text, which is what is wanted; text trained on often is sparser."""
        self.gap = self.measured - sum(tune_L) / len(tune_L)


@dataclass
class ThresholdSteering:
    """Sets a threshold for each layer so that its sparsity follows a goal, which rises to the wanted one.

    Neurons answer to a threshold at once, so an integral of the error is enough.
    """

    wanted: float
    steps: int
    start: float = -1.0
    """The sparsity of the first step; negative before it."""
    thresholds: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    """Sparsity of each layer in the last steps: an exponential mean."""
    gap: list[float] = field(default_factory=list)
    """How much sparser each layer is on the text trained on than on the tune text, at the last evaluation."""

    RATE = 1.0
    """Mean magnitudes of a gate by which a threshold rises in a step, for each unit of the error."""
    KEEP = 0.9
    """How much of the mean sparsity a step keeps."""
    LEAST = 1e-4
    """The lowest threshold, in mean magnitudes of a gate: above 0, so that layers can be scaled to share one."""

    def goal(self, step: int) -> float:
        """The sparsity wanted after a step, of the tune text."""
        return _goal(self.start, self.wanted, self.steps, step)

    def observe(self, step: int, sparsity_L: Sequence[float], gates_L: Sequence[float]) -> None:
        """Take in each layer's sparsity in a step, and the mean magnitude of its gates; set the next thresholds."""
        if self.start < 0:
            self.start = sum(sparsity_L) / len(sparsity_L)
            self.measured, self.gap = list(sparsity_L), [0.0] * len(sparsity_L)
            self.thresholds = [0.0] * len(sparsity_L)
        for n, (sparsity, gate) in enumerate(zip(sparsity_L, gates_L, strict=True)):
            self.measured[n] = self.KEEP * self.measured[n] + (1 - self.KEEP) * sparsity
            wanted = self.thresholds[n] + self.RATE * gate * (self.goal(step) + self.gap[n] - sparsity)
            self.thresholds[n] = max(self.LEAST * gate, wanted)

    def compare(self, tune_L: Sequence[float]) -> None:
        """Take in each layer's sparsity on the tune text."""
        self.gap = [ours - theirs for ours, theirs in zip(self.measured, tune_L, strict=True)]
