"""The curves of a training on one HTML page that needs nothing else, in the style of the report page."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pi_compile.report.colours import COLOURS
from pi_compile.report.layer_figures import layer_colours
from pi_compile.report.quantities import digits, percent
from pi_compile.report.svg import colour, figure, svg
from pi_compile.sparsification.training import Point


def curves_page(record: dict[str, Any], model: Sequence[Point], control: Sequence[Point] | None) -> str:
    """The page as HTML, from a run's record and the evaluations of its trainings."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("pi_compile.sparsification"), PackageLoader("pi_compile.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"digits": digits, "percent": percent}
    return environment.get_template("training.html.jinja").render(
        record=record,
        title=f"{Path(record['recipe']['model']['path']).name} made sparse",
        loss=_loss_figure(model, control),
        penalised=_penalised(model),
        sparsity=_sparsity_figure(model),
        colours=COLOURS,
        version=version("pi-toolchain"),
    )


def _loss_figure(model: Sequence[Point], control: Sequence[Point] | None) -> Markup:
    """Perplexity on held-out text over the tokens, of the model and of the control, and the penalty, if any."""
    penalised = _penalised(model)
    with figure(4.4 if penalised else 3.3, (2, 1) if penalised else (1,), sharex=True) as (drawn, axes):
        arms = [(model, "accent"), *([(control, "cpu")] if control else [])]
        for points, name in arms:
            axes[0].plot([p.tokens for p in points], [p.perplexity for p in points], color=colour(name))
        axes[0].set_yscale("log")
        axes[0].set_title("perplexity on held-out text")
        if penalised:
            axes[1].plot([p.tokens for p in model], [p.penalty for p in model], color=colour("ffn"))
            axes[1].set_title("weight of the penalty")
        axes[-1].set_xlabel("tokens")
        for axis in axes:
            axis.grid()
        about = "Perplexity on held-out text and the weight of the penalty, over the tokens trained on."
        return svg(drawn, "loss", "Perplexity", about)


def _penalised(model: Sequence[Point]) -> bool:
    return any(p.penalty for p in model)


def _sparsity_figure(model: Sequence[Point]) -> Markup:
    """The sparsity of each layer over the tokens."""
    sparsity_PL = 100 * np.array([p.sparsity_by_layer for p in model])
    names = layer_colours(sparsity_PL.shape[1])
    with figure(3.3) as (drawn, (axis,)):
        for n, name in enumerate(names):
            axis.plot([p.tokens for p in model], sparsity_PL[:, n], color=colour(name), lw=1.1)
        axis.plot([p.tokens for p in model], sparsity_PL.mean(1), color=colour("ink"))
        axis.set_title("neurons that are 0, %")
        axis.set_xlabel("tokens")
        axis.grid()
        return svg(drawn, "sparsity", "Sparsity", "The share of neurons that are 0, of each layer and their mean.")
