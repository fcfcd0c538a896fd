"""Published activation curves, and the counts that a model with such a curve would have.

A curve says which share y of all activations the hottest share x of the neurons has: shares, not frequencies. Let d be
the density, the mean share of the neurons that fire for a token. Then the neuron at place x fires with the frequency

    f(x) = d · y′(x)

clipped at 1; the excess goes to the next less frequent neurons. All is computed in integers: y is in millionths, and
counts are differences of one cumulated sum that is rounded down. So the same curve, density and sizes give the same
counts everywhere.
"""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi_compile.errors import ProfileError, nearest
from pi_compile.files import bundled_folder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.errors import Setting, UsageError

WHOLE = 10**6
"""A share of 1, in millionths."""
TOKENS = 10**6
"""Tokens that counts from a curve stand for: about as many as the publications profiled."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One published curve, or one for each layer."""

    name: str
    source: str
    """What it is and where it was published."""
    shares: tuple[tuple[int, ...], ...]
    """[layer][i]: share of activations, in millionths, of the hottest i / (len − 1) of the neurons."""


def find_curve(name: str) -> Curve:
    """The bundled curve of this name. Raises UsageError that names all of them."""
    known = sorted(path.stem for path in bundled_folder("profiles/activations/published").glob("*.csv"))
    if name not in known:
        near = nearest(name, known)
        raise UsageError(
            "no such published curve",
            setting=Setting("curve", name),
            expected=f"one of {', '.join(known)}",
            remedy=Setting("curve", near) if near else None,
        )
    return read_curve(bundled_folder("profiles/activations/published") / f"{name}.csv")


def read_curve(path: Path) -> Curve:
    """Read a curve: comments that name its source, a header, then rows of percentages. Raises ProfileError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        source = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        table = [line.split(",") for line in lines if line and not line.startswith("#")][1:]
        numbers = [[Decimal(cell) for cell in row] for row in table]
        columns = list(zip(*numbers, strict=True))
    except (OSError, UnicodeDecodeError, InvalidOperation, ValueError) as error:
        raise ProfileError(f"{path}: not an activation curve", found=error) from None
    places = [100 * i for i in range(len(numbers))]
    if len(columns) < 2 or [x * (len(numbers) - 1) for x in columns[0]] != places:
        raise ProfileError(f"{path}: not an activation curve", expected="rows evenly spaced from 0 to 100 % of neurons")
    # No neuron has no activation; what a figure shows at 0 is the width of its line.
    shares = tuple((0, *(int(y * WHOLE / 100) for y in column[1:])) for column in columns[1:])
    for column in shares:
        if column[-1] != WHOLE or any(a > b for a, b in pairwise(column)):
            raise ProfileError(f"{path}: not an activation curve", expected="shares that rise to 100 %")
    return Curve(name=path.stem, source=source, shares=shares)


def curve_counts(curve: Curve, decoder: Decoder, density: Decimal, tokens: int = TOKENS) -> npt.NDArray[np.uint64]:
    """(layers, neurons) counts of a model with this curve and density over so many tokens; within an expert they fall.

    A curve of several layers is stretched over the model's layers. With experts, each has the curve over an equal share
    of the tokens, and the density is that of the experts that a token is routed to.
    """
    if not 0 < density <= 1:
        raise UsageError("out of range", setting=Setting("density", density), expected="a number above 0, at most 1")
    routed = tokens * decoder.experts_per_token // decoder.n_experts
    columns = len(curve.shares)
    of_column = [_counts(shares, decoder.d_ff, density, routed) for shares in curve.shares]
    layers = [of_column[layer * columns // decoder.n_layers] for layer in range(decoder.n_layers)]
    return np.tile(np.array(layers, np.uint64), (1, decoder.n_experts))


def _counts(shares: tuple[int, ...], neurons: int, density: Decimal, tokens: int) -> list[int]:
    """Falling counts of one FFN, at most `tokens` each; their sum is what the density says."""
    total = int(density * neurons * tokens)
    steps = len(shares) - 1
    mass = []
    for n in range(neurons + 1):
        step, rest = divmod(n * steps, neurons)
        beyond = shares[min(step + 1, steps)] - shares[step]
        mass.append(total * (shares[step] * neurons + beyond * rest) // (WHOLE * neurons))
    falling = sorted((b - a for a, b in pairwise(mass)), reverse=True)
    excess, counts = 0, []
    for count in falling:
        kept = min(tokens, count + excess)
        excess += count - kept
        counts.append(kept)
    return counts
