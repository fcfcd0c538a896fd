"""The search for one layer's candidates as tasks: one, or where it takes long one for each rank.

A search that is split has the tasks

    layer-N-begun.npz     rungs without predictors; the warm start of all ranks
    layer-N-rank-R.npz    one of the ranks around the one that suits the layer
    layer-N-round-K.npz   a rank further out, if the ranks before it suggest one

and the last round makes `layer-N.npz`, which is all that a search makes that is one task. Each file has the candidates
that its task found, with their predictors. Ranks are trained as if alone and on the same batches either way, so both
ways find the same, byte for byte.

The experts of a layer stay together: the neuron values that their predictors learn from are computed for all at once.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi_compile.files import read_arrays, write_arrays
from pi_compile.torch_model import ResidentLayers, WarmStarts
from pi_compile.training.candidates import MORE_RANKS, Arrays, Candidate, Ladder, TrainSpec, initial_ranks
from pi_compile.training.samples import PushedText
from pi_runtime.artifact.decoder import Decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSearch:
    """The search for the candidates of layer `n`."""

    n: int
    d: Decoder
    density: float
    top_share: float
    """Both are the layer's; `Ladder` says of what."""
    resident: ResidentLayers
    fit: PushedText
    tune: PushedText
    spec: TrainSpec
    folder: Path
    is_split: bool
    """Whether each rank is a task. It depends on the model and the recipe alone."""
    on_step: Callable[[], None]

    @property
    def name(self) -> str:
        """The file that is there when the search is done."""
        return f"layer-{self.n}.npz"

    def tasks(self) -> dict[str, Callable[[], None]]:
        """Every task by the file that it makes, in the order of what they find."""
        if not self.is_split:
            return {self.name: self._search}
        ranks = {name: partial(self._try_rank, rank) for rank, name in self._ranks().items()}
        rounds = {name: partial(self._try_further, k) for k, name in enumerate(self._rounds(), 1)}
        return {self._begun: self._begin} | ranks | rounds

    def needs(self) -> dict[str, list[str]]:
        """What a task begins after: the texts, the warm starts, or all ranks before."""
        texts = [name for text in (self.fit, self.tune) for name in text.tasks(self.n)]
        if not self.is_split:
            return {self.name: texts}
        ranks = {name: [self._begun] for name in self._ranks().values()}
        rounds = {name: [self._begun, *self._before(k)] for k, name in enumerate(self._rounds(), 1)}
        return {self._begun: texts} | ranks | rounds

    def candidates(self) -> list[Candidate]:
        """All candidates, when the search is done."""
        return self._found(self.tasks())

    def arrays(self, candidate: Candidate) -> Arrays:
        """The predictor of a candidate, as trained."""
        found = (read_arrays(self.folder / name, f"{candidate.array_prefix}/") for name in self.tasks())
        return next(filter(None, found))

    # Files.

    @property
    def _begun(self) -> str:
        return f"layer-{self.n}-begun.npz"

    def _ranks(self) -> dict[int, str]:
        """The file of each rank that is tried first."""
        ranks = initial_ranks(self.d, self.spec.predictor_formats, self.density, self.top_share)
        return {rank: f"layer-{self.n}-rank-{rank}.npz" for rank in ranks}

    def _rounds(self) -> list[str]:
        """The files of the rounds that each try a rank further out."""
        return [*(f"layer-{self.n}-round-{k}.npz" for k in range(1, MORE_RANKS)), self.name]

    def _before(self, k: int) -> list[str]:
        """The files of the ranks that were tried before round k."""
        return [*self._ranks().values(), *self._rounds()[: k - 1]]

    @property
    def _warm(self) -> Path:
        """File of the warm starts, for the time of the search."""
        return self.folder / f"warm-{self.n}.npz"

    def _save(self, name: str, found: Sequence[Candidate], ladder: Ladder) -> None:
        candidates = np.array(json.dumps([asdict(candidate) for candidate in found]))
        write_arrays(
            self.folder / name, {"candidates": candidates, "tried": np.array(ladder.tried, np.int64), **ladder.arrays}
        )

    def _found(self, names: Iterable[str]) -> list[Candidate]:
        stored = (read_arrays(self.folder / name, "candidates")["candidates"] for name in names)
        return [Candidate.from_json(c) for found in stored for c in json.loads(str(found))]

    # What the tasks do.

    def _search(self) -> None:
        ladder = self._ladder()
        ladder.search()
        self._end(ladder.found, ladder)

    def _begin(self) -> None:
        ladder = self._ladder()
        ladder.search_untrained()
        write_arrays(self._warm, ladder.warm_starts().arrays())
        self._save(self._begun, ladder.found, ladder)

    def _try_rank(self, rank: int) -> None:
        ladder = self._ladder()
        ladder.try_ranks(self._warm_starts(), [rank], 0)
        self._save(self._ranks()[rank], ladder.found, ladder)

    def _try_further(self, k: int) -> None:
        before = self._before(k)
        tried = (read_arrays(self.folder / name, "tried")["tried"].tolist() for name in before)
        known = self._found(before)
        ladder = self._ladder(found=list(known), tried=sorted(set(chain(*tried))))
        ladder.try_further(self._warm_starts(), k)
        found, name = ladder.found[len(known) :], self._rounds()[k - 1]
        if name == self.name:
            self._end(found, ladder)
        else:
            self._save(name, found, ladder)

    def _end(self, found: Sequence[Candidate], ladder: Ladder) -> None:
        """Save what the last task found, and remove what the search needed."""
        self._save(self.name, found, ladder)
        for text in (self.fit, self.tune):
            text.forget(self.n)
        self._warm.unlink(missing_ok=True)

    def _warm_starts(self) -> WarmStarts:
        stored = read_arrays(self._warm)
        return WarmStarts(**{name: torch.from_numpy(a).to(self.spec.device) for name, a in stored.items()})

    def _ladder(self, **known: Any) -> Ladder:
        (w,) = self.resident.weights(range(self.n, self.n + 1))
        return Ladder(
            d=self.d,
            w=w,
            fit=self.fit.samples(self.n),
            tune=self.tune.samples(self.n),
            spec=self.spec,
            rng=lambda training_round: np.random.default_rng([self.spec.seed, self.n, training_round]),
            on_step=self.on_step,
            density=self.density,
            top_share=self.top_share,
            **known,
        )
