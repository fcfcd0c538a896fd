"""One model in several files: ours with budgets of bits, and llama.cpp's kinds.

The weights of every file are read, and the perplexity of the same tokens is computed from them in torch, in float32, by
one program: so rows differ in what the files hold, and in nothing else. Windows are paired with the source's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from support.gguf_files import write_gguf

from pi_compile.calibration import quantising
from pi_compile.calibration.quantising import RoundingLoss, Values, source_values
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.pipeline import stages
from pi_compile.pipeline.division import divide
from pi_runtime.errors import NotMetError
from rounding import peer

Tokens = npt.NDArray[np.integer]
INTERVAL = 1.96
"""Standard errors of a 95 % interval."""


@dataclass(frozen=True)
class Row:
    """One file."""

    name: str
    nbytes: int
    loss: RoundingLoss

    def __str__(self) -> str:
        return (
            f"{self.name:<34}{self.nbytes / 1e6:>9.2f}{self.loss.increase:>+10.2%} ± {INTERVAL * self.loss.error:.2%}"
        )


@dataclass(frozen=True)
class Beside:
    """A model, the text that it is rounded on, and the tokens that are reported on."""

    checkpoint: Checkpoint
    text: str
    fit: Tokens
    report: Tokens
    folder: Path

    def rows(self, budgets: Sequence[float], kinds: Sequence[str], quantise_tokens: int) -> Iterator[Row | str]:
        """The rows of our files and of llama.cpp's; a line where there is none."""
        ids_NT = quantising.text_windows(self.checkpoint.decoder, self.report, 512)

        def losses(checkpoint: Checkpoint, values: Values) -> npt.NDArray[np.float64]:
            return quantising.text_losses(checkpoint, ids_NT, values, lambda _done, _all: None)

        source_N = losses(self.checkpoint, source_values)

        def row(name: str, path: Path, values: Values, checkpoint: Checkpoint = self.checkpoint) -> Row:
            loss = RoundingLoss.between(losses(checkpoint, values), source_N, ids_NT.numel())
            return Row(name, path.stat().st_size, loss)

        for megabytes, on_text in product(budgets, sorted({0, quantise_tokens})):
            name = f"ours, {megabytes:.4g} MB{', rounded on text' if on_text else ''}"
            try:
                yield row(name, *self._packed(megabytes, on_text))
            except NotMetError as error:
                yield f"{name}: {error}"
        if (why := peer.missing()) is not None:
            yield f"llama.cpp: {why}"
            return
        source = self._source()
        importance = peer.importance_matrix(source, self.text, self.folder)
        for kind in kinds:
            path = peer.quantised(source, kind, self.folder, importance)
            again = open_checkpoint(path, activation=self.checkpoint.decoder.activation)
            name = f"llama.cpp, {kind}" + ("" if importance else ", no importance matrix")
            yield row(name, path, source_values, again)

    def _packed(self, megabytes: float, on_text: int) -> tuple[Path, Values]:
        """The artifact of a budget, and the values of its arrays."""
        widest = dict.fromkeys(self.checkpoint.formats(), "q8")
        divided = divide(self.checkpoint, self.fit[:2048], formats=widest, file_mib=megabytes * 1e6 / 2**20)
        rounded = None
        if on_text:
            rounded = stages.quantise(self.checkpoint, self.fit[:on_text], formats=divided.formats)
        path = self.folder / f"{megabytes:g}-{on_text}.pi"
        stages.pack(self.checkpoint, path, formats=divided.formats, quantised=rounded)
        return path, quantising.packed_values(self.checkpoint.decoder, divided.formats, rounded)

    def _source(self) -> Path:
        """The model as a GGUF file, in what it is stored in."""
        if self.checkpoint.location.is_file():
            return self.checkpoint.location
        path = self.folder / "source.gguf"
        write_gguf(self.checkpoint.location, path, "f32")
        return path
