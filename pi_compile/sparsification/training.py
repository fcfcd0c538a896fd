"""One training, from a model to its last step: the loop, its checkpoints, and when to end it.

    loss = language loss + penalty's weight · mean |h| + distillation · KL(original ‖ model)

The mean is over all tokens, neurons and layers; with experts, over the neurons of those that a token is routed to.
Shape letters: B sequences, W tokens of each, V words.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from accelerate import Accelerator

from pi_compile.errors import TrainingError
from pi_compile.sparsification.activation import FfnActivity, observed
from pi_compile.sparsification.checkpoints import Checkpoints
from pi_compile.sparsification.data import EvaluationText, Mixture
from pi_compile.sparsification.evaluation import Evaluation, evaluate, language_loss
from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_compile.sparsification.schedule import Steering, ThresholdSteering, learning_rate, penalty_weight

Tensor = torch.Tensor
SMOOTHING, DIVERGED = 0.9, 2.0
"""How much of the mean loss a step keeps; how far it may rise above its lowest, in nats."""


@dataclass(frozen=True)
class StepReport:
    """What one step did, of all processes together."""

    arm: str
    """The name of the training."""
    step: int
    """Steps done."""
    steps: int
    """Steps of the whole training."""
    loss: float
    """Language loss alone."""
    sparsity: float
    penalty: float
    """Weight of the penalty."""
    learning_rate: float
    tokens_per_s: float


@dataclass(frozen=True)
class Point:
    """An evaluation on the tune text during the training."""

    step: int
    tokens: int
    loss: float
    """Mean language loss of the steps since the point before."""
    penalty: float
    perplexity: float
    sparsity_by_layer: list[float]
    dead: float
    wanted: float = 0.0
    """The sparsity that is steered to at this step; 0 where none is."""


@dataclass(frozen=True)
class Watch:
    """Who gets reports of what happens."""

    step: Callable[[StepReport], None] = lambda _report: None
    point: Callable[[Point], None] = lambda _point: None
    notice: Callable[[str], None] = lambda _line: None


@dataclass
class _TrainingState:
    """Everything of a training that is neither weights nor optimiser."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last point."""
    smoothed: float = 0.0
    lowest: float = math.inf
    within: int = 0
    """The last evaluated step whose perplexity was within the allowed ratio; 0 for none."""
    ended: str = ""
    """Why the training ended before its last step."""
    points: list[Point] = field(default_factory=list)
    schedule: int = 0
    """Steps that the learning rate falls through; in those beyond it stays what it came to."""


@dataclass(frozen=True)
class Trained:
    """A training that is over."""

    steps: int
    tokens: int
    seconds: float
    ended: str
    points: list[Point]
    data: dict[str, Any]
    """The position in the text that it came to, with the digest of all sequences."""
    schedule: int


@dataclass(frozen=True)
class Base:
    """What the model is held to while it is trained: the model that it was."""

    model: Any = None
    """What its words are distilled from; None where nothing is."""
    perplexity: float = math.inf
    """On the tune text."""


class Training:
    """One model in training. `activity` is None for a model that keeps its own activation."""

    def __init__(
        self,
        recipe: SparsifyRecipe,
        accelerator: Accelerator,
        model: Any,
        activity: FfnActivity | None,
        mixture: Mixture,
        texts: EvaluationText,
        checkpoints: Checkpoints,
        base: Base = Base(),
        watch: Watch = Watch(),
        name: str = "model",
    ) -> None:
        self._recipe, self._accelerator, self._activity = recipe, accelerator, activity
        self._mixture, self._texts, self._checkpoints, self._watch = mixture, texts, checkpoints, watch
        self._base = base
        self._autocast = recipe.train.dtype == "bf16"
        if recipe.train.activation_checkpointing:
            recompute_layers(model)
        model.config.use_cache = False
        optimizer = torch.optim.AdamW(_groups(model, recipe.train.weight_decay), fused=True)
        self.model, self._optimizer = accelerator.prepare(model.train(), optimizer)
        self._steering: Steering | ThresholdSteering | None = None
        if activity is not None and recipe.steer.sparsity:
            kind = ThresholdSteering if activity.activation.name == "fatrelu" else Steering
            self._steering = kind(recipe.steer.sparsity, recipe.steps)
        self._name, self._state, self._until = name, _TrainingState(schedule=recipe.steps), recipe.steps

    def run(self, until: int | None = None, after: int = 0) -> Trained:
        """Train from the newest checkpoint, if there is one, to the end, or to the step `until` of the schedule.

        `after`: the step at which a finished training goes on; why it ended early counts no longer.

        Raises TrainingError where the loss is no number or rises far above its lowest, with the last good checkpoint.
        """
        state, every = self._state, self._recipe.run.every
        self._until = self._recipe.steps if until is None else until
        if steps := self._checkpoints.steps():
            self._restore(steps[-1])
            state = self._state
            if state.step == after:
                state.ended, state.within = "", 0
            self._watch.notice(f"goes on after step {state.step} of {self._until}")
        while state.step < self._until and not state.ended:
            self._step()
            if state.step % every == 0 or state.step == self._until:
                self._evaluate()
                self._checkpoints.save(state.step, self._saved(), keep={state.within})
        if state.ended and state.within and state.within != state.step:
            self._restore(state.within)
            self._state = replace(self._state, ended=state.ended)
        final = self._state
        text, tokens = self._mixture.position, self._tokens()
        return Trained(final.step, tokens, final.seconds, final.ended, final.points, text, final.schedule)

    def _step(self) -> None:
        """One step of the optimiser, over all micro-batches of this process."""
        state, train = self._state, self._recipe.train
        began = time.perf_counter()
        penalty = self._penalty()
        rate = learning_rate(train, state.schedule, state.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(self._mixture.take(train.batch))
        mine = batch.tensor_split(self._accelerator.num_processes)[self._accelerator.process_index]
        parts = mine.to(self._accelerator.device).split(train.micro_batch)
        made = [self._micro_step(ids, penalty, len(parts), sync=n == len(parts) - 1) for n, ids in enumerate(parts)]
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), train.clip)
        means = self._accelerator.reduce(torch.stack(made).sum(0), "mean").cpu()
        loss, sums_L4 = float(means[0]), means[1:].view(-1, 4)
        if not math.isfinite(loss) or not torch.isfinite(norm):
            raise self._diverged(f"the loss is {loss:g} and the gradient's norm {float(norm):g}")
        self._optimizer.step()
        self._optimizer.zero_grad()
        sparsity = self._steer(loss, sums_L4) if self._activity is not None else 0.0
        state.step += 1
        state.losses.append(loss)
        self._watch_loss(loss)
        took = time.perf_counter() - began
        state.seconds += took
        speed = train.batch * train.window / took
        self._watch.step(StepReport(self._name, state.step, self._until, loss, sparsity, penalty, rate, speed))

    def _micro_step(self, ids_BW: Tensor, penalty: float, parts: int, *, sync: bool) -> Tensor:
        """Add some sequences' gradients; return loss ÷ parts, and of each layer fired, Σ|h|, Σ|gate| and values."""
        activity = self._activity
        if activity is not None:
            activity.penalty = penalty / (ids_BW.numel() * activity.values_per_token() * parts)
        device = self._accelerator.device.type
        waiting = nullcontext() if sync else self._accelerator.no_sync(self.model)
        observing = observed(activity, count_each=False)
        with waiting:
            with torch.autocast(device, torch.bfloat16, enabled=self._autocast), observing as layers:
                logits_BWV = self.model(ids_BW).logits
            loss = language_loss(logits_BWV, ids_BW)
            total = loss
            if self._base.model is not None:
                total = total + self._recipe.train.distillation * self._divergence(logits_BWV, ids_BW)
            self._accelerator.backward(total / parts)
        sums = [part for y in layers for part in (y.fired, y.magnitude, y.gates, y.fired.new_tensor(y.values))]
        return torch.stack([loss.detach().double() / parts, *sums])

    def _steer(self, loss: float, sums_L4: Tensor) -> float:
        """Set the next step's penalty or thresholds, where a sparsity is wanted; return the sparsity of this step."""
        fired_L, magnitude_L, gates_L, values_L = sums_L4.unbind(1)
        sparsity, step = 1 - float(fired_L.sum() / values_L.sum()), self._state.step
        if isinstance(self._steering, Steering):
            self._steering.observe(step, sparsity, loss, float(magnitude_L.sum() / values_L.sum()))
        elif self._steering is not None and self._activity is not None:
            self._steering.observe(step, (1 - fired_L / values_L).tolist(), (gates_L / values_L).tolist())
            self._activity.thresholds = self._steering.thresholds
        return sparsity

    def _divergence(self, logits_BWV: Tensor, ids_BW: Tensor) -> Tensor:
        """KL(original ‖ model), mean over the tokens."""
        device = self._accelerator.device.type
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=self._autocast):
            wanted_BWV = self._base.model(ids_BW).logits.float().log_softmax(-1)
        found_BWV = logits_BWV.float().log_softmax(-1)
        return F.kl_div(found_BWV, wanted_BWV, reduction="sum", log_target=True) / ids_BW.numel()

    def _penalty(self) -> float:
        if self._activity is None:
            return 0.0
        if isinstance(self._steering, Steering):
            return self._steering.weight
        return penalty_weight(self._recipe.stages, self._state.step)

    def _watch_loss(self, loss: float) -> None:
        """End a training whose mean loss rises far above its lowest."""
        state = self._state
        state.smoothed = loss if state.step == 1 else SMOOTHING * state.smoothed + (1 - SMOOTHING) * loss
        state.lowest = min(state.lowest, state.smoothed)
        if state.smoothed > state.lowest + DIVERGED:
            raise self._diverged(f"the mean loss rose from {state.lowest:.3f} to {state.smoothed:.3f}")

    def _diverged(self, what: str) -> TrainingError:
        good = self._checkpoints.steps()
        last = self._checkpoints.path(good[-1]) if good else "none yet: the model as it was"
        return TrainingError(
            f"the training diverged at step {self._state.step + 1}: {what}",
            expected=f"a finite loss that does not rise by more than {DIVERGED:g}",
            found=f"last good checkpoint: {last}",
            remedy="lower train.learning_rate or the penalties, or raise train.warmup_steps, and name another output: "
            "the training begins anew",
        )

    def _evaluate(self) -> None:
        """Look at the tune text, and decide whether to end."""
        state, stop = self._state, self._recipe.stop
        found = self.evaluate(tune=True)
        mean = sum(state.losses) / len(state.losses)
        point = Point(
            state.step,
            self._tokens(),
            mean,
            self._penalty(),
            found.perplexity,
            list(found.sparsity_L),
            found.dead,
            self._steering.goal(state.step - 1) if self._steering is not None else 0.0,
        )
        state.points.append(point)
        state.losses.clear()
        self._watch.point(point)
        if self._activity is None:
            return
        if self._steering is not None:
            self._steering.compare(found.sparsity_L)
        allowed = stop.perplexity_ratio * self._base.perplexity
        if stop.perplexity_ratio and found.perplexity <= allowed:
            state.within = state.step
        elif stop.perplexity_ratio and state.within:
            state.ended = f"perplexity exceeded {stop.perplexity_ratio:g} times the original's"
        if stop.sparsity and found.sparsity >= stop.sparsity and not state.ended:
            state.ended = f"sparsity reached {stop.sparsity:g}"

    def evaluate(self, *, tune: bool) -> Evaluation:
        """What the model does now on the tune text, or on the held-out text."""
        ids_NW = self._texts.tune if tune else self._texts.held_out
        return evaluate(self._accelerator, self.model, self._activity, ids_NW, self._autocast)

    def _tokens(self) -> int:
        return self._state.step * self._recipe.train.batch * self._recipe.train.window

    def _saved(self) -> dict[str, Any]:
        steering = None if self._steering is None else asdict(self._steering)
        return {"loop": asdict(self._state), "data": self._mixture.position, "steering": steering}

    def _restore(self, step: int) -> None:
        saved = self._checkpoints.load(step)
        loop = saved["loop"]
        self._state = _TrainingState(**loop | {"points": [Point(**point) for point in loop["points"]]})
        self._mixture.restore(saved["data"])
        if self._steering is not None:
            self._steering = type(self._steering)(**saved["steering"])
        if isinstance(self._steering, ThresholdSteering) and self._activity is not None:
            self._activity.thresholds = self._steering.thresholds


def recompute_layers(model: Any) -> None:
    """Let a backward pass compute each layer again, rather than hold its activations."""
    # Before transformers 5.20 it had the second name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, matrices, and those that do not, norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
