"""An activation profile: how often each neuron fired, and the order of neurons that follows.

It holds what placing needs and no more, so that a placement can be reproduced without model, corpus or torch. On disk
it is one `.npz` file (NumPy's own container): `meta` (JSON), `counts`, `order`, and with experts `routed`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.errors import ProfileError
from pi_compile.files import read_arrays, write_arrays
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import decode

Counts = npt.NDArray[np.uint64]
Order = npt.NDArray[np.uint32]

GROUP = 64
"""Neurons that move together: cuts fall between groups."""


def cumulative_curve(counts: npt.NDArray[Any], points: int = 100) -> npt.NDArray[np.float64]:
    """(layers, points + 1) fraction of all activations that the hottest 0, 1/points, … 1 of the neurons have."""
    falling = -np.sort(-counts.astype(np.int64), axis=1)
    mass = np.concatenate([np.zeros((len(falling), 1), np.int64), np.cumsum(falling, axis=1)], axis=1)
    neurons = np.linspace(0, falling.shape[1], points + 1).round().astype(np.int64)
    return np.asarray(mass[:, neurons] / np.maximum(mass[:, -1:], 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationProfile:
    """Counts of a decoder's neurons over a text. F neurons of a layer, expert by expert; X experts.

    For mixtures of experts, a neuron is counted over the tokens that are routed to its expert.
    """

    decoder: Decoder
    tokens: int
    """Tokens of the text."""
    counts: Counts
    """(layers, F): tokens for which neuron f of the checkpoint's order fired."""
    order: Order
    """(layers, F): index in the checkpoint of each stored neuron, each expert's hottest group first."""
    routed: Counts | None = None
    """(layers, X): tokens that the router sent to each expert; None where there is no router."""
    inputs: str
    """Digest of what it was made from: checkpoint, text and settings."""

    def ordered_counts(self) -> Counts:
        """(layers, F) counts in stored order."""
        return np.take_along_axis(self.counts, self.order.astype(np.int64), axis=1)

    def density(self) -> npt.NDArray[np.float64]:
        """(layers,) mean fraction of neurons that fire for a token, among those of the experts it is routed to."""
        return np.asarray(self.counts.sum(1) / (self.tokens * self.decoder.experts_per_token * self.decoder.d_ff))

    def cumulative_curve(self, points: int = 100) -> npt.NDArray[np.float64]:
        """(layers, points + 1) fraction of all activations that the hottest 0, 1/points, … 1 of the neurons have."""
        return cumulative_curve(self.counts, points)

    def digest(self) -> str:
        """sha256 of the content, without `inputs`; it does not depend on how the file is compressed."""
        h = hashlib.sha256(json.dumps({**self._meta(), "inputs": None}, sort_keys=True).encode())
        h.update(self.counts.astype("<u8").tobytes())
        h.update(self.order.astype("<u4").tobytes())
        if self.routed is not None:
            h.update(self.routed.astype("<u8").tobytes())
        return h.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        meta = np.array(json.dumps(self._meta(), sort_keys=True))
        arrays: dict[str, npt.NDArray[Any]] = {"counts": self.counts, "order": self.order}
        if self.routed is not None:
            arrays["routed"] = self.routed
        write_arrays(path, {"meta": meta, **{name: _smallest_dtype(a) for name, a in arrays.items()}}, compressed=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a file. Raises ProfileError."""
        problems: list[str] = []
        try:
            stored = read_arrays(path)
            meta = decode(_Meta, json.loads(str(stored["meta"])), "meta", problems)
            if problems:
                raise ProfileError(f"{path}: not an activation profile", found="; ".join(problems))
            counts, order = (stored[name].astype(t, casting="safe") for name, t in (("counts", "u8"), ("order", "u4")))
            routed = stored["routed"].astype("u8", casting="safe") if meta.decoder.n_experts > 1 else None
        except FileNotFoundError:
            raise ProfileError(f"{path}: no such profile", remedy="pi-compile profile RECIPE makes one") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ProfileError(f"{path}: not an activation profile", found=error) from None
        profile = cls(counts=counts, order=order, routed=routed, **vars(meta))
        profile._check(path)
        return profile

    def _check(self, path: Path) -> None:
        d = self.decoder
        expected = (d.n_layers, d.neurons)
        if self.counts.shape != expected or self.order.shape != expected:
            raise ProfileError(f"{path}: wrong shape", expected=expected, found=(self.counts.shape, self.order.shape))
        if not is_order_by_expert(self.order, d.n_experts):
            raise ProfileError(f"{path}: the order of a layer does not name every neuron once")
        if self.tokens < 1 or not counts_within_routed(self.counts, self.routed, self.tokens, d.n_experts):
            raise ProfileError(f"{path}: counts above the {self.tokens} tokens profiled, or routed to an expert")

    def _meta(self) -> dict[str, Any]:
        return {"decoder": asdict(self.decoder), "tokens": self.tokens, "inputs": self.inputs}


def is_order_by_expert(order: npt.NDArray[Any], experts: int) -> bool:
    """Whether each row of (layers, X·F) names every neuron once, those of an expert together."""
    each = np.sort(order.reshape(len(order), experts, order.shape[1] // experts), axis=2)
    return bool((each == np.arange(order.shape[1]).reshape(each.shape[1:])).all())


def counts_within_routed(counts: npt.NDArray[Any], routed: npt.NDArray[Any] | None, tokens: int, experts: int) -> bool:
    """Whether no neuron fired for more tokens than were routed to its expert."""
    if routed is None:
        return experts == 1 and bool(counts.max(initial=0) <= tokens)
    shape = (len(counts), experts)
    most = counts.reshape(*shape, counts.shape[1] // experts).max(axis=2, initial=0)
    return routed.shape == shape and bool((most <= routed).all() and routed.max(initial=0) <= tokens)


@dataclass(frozen=True)
class _Meta:
    """The JSON in a profile's file."""

    decoder: Decoder
    tokens: int
    inputs: str


def _smallest_dtype(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The smallest unsigned type that holds the values, for a small file."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
