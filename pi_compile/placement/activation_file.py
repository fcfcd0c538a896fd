"""Activation files: what placing needs of a model and no more, so that a placement is reproduced without the model.

A file holds the decoder, the number formats of the checkpoint, counts and order of the neurons, and the table of the
train stage. It is an `.npz` (NumPy's own container) of `meta` (JSON), `counts`, `order`, and with experts `routed`. The
first axis of an array is 1 where all layers are alike.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.cost_model import MILLION, ActivationCounts, Ints, LayerWork
from pi_compile.errors import ProfileError
from pi_compile.files import read_arrays, write_arrays
from pi_compile.results import ActivationProfile, LayerRow, counts_within_routed, is_order_by_expert
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import decode
from pi_runtime.artifact.rungs import RUNGS


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One layer as training left it; the fields are keys of the file."""

    rung: str
    rank: int | None
    ffn_bytes: int
    """FFN bytes read per token, the predictor's included, rounded up."""
    read_ppm: int
    """Neurons whose `first` is read ÷ neurons that fire, in millionths."""
    loss_ppb: int
    """Error of the FFN's output, E‖Δy‖² ÷ E‖x‖², in 10⁻⁹."""

    @classmethod
    def of(cls, row: LayerRow) -> Self:
        """A row of training's table, rounded up from the shortest decimals of its floats to be the same everywhere."""
        return cls(
            rung=row.rung,
            rank=row.rank,
            ffn_bytes=_whole(row.ffn_bytes, 1),
            read_ppm=_whole(row.rows_read_over_active, MILLION),
            loss_ppb=_whole(row.error, 10**9),
        )


def _whole(value: float, scale: int) -> int:
    return int(-(-Decimal(repr(float(value))) * scale // 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationFile:
    """The content of an activation file."""

    decoder: Decoder
    formats: Mapping[str, str]
    """The checkpoint's own, for embedding, attention, ffn, and for the head where it is not the embedding."""
    tokens: int
    counts: Ints
    """(layers, neurons): for how many tokens each neuron fired, in the checkpoint's order."""
    order: npt.NDArray[np.uint32]
    """(layers, neurons): the checkpoint's index of the neuron stored at each place."""
    routed: Ints | None = None
    """(layers, experts): tokens that the router sent to each expert; None where there is no router."""
    table: tuple[TableRow, ...] = ()
    """One row a layer; () for a model that was not trained."""
    predictor_format: str = ""
    """Number format that the table's bytes and errors were measured with; empty without a table."""

    @classmethod
    def of(
        cls,
        profile: ActivationProfile,
        formats: Mapping[str, str],
        rows: tuple[LayerRow, ...] = (),
        predictor_format: str = "",
    ) -> Self:
        """The file of what the stages made."""
        return cls(
            decoder=profile.decoder,
            formats=formats,
            tokens=profile.tokens,
            counts=profile.counts.astype(np.int64),
            order=profile.order,
            routed=None if profile.routed is None else profile.routed.astype(np.int64),
            table=tuple(map(TableRow.of, rows)),
            predictor_format=predictor_format,
        )

    def ordered_counts(self) -> Ints:
        """(layers, neurons) counts in stored order."""
        return np.take_along_axis(self.counts, self.order.astype(np.int64), axis=1)

    def activation_counts(self, source: str) -> ActivationCounts:
        """The counts in stored order and the rungs of the table, as placing takes them."""
        return ActivationCounts(
            counts=self.ordered_counts(),
            tokens=self.tokens,
            routed=self.routed,
            layers=tuple(LayerWork(rung=row.rung, rank=row.rank, read_ppm=row.read_ppm) for row in self.table),
            source=source,
        )

    def digest(self) -> str:
        """The sha256 of the content, however the file is compressed."""
        h = hashlib.sha256(json.dumps(self._meta(), sort_keys=True).encode())
        h.update(self.counts.astype("<i8").tobytes())
        h.update(self.order.astype("<u4").tobytes())
        if self.routed is not None:
            h.update(self.routed.astype("<i8").tobytes())
        return h.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        meta = np.array(json.dumps(self._meta(), sort_keys=True))
        arrays: dict[str, npt.NDArray[Any]] = {"counts": self.counts, "order": self.order}
        if self.routed is not None:
            arrays["routed"] = self.routed
        write_arrays(path, {"meta": meta, **{name: _small(a) for name, a in arrays.items()}}, compressed=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a file. Raises ProfileError."""
        problems: list[str] = []
        try:
            stored = read_arrays(path)
            meta = decode(_Meta, json.loads(str(stored["meta"])), "meta", problems)
            if problems:
                raise ProfileError(f"{path}: not an activation file", found="; ".join(problems))
            layers, neurons, experts = meta.shape.n_layers, meta.shape.neurons, meta.shape.n_experts
            counts, order = (
                np.broadcast_to(stored[name].astype(t, casting="safe"), (layers, neurons))
                for name, t in (("counts", "i8"), ("order", "u4"))
            )
            routed = None
            if experts > 1:
                routed = np.broadcast_to(stored["routed"].astype("i8", casting="safe"), (layers, experts))
        except FileNotFoundError:
            remedy = "pi-compile train RECIPE --export FILE makes one"
            raise ProfileError(f"{path}: no such activation file", remedy=remedy) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ProfileError(f"{path}: not an activation file", found=error) from None
        found = cls(
            decoder=meta.shape,
            formats=meta.formats,
            tokens=meta.tokens,
            counts=counts,
            order=order,
            routed=routed,
            table=meta.table,
            predictor_format=meta.predictor_format,
        )
        problem = found._problem()
        if problem:
            raise ProfileError(f"{path}: contradicts itself", found=problem)
        return found

    def _problem(self) -> str:
        experts = self.decoder.n_experts
        counted = self.tokens >= 1 and counts_within_routed(self.counts, self.routed, self.tokens, experts)
        if not counted or self.counts.min(initial=0) < 0:
            return f"counts outside the {self.tokens} tokens profiled"
        if not is_order_by_expert(self.order, experts):
            return "the order of a layer does not name every neuron once"
        if self.table and len(self.table) != self.decoder.n_layers:
            return f"a table of {len(self.table)} rows for {self.decoder.n_layers} layers"
        if not all(row.rung in RUNGS for row in self.table):
            return "a rung that is none"
        if any(RUNGS[row.rung].parameter == "rank" and not row.rank for row in self.table):
            return "a rung with a low-rank predictor that has no rank"
        return ""

    def _meta(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.decoder),
            "formats": self.formats,
            "tokens": self.tokens,
            "table": [asdict(row) for row in self.table],
            "predictor_format": self.predictor_format,
        }


@dataclass(frozen=True)
class _Meta:
    """What a file holds beside its arrays; the fields are keys of the file."""

    shape: Decoder
    formats: Mapping[str, str]
    tokens: int
    table: tuple[TableRow, ...]
    predictor_format: str


def _small(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The smallest unsigned type that holds the values, and one row where all are alike."""
    rows = values[:1] if (values == values[:1]).all() else values
    return rows.astype(np.min_scalar_type(int(rows.max(initial=0))))
