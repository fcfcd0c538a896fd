"""One model in several files: ours with budgets of bits, and llama.cpp's kinds.

The weights of every file are read, and the perplexity of the same tokens is computed from them in torch, in float32, by
one program: so rows differ in what the files hold, and in nothing else. Windows are paired with the source's. The
divergence is Kullback and Leibler's, of the predictions from the source's, in nats a token. Files are compared at the
same bytes of all that is no tokenizer: ours have `tokenizer.json` whole, and llama.cpp's another form of it.
"""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from support.gguf_files import write_gguf

from pi_compile.calibration import quantising
from pi_compile.calibration.quantising import RoundingLoss, Values, source_values
from pi_compile.calibration.quantising.loss import text_states
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.pipeline import stages
from pi_compile.pipeline.division import divide
from pi_compile.pipeline.rounding_check import DIVIDED_BY
from pi_compile.torch_model import decoder as td
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
    """Without what belongs to the tokenizer."""
    of_file: int
    loss: RoundingLoss
    divergence: float
    divergence_error: float

    def __str__(self) -> str:
        increase = f"{self.loss.increase:+10.2%} ± {INTERVAL * self.loss.error:.2%}"
        divergence = f"{self.divergence:.5f} ± {INTERVAL * self.divergence_error:.5f}"
        return f"{self.name:<34}{self.nbytes / 1e6:>9.3f}{self.of_file / 1e6:>9.2f}{increase:>20}{divergence:>20}"


@dataclass(frozen=True)
class Beside:
    """A model, the text that it is rounded on, and the tokens that are reported on."""

    checkpoint: Checkpoint
    text: str
    """The text of `fit`, as llama.cpp gets it."""
    fit: Tokens
    report: Tokens
    folder: Path

    def rows(self, budgets: Sequence[float], kinds: Sequence[str], quantise_tokens: int) -> Iterator[Row | str]:
        """llama.cpp's kinds, and ours with the same bytes and with budgets; a line where there is none."""
        d = self.checkpoint.decoder
        ids_NT = quantising.text_windows(d, self.report, 512)

        def states(checkpoint: Checkpoint, values: Values) -> tuple[td.NamedTensors, torch.Tensor]:
            return text_states(checkpoint, ids_NT, [values], lambda _done, _all: None)[0]

        with torch.inference_mode():
            source_ends, source_NTD = states(self.checkpoint, source_values)

        def row(name: str, path: Path, nbytes: int, values: Values, checkpoint: Checkpoint = self.checkpoint) -> Row:
            with torch.inference_mode():
                ends, states_NTD = states(checkpoint, values)
                found = []
                for ids, before_TD, after_TD in zip(ids_NT, source_NTD, states_NTD, strict=True):
                    p = td.logits(d, source_ends, before_TD[None])[0].log_softmax(-1)
                    q = td.logits(d, ends, after_TD[None])[0].log_softmax(-1)
                    losses = (F.nll_loss(x[:-1], ids[1:]).item() for x in (q, p))
                    found.append((*losses, (p.exp() * (p - q)).sum(-1).mean().item()))
            packed_N, source_N, divergence_N = np.array(found).T
            loss = RoundingLoss.between(packed_N, source_N, ids_NT.numel())
            error = divergence_N.std(ddof=1) / len(divergence_N) ** 0.5
            return Row(name, nbytes, path.stat().st_size, loss, divergence_N.mean(), error)

        same = []
        for name, path, *opened in self._peers(kinds):
            if isinstance(path, Path):
                same.append(path.stat().st_size - gguf.GGUFReader(path).data_offset)
                yield row(name, path, same[-1], source_values, *opened)
            else:
                yield f"{name}: {path}"
        more = (round(megabytes * 1e6) for megabytes in budgets)
        for nbytes, on_text in product([*same, *more], sorted({0, quantise_tokens})):
            name = f"ours, {nbytes / 1e6:.4g} MB{', rounded on text' if on_text else ''}"
            try:
                yield row(name, *self._packed(nbytes, on_text))
            except NotMetError as error:
                yield f"{name}: {error}"

    def _peers(self, kinds: Sequence[str]) -> Iterator[tuple[str, Path, Checkpoint] | tuple[str, str]]:
        """llama.cpp's file of each kind, opened; or why there is none."""
        if (why := peer.missing()) is not None:
            yield "llama.cpp", why
            return
        source = self._source()
        importance = peer.importance_matrix(source, self.text, self.folder)
        for kind in kinds:
            name = f"llama.cpp, {kind}" + ("" if importance else ", no importance matrix")
            try:
                path = peer.quantised(source, kind, self.folder, importance)
            except subprocess.CalledProcessError as error:
                last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
                yield name, f"llama-quantize ended with {error.returncode}: {''.join(last)}"
                continue
            yield name, path, open_checkpoint(path, activation=self.checkpoint.decoder.activation)

    def _packed(self, nbytes: int, on_text: int) -> tuple[Path, int, Values]:
        """The artifact of a budget, its bytes, and the values of its arrays."""
        tokenizer = sum(map(len, self.checkpoint.text_files.files.values()))
        widest = dict.fromkeys(self.checkpoint.formats(), "q8")
        mib = (nbytes + tokenizer) / 2**20
        divided = divide(self.checkpoint, self.fit[:DIVIDED_BY], formats=widest, file_mib=mib)
        checkpoint, rounded = replace(self.checkpoint, importance=divided.importance), None
        if on_text:
            rounded = stages.quantise(checkpoint, self.fit[:on_text], formats=divided.formats)
        path = self.folder / f"{nbytes}-{on_text}.pi"
        stages.pack(checkpoint, path, formats=divided.formats, quantised=rounded)
        values = quantising.packed_values(checkpoint, divided.formats, rounded)
        return path, path.stat().st_size - tokenizer, values

    def _source(self) -> Path:
        """The model as a GGUF file, in what it is stored in."""
        if self.checkpoint.location.is_file():
            return self.checkpoint.location
        path = self.folder / "source.gguf"
        write_gguf(self.checkpoint.location, path, "f32")
        return path
