"""What training leaves: a rung and a table row for every layer, and the predictors."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.array_file import read_arrays, write_arrays
from pi_compile.errors import ProfileError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer of the table, measured on text that neither fitted nor tuned it."""

    rung: str
    density: float
    """Neurons that fire ÷ neurons."""
    rank: int | None
    ffn_bytes: float
    """FFN bytes read per token, the predictor's included."""
    gate_bytes: float
    """What the gate rung would read."""
    recall: float
    """Neurons that fire and are predicted ÷ neurons that fire."""
    precision: float
    """… ÷ neurons predicted."""
    rows_read_over_active: float
    """Neurons whose `first` is read ÷ neurons that fire."""
    error: float
    """E‖Δy‖² ÷ E‖x‖²: what is lost of the FFN's output, against the hidden state it is added to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """The result of the train stage. Neurons in the checkpoint's order."""

    rows: tuple[LayerRow, ...]
    predictors: tuple[tuple[Floats, Floats, Floats] | None, ...]
    """(down [R, D], up [F, R], bias [F]) of each layer on the predicted rung, not yet rounded to their format."""
    perplexity: dict[str, float]
    """On tune and report text, dense and as chosen: `tune_dense`, `tune`, `report_dense`, `report`."""
    inputs: str
    """Digest of what it was made from."""

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return tuple(row.rank for row in self.rows)

    def digest(self) -> str:
        """sha256 of the content, whatever it was made from."""
        h = hashlib.sha256(json.dumps({**self._meta(), "inputs": None}, sort_keys=True).encode())
        for predictor in self.predictors:
            for array in predictor or ():
                h.update(np.ascontiguousarray(array, "<f4").tobytes())
        return h.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        arrays: dict[str, Any] = {"meta": np.array(json.dumps(self._meta(), sort_keys=True))}
        for n, predictor in enumerate(self.predictors):
            if predictor is not None:
                arrays |= dict(zip((f"down-{n}", f"up-{n}", f"bias-{n}"), predictor, strict=True))
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises ProfileError."""
        try:
            stored = read_arrays(path)
            meta = json.loads(str(stored["meta"]))
            rows = tuple(LayerRow(**row) for row in meta.pop("rows"))
            predictors = tuple(
                (stored[f"down-{n}"], stored[f"up-{n}"], stored[f"bias-{n}"]) if row.rank is not None else None
                for n, row in enumerate(rows)
            )
            return cls(rows=rows, predictors=predictors, **meta)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProfileError(f"{path}: not a file of trained predictors", found=error) from None

    def _meta(self) -> dict[str, Any]:
        rows: Sequence[dict[str, Any]] = [asdict(row) for row in self.rows]
        return {"rows": rows, "perplexity": self.perplexity, "inputs": self.inputs}
