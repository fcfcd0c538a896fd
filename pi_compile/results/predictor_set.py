"""The result of training: each layer's rung, what was measured of it, and the predictors."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from pi_compile.files import check_arrays, contents, read_arrays, write_array_stream
from pi_compile.results.activation_profile import MILLION, ActivationProfile, Counts, LayerWork, order_neurons
from pi_runtime.artifact.schema import Layer

Floats = npt.NDArray[np.float32]
Matrices = tuple[Floats, Floats, Floats]
_KIND = "a file of trained predictors"
"""A predictor: down [R, D], up [F, R], bias [F]."""


class PredictorsOnDisk(Sequence[Matrices | None]):
    """The predictors of all layers, each read when it is asked for: together they may not fit in memory."""

    def __init__(self, layers: int, read: Callable[[int], Matrices | None]) -> None:
        self._layers, self._read = layers, read

    def __len__(self) -> int:
        return self._layers

    @overload
    def __getitem__(self, n: int) -> Matrices | None: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[Matrices | None]: ...
    def __getitem__(self, n: int | slice) -> Matrices | Sequence[Matrices | None] | None:
        found = range(self._layers)[n]
        return self._read(found) if isinstance(found, int) else [self._read(layer) for layer in found]


@dataclass(frozen=True, kw_only=True)
class LayerRow(Layer):
    """One layer's rung, measured on text that was used neither to train nor to choose."""

    density: float
    """Neurons that fire ÷ neurons; on the rung `threshold`, those above the threshold."""
    ffn_bytes: float
    """FFN bytes read per token, the predictor's included."""
    gate_bytes: float
    """FFN bytes that the rung `gate` would read per token."""
    ffn_us: float
    """Predicted microseconds of the FFN for a token, all of it on the recipe's processor."""
    recall: float
    """Neurons that fire and are predicted ÷ neurons that fire."""
    precision: float
    """Neurons that fire and are predicted ÷ neurons predicted."""
    rows_read_over_active: float
    """Neurons whose `first` is read ÷ neurons that fire."""
    error: float
    """E‖Δy‖² ÷ E‖x‖²: what the FFN's output lacks, relative to the hidden state it is added to."""

    @property
    def layer(self) -> Layer:
        """The rung alone, as an artifact stores it."""
        return Layer(rung=self.rung, rank=self.rank, threshold=self.threshold)

    @property
    def work(self) -> LayerWork:
        """The rung as placing takes it. Floats are rounded up from their shortest decimals, alike on any machine."""
        return LayerWork(
            **asdict(self.layer),
            read_ppm=_whole(self.rows_read_over_active, MILLION),
            ffn_bytes=_whole(self.ffn_bytes, 1),
            loss_ppb=_whole(self.error, 10**9),
        )


def _whole(value: float, scale: int) -> int:
    return int(-(-Decimal(repr(float(value))) * scale // 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictorSet:
    """The result of the train stage; neurons are in the checkpoint's order."""

    rows: tuple[LayerRow, ...]
    predictors: Sequence[Matrices | None]
    """Those of layers on the rung `predicted`, not yet rounded to their format; None for other layers."""
    predictor_format: str
    """Number format of the predictors."""
    counts: tuple[Counts | None, ...]
    """Tokens of the tune text for which each neuron (F,) was above the threshold; None on the other rungs."""
    counted_tokens: int
    """Tokens of the tune text."""
    perplexity: dict[str, float]
    """Perplexities on the tune and report texts, dense and as chosen: `tune_dense`, `tune`, `report_dense`, `report`.

    Beside them the `increase` on the report text with its `standard_error`, and the divergences on both texts in nats:
    `tune_divergence`, `report_divergence`.
    """
    inputs: str
    """Digest of what it was made from."""

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return tuple(row.rank for row in self.rows)

    def refine(self, profile: ActivationProfile) -> ActivationProfile:
        """The profile with the rungs chosen, in which a neuron below its layer's threshold does not fire.

        On layers with a threshold the counts are those of the tune text, scaled to the tokens profiled and at most
        those routed to the expert, and the order follows from them.
        """
        d = profile.decoder
        routed = profile.routed
        if routed is None:
            routed = np.full((d.n_layers, d.n_experts), profile.tokens, np.uint64)
        counts, order = profile.counts.copy(), profile.order.copy()
        for n, fired in enumerate(self.counts):
            if fired is not None:
                scaled = fired * np.uint64(profile.tokens) // np.uint64(self.counted_tokens)
                counts[n] = np.minimum(scaled, np.repeat(routed[n], d.d_ff))
                order[n] = order_neurons(counts[n], np.zeros((0, len(fired)), np.uint8), d.n_experts)
        layers = tuple(row.work for row in self.rows)
        return replace(profile, counts=counts, order=order, layers=layers, predictor_format=self.predictor_format)

    def digest(self) -> str:
        """sha256 of the content, without `inputs`."""
        h = hashlib.sha256(json.dumps({**self._meta(), "inputs": None}, sort_keys=True).encode())
        for name, array in self._arrays():
            h.update(name.encode() + array.tobytes())
        return h.hexdigest()

    def in_memory(self) -> Self:
        """The same, with all predictors read: for one whose files will be gone."""
        return replace(self, predictors=tuple(self.predictors))

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""

        def arrays() -> Iterator[tuple[str, npt.NDArray[Any]]]:
            yield "meta", np.array(json.dumps(self._meta(), sort_keys=True))
            yield from self._arrays()

        write_array_stream(path, arrays())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote; predictors are read when they are needed. Raises ProfileError."""

        def read(n: int) -> Matrices | None:
            if rows[n].rank is None:
                return None
            stored = read_arrays(path, names=_names(n))
            with contents(path, _KIND):
                down, up, bias = (stored[name] for name in _names(n))
            return down, up, bias

        with contents(path, _KIND):
            check_arrays(path)
            meta = json.loads(str(read_arrays(path, "meta")["meta"]))
            rows = tuple(LayerRow(**row) for row in meta.pop("rows"))
            fired = read_arrays(path, "counts-")
            counts = tuple(fired.get(f"counts-{n}") for n in range(len(rows)))
            return cls(rows=rows, predictors=PredictorsOnDisk(len(rows), read), counts=counts, **meta)

    def _meta(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "predictor_format": self.predictor_format,
            "counted_tokens": self.counted_tokens,
            "perplexity": self.perplexity,
            "inputs": self.inputs,
        }

    def _arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """All arrays by their names, with one layer's in memory."""
        for n, (predictor, fired) in enumerate(zip(self.predictors, self.counts, strict=True)):
            if predictor is not None:
                yield from ((k, np.ascontiguousarray(v, "<f4")) for k, v in zip(_names(n), predictor, strict=True))
            if fired is not None:
                yield f"counts-{n}", np.ascontiguousarray(fired, "<u8")


def _names(n: int) -> tuple[str, str, str]:
    """Names of the arrays of layer n's predictor."""
    return f"down-{n}", f"up-{n}", f"bias-{n}"


STORE = ".pi-build"
"""Folder beside the recipe that holds every recipe's intermediate results."""


def store_folder(recipe: Path) -> Path:
    """The folder of a recipe's intermediate results."""
    return recipe.resolve().parent / STORE / recipe.stem


def built_activations(recipe: Path) -> ActivationProfile | None:
    """The profile that the last build of a recipe left, with what it trained; None where there is none.

    The checkpoint is not read, so a change of it since then is not seen.
    """
    profile, trained = (_newest(store_folder(recipe), stage) for stage in ("profile", "train"))
    if profile is None:
        return None
    found = ActivationProfile.load(profile)
    if trained is not None:
        found = PredictorSet.load(trained).refine(found)
    return replace(found, source=f"measured by the last build of {recipe.name} on {found.tokens:,} tokens")


def _newest(folder: Path, stage: str) -> Path | None:
    return max(folder.glob(f"{stage}-*.npz"), key=lambda path: path.stat().st_mtime, default=None)
