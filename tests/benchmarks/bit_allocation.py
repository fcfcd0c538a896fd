"""Whether some weights deserve more bits: divergence at equal bytes, of hot and cold neurons, and of layers.

python tests/benchmarks/bit_allocation.py [MODEL …] [--text FILE] [--fit N] [--tokens N] [--neurons-only]

MODEL is a folder or a GGUF file, by default the bundled demo model. Weights are rounded in torch to symmetric blocks of
32 and no kernel reads them: this is what a division of the bits could gain at most. The first tokens of the text say
what is hot, the last ones are reported on.

Matrices: each kind alone in 4 to 8 bits, all layers. Blocks of `down` lie along the model's width.
Neurons: all FFNs in 4 or 5 bits, against the hottest neurons of each layer in more bits and the rest in fewer, and
against 3 to 6 bits for each neuron, by its heat. A neuron is as hot as what it adds to the state: its mean square times
that of its row of `down`.
Layers: attention and FFN of each layer in 3 to 8 bits, divided exactly (`most_value`) at the bytes of b
bits for all, by the divergences that each costs alone.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import torch
from quality import MATRICES, Model, parsed

from pi_compile.calibration.quantising.compensation import down, neuron_ranges, second_moments
from pi_compile.placement.solvers.constrained_path import most_value
from pi_compile.torch_model import decoder as td

BLOCK = 32
WIDTHS = (3, 4, 5, 6, 8)
DIVISIONS = ((Fraction(1, 2), 5, 3), (Fraction(1, 3), 6, 3), (Fraction(1, 2), 6, 4), (Fraction(1, 4), 8, 4))
"""Share of the neurons that are hot, their bits, and those of the others."""
PARTS = {"attention": MATRICES[:2], "ffn": MATRICES[2:]}
Tensor = torch.Tensor
Layers = list[dict[str, Tensor]]


def rounded(values: Tensor, bits: int) -> Tensor:
    """Symmetric blocks along the last axis; the best of three scales and a least-squares fit of each."""
    columns, half = values.shape[-1], 2 ** (bits - 1)
    w = torch.nn.functional.pad(values, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(w), torch.full_like(extreme, torch.inf)

    def attempt(scale: Tensor) -> Tensor:
        nonlocal best, least
        scale = scale.half().float()
        q = (w / torch.where(scale == 0, torch.inf, scale)).round_().clamp_(-half, half - 1)
        error = (w - q * scale).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, q * scale, best), torch.minimum(error, least)
        return q

    for share in (1.0, 0.9, 1.1):
        q = attempt(extreme / (-half * share))
        attempt((q * w).sum(-1, keepdim=True) / q.square().sum(-1, keepdim=True).clamp_min(1e-30))
    return best.flatten(-2)[..., :columns]


def heat(model: Model) -> list[Tensor]:
    """For each layer what each neuron adds to the state, as a mean square."""
    found, x = [], td.embed(model.d, model.globals, td.windows(model.fit, model.window))
    ranges = range(len(neuron_ranges(model.d)))
    for n, w in enumerate(model.weights):
        moments = second_moments(model.d, n, w, torch.split(x, 4), lambda batch: batch)
        ((x,),) = td.layers(model.d, [w], [x], first=n)
        squares = torch.cat([moments[down(part)].diagonal() for part in ranges])
        found.append(squares * w["ffn/rest"][:, -1].double().square().sum(-1))
    return found


def filled(hot: Tensor, mean: int) -> Tensor:
    """Bits of each neuron that make Σ heat · 4^−bits least, at `mean` bits on average: whole numbers from 3 to 6."""
    levels = hot.clamp_min(1e-30).log2() / 2
    order = (levels[:, None] - torch.arange(3)).flatten().argsort(descending=True, stable=True)
    steps = order[: len(hot) * (mean - 3)] // 3
    return 3 + torch.bincount(steps, minlength=len(hot))


class Study:
    """A model, its predictions as it is, and its matrices in each number of bits."""

    def __init__(self, model: Model, widths: tuple[int, ...]) -> None:
        self.model = model
        self.exact = [found.half() for found in model.log_probabilities(model.weights)]
        names = MATRICES
        self.rounded = {
            bits: [{name: rounded(w[name], bits) for name in names} for w in model.weights] for bits in widths
        }

    def divergence(self, layers: Layers) -> float:
        """Nats a token, of these layers' predictions from the model's own."""
        total = 0.0
        for before, after in zip(self.exact, self.model.log_probabilities(layers), strict=True):
            total += float((before.float().exp() * (before.float() - after)).sum(-1).mean()) / len(self.exact)
        return total

    def with_bits(self, bits: Callable[[int, str], Tensor | int | None]) -> Layers:
        """The layers with some matrices rounded: `bits` of (layer, matrix), or of each of its neurons."""
        layers = []
        for n, w in enumerate(self.model.weights):
            found = dict(w)
            for name in MATRICES:
                wanted = bits(n, name)
                if isinstance(wanted, int):
                    found[name] = self.rounded[wanted][n][name]
                elif wanted is not None:
                    found[name] = w[name].clone()
                    for b in wanted.unique().tolist():
                        found[name][wanted == b] = self.rounded[b][n][name][wanted == b]
            layers.append(found)
        return layers


def print_matrices(study: Study) -> None:
    """The divergence that each kind of matrix costs alone, in each number of bits."""
    gated = study.model.d.ffn == "gated"
    kinds = {**{name: (name, ...) for name in MATRICES[:3]}, **({"up": (MATRICES[3], 0)} if gated else {})}
    print(f"{'rounded alone':<20}" + "".join(f"{f'{b} bits':>10}" for b in WIDTHS[1:]))
    for kind, (name, part) in {**kinds, "down": (MATRICES[3], -1)}.items():
        costs = []
        for b in WIDTHS[1:]:
            layers = study.with_bits(lambda _n, _name: None)
            for w, found in zip(layers, study.rounded[b], strict=True):
                w[name] = w[name].clone()
                index = part if part is ... else (slice(None), part)
                w[name][index] = found[name][index]
            costs.append(study.divergence(layers))
        print(f"{kind:<20}" + "".join(f"{cost:>10.5f}" for cost in costs), flush=True)


def neuron_rows(study: Study, hot: list[Tensor]) -> Iterator[tuple[str, float, float]]:
    """A row for each division of the bits: its divergence, and that of the same bytes all alike."""
    chance = [torch.rand(len(h), generator=torch.Generator().manual_seed(n)) for n, h in enumerate(hot)]

    def each(b: int) -> float:
        shares = [filled(h, b) for h in hot]
        return study.divergence(study.with_bits(lambda n, name: shares[n] if name in PARTS["ffn"] else None))

    def divided(by: list[Tensor], share: float, more: int, less: int) -> float:
        def bits(n: int, name: str) -> Tensor | None:
            if name not in PARTS["ffn"]:
                return None
            found = torch.full((len(by[n]),), less)
            found[by[n].argsort(descending=True)[: round(share * len(by[n]))]] = more
            return found

        return study.divergence(study.with_bits(bits))

    alike = {
        b: study.divergence(study.with_bits(lambda _n, name, b=b: b if name in PARTS["ffn"] else None))  # type: ignore[misc]
        for b in (4, 5)
    }
    for share, more, less in DIVISIONS:
        same_bytes = alike[round(share * more + (1 - share) * less)]
        name = f"{share} of each FFN in {more} bits, rest in {less}"
        yield name, divided(hot, float(share), more, less), same_bytes
        yield f"{name}, by chance", divided(chance, float(share), more, less), same_bytes
    for b, same_bytes in alike.items():
        yield f"each neuron in 3 to 6 bits, {b} on average", each(b), same_bytes


def layer_rows(study: Study) -> Iterator[tuple[str, float, float]]:
    """A row for each budget: divided exactly by what each part of a layer costs alone, and all alike."""
    weights = study.model.weights
    places = [(n, part) for n in range(len(weights)) for part in PARTS]
    sizes = [sum(weights[n][name].numel() for name in PARTS[part]) for n, part in places]

    def alone(at: tuple[int, str], b: int) -> float:
        n, part = at
        return study.divergence(study.with_bits(lambda m, name: b if m == n and name in PARTS[part] else None))

    costs = [[alone(at, b) for b in WIDTHS] for at in places]
    classes = []
    for size, cost in zip(sizes, costs, strict=True):
        falling = np.minimum.accumulate(cost)
        gains = [round(1e9 * (falling[0] - c)) for c in falling]
        classes.append((np.array([size * (b - 3) for b in WIDTHS]), np.array(gains)))
    names = {name: part for part, matrices in PARTS.items() for name in matrices}
    for b in (4, 5, 6):
        taken = most_value(classes, sum(sizes) * (b - 3))
        chosen = {at: WIDTHS[item] for at, item in zip(places, taken, strict=True)}
        divided = study.divergence(study.with_bits(lambda n, name, c=chosen: c[n, names[name]]))  # type: ignore[misc]
        alike = study.divergence(study.with_bits(lambda _n, _name, b=b: b))  # type: ignore[misc]
        yield f"attention and FFN of each layer, {b} bits", divided, alike


def print_rows(rows: Iterator[tuple[str, float, float]]) -> None:
    for name, divided, alike in rows:
        print(f"{name:<52}{divided:>11.5f}{alike:>11.5f}{divided / alike - 1:>+9.1%}", flush=True)


def main() -> None:
    args, text = parsed(__doc__, "--neurons-only", fit=4_096, tokens=2_048)
    for path in args.models:
        with torch.inference_mode():
            model = Model(path, text, args.fit, args.tokens)
            study = Study(model, WIDTHS)
            worst = study.divergence(study.with_bits(lambda _n, _name: 3))
            assert worst > study.divergence(study.with_bits(lambda _n, _name: 8)) >= 0
            print(f"\n{path.name}: {model.d.n_layers} layers of {model.d.d_model}, {args.tokens:,} tokens")
            print_matrices(study)
            print(f"\n{'bits divided':<52}{'divergence':>11}{'all alike':>11}")
            print_rows(neuron_rows(study, heat(model)))
            if not args.neurons_only:
                print_rows(layer_rows(study))


if __name__ == "__main__":
    main()
