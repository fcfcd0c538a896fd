"""The curves of a training on one HTML page that needs nothing else, in the style of the report page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pi_compile.report.drawing import colour, count_axis, digits, figure, log_axis, percent, png
from pi_compile.report.figures import Chart, layer_colours, layer_legend
from pi_compile.report.page import rendered
from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_compile.sparsification.schedule import learning_rate
from pi_compile.sparsification.training import Point

_NAMED = 40
"""With more evaluations than this a curve has no dot for each."""
_POINTS = 400
"""Steps that the curve of the learning rate is drawn through, at most."""
_MARGIN = 1.03
_MODEL, _CONTROL = ("accent", "line", "this model"), ("cpu", "line", "the control")
_BASE = ("ink", "points", "the base model")


def curves_page(record: dict[str, Any], charts: dict[str, Chart], model: Sequence[Point]) -> str:
    """The page as HTML, from a run's record, its charts and the model's evaluations."""
    return render(
        "training.html.jinja",
        record=record,
        title=f"{Path(record['recipe']['model']['path']).name} made sparse",
        penalised=_penalised(model),
        charts=charts,
    )


def pictures(charts: dict[str, Chart]) -> dict[str, bytes]:
    """Charts as PNG, by name."""
    return {name: png(chart.drawn, chart.legend) for name, chart in charts.items()}


def render(template: str, **values: Any) -> str:
    """A page in the style of the report page."""
    return rendered("pi_compile.sparsification", template, (digits, percent), **values)


def curves_charts(
    record: dict[str, Any], base_perplexity: float, model: Sequence[Point], control: Sequence[Point]
) -> dict[str, Chart]:
    """The curves of a training, from its record, the base's perplexity on the tune text, and the evaluations of both.

    `control` is empty where there is none.
    """
    return {
        "perplexity": _perplexities(base_perplexity, model, control),
        "sparsity": _sparsities(model),
        "loss": _losses(model, control),
        "schedule": _schedule(SparsifyRecipe.model_validate(record["recipe"]), record["schedule"], model),
    }


def curves_table(model: Sequence[Point], control: Sequence[Point]) -> str:
    """The evaluations as CSV, a row each: what the curves are drawn from."""
    lines = ["arm,step,tokens,loss,penalty,perplexity,sparsity,wanted,dead"]
    for arm, points in (("model", model), ("control", control)):
        for p in points:
            sparsity = float(np.mean(p.sparsity_by_layer)) if p.sparsity_by_layer else 0.0
            figures = (p.step, p.tokens, p.loss, p.penalty, p.perplexity, sparsity, p.wanted, p.dead)
            lines.append(",".join([arm, *(f"{value:.9g}" for value in figures)]))
    return "\n".join(lines) + "\n"


def _perplexities(base: float, model: Sequence[Point], control: Sequence[Point]) -> Chart:
    with figure(3.3) as (drawn, (axis,)):
        axis.axhline(base, color=colour("ink"), ls=":")
        _both(axis, model, control, lambda point: point.perplexity)
        every = [base, *(point.perplexity for point in (*model, *control))]
        log_axis(axis, min(every), max(every), _MARGIN)
        axis.set_title("perplexity, on a logarithmic scale")
        title, about = "Perplexity", f"From {digits(base)} before the training to {digits(model[-1].perplexity)}."
        return Chart.of(drawn, "perplexity", title, about, (*_arms(control), _BASE))


def _losses(model: Sequence[Point], control: Sequence[Point]) -> Chart:
    with figure(3.3) as (drawn, (axis,)):
        _both(axis, model, control, lambda point: point.loss)
        axis.set_title("loss, nats a token")
        title, about = "Loss", f"From {digits(model[0].loss)} at the first evaluation to {digits(model[-1].loss)} nats."
        return Chart.of(drawn, "loss", title, about, _arms(control))


def _sparsities(model: Sequence[Point]) -> Chart:
    sparsity_PL = 100 * np.array([point.sparsity_by_layer for point in model])
    mean_P, layers = sparsity_PL.mean(1), sparsity_PL.shape[1]
    steered = [point for point in model if point.wanted]
    with figure(3.3) as (drawn, (axis,)):
        for n, name in enumerate(layer_colours(layers)):
            curve(axis, model, sparsity_PL[:, n], name, lw=1.1)
        curve(axis, model, mean_P, "ink")
        if steered:
            curve(axis, steered, [100 * point.wanted for point in steered], "warn", ls="--")
        _tokens(axis, model)
        axis.set_title("neurons that are 0, %")
        title, last = "Sparsity", percent(mean_P[-1] / 100)
        about = f"At the last evaluation {last} of the neurons are 0, mean over layers."
        wanted = (("warn", "dash", "wanted"),) if steered else ()
        legend = (("ink", "line", "mean"), *wanted, *layer_legend(layers))
        return Chart.of(drawn, "sparsity", title, about, legend)


def _schedule(recipe: SparsifyRecipe, scheduled: int, model: Sequence[Point]) -> Chart:
    """What was set in each step: the learning rate, and the weight of the penalty if there was one."""
    per_step, steps = recipe.train.batch * recipe.train.window, model[-1].step
    some = np.unique(np.linspace(0, steps - 1, _POINTS).round().astype(int)).tolist()
    rates = [learning_rate(recipe.train, scheduled, step) for step in some]
    penalised = _penalised(model)
    with figure(3.3, (1, 1) if penalised else (1,), sharex=True) as (drawn, axes):
        axes[0].plot([(step + 1) * per_step for step in some], rates, color=colour("accent"))
        axes[0].yaxis.set_major_formatter(lambda rate, _: f"{rate:.3g}".replace("e-0", "e-"))
        axes[0].set_title("learning rate")
        if penalised:
            curve(axes[1], model, [point.penalty for point in model], "ffn")
            axes[1].set_title("weight of the penalty")
        for axis in axes:
            axis.set_ylim(bottom=0)
            axis.grid()
        _tokens(axes[-1], model)
        title, about = "What was set", f"The learning rate rises to {max(rates):.3g} and falls to {rates[-1]:.3g}."
        return Chart.of(drawn, "schedule", title, about)


def _penalised(model: Sequence[Point]) -> bool:
    return any(point.penalty for point in model)


def _arms(control: Sequence[Point]) -> tuple[tuple[str, str, str], ...]:
    return (_MODEL, _CONTROL) if control else (_MODEL,)


def _both(axis: Axes, model: Sequence[Point], control: Sequence[Point], value: Callable[[Point], float]) -> None:
    """The curves of the model and of the control."""
    for points, (name, *_) in ((control, _CONTROL), (model, _MODEL)):
        curve(axis, points, [value(point) for point in points], name)
    _tokens(axis, (*model, *control))


def curve(axis: Axes, points: Sequence[Point], values: Any, name: str, **options: Any) -> None:
    """Values over the tokens, with a dot for each while there are few: one alone would draw no line."""
    if len(points) <= _NAMED:
        options |= {"marker": "o", "ms": 3}
    axis.plot([point.tokens for point in points], values, color=colour(name), clip_on=False, **options)


def _tokens(axis: Axes, points: Sequence[Point]) -> None:
    count_axis(axis, "tokens trained on", max(point.tokens for point in points))
    axis.grid(visible=True)
