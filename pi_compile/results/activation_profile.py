"""An activation profile: how often each neuron of a model fires, and the rungs that training chose with it.

It holds what placing needs of a model and no more, so that a placement can be reproduced without model, corpus or
torch. The stage `profile` counts, training adds the rungs, and a published curve gives counts without either. On disk
it is one `.npz` file (NumPy's own container): `meta` (JSON), `counts`, `order`, with experts `routed`, and where it was
measured `persistence`. The first axis of an array is 1 where all layers are alike.

A layer's neurons are ordered by falling count, and inside bands of near-equal counts by co-firing. A cut between GPU
and CPU falls between groups of 64 neurons, so only the hot mass of each prefix of whole groups matters, and sorting by
count maximises it. Inside a band, neurons that fire together become neighbours, which gives longer runs of rows to
read. A band is as wide as possible while no order inside it can cost any prefix of groups more than 1 % of its mass. So
this bound holds whatever the sample of co-firing is.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.errors import ProfileError
from pi_compile.files import read_arrays, write_arrays
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import attributes, decode, parse_json
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Layer

Counts = npt.NDArray[np.uint64]
Order = npt.NDArray[np.uint32]

GROUP = 64
"""Neurons that move together: cuts fall between groups."""
WINDOWS = (1, 2, 4, 8)
"""Persistence is measured over so many tokens before a token."""
MILLION = 10**6
VERSION = 2
"""Version of the file."""
_LARGEST_META, _LARGEST_HEADER = 16 << 20, 1 << 16
"""Most bytes of `meta`, and of what NumPy says of an array."""


@dataclass(frozen=True, kw_only=True)
class LayerWork(Layer):
    """One layer's rung, and what training measured of it, in integers that are the same on any machine."""

    read_ppm: int = MILLION
    """On rungs that pick: neurons whose `first` is read ÷ neurons that fire, in millionths."""
    ffn_bytes: int = 0
    """FFN bytes read per token, the predictor's included; 0 where nothing was trained."""
    loss_ppb: int = 0
    """Error of the FFN's output, E‖Δy‖² ÷ E‖x‖², in 10⁻⁹."""


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
    persistence: Counts | None = None
    """(layers, 1 + 4): activations at tokens with eight tokens of their text before them; and how many of these were of
    neurons that had fired in the last 1, 2, 4, 8 tokens (`WINDOWS`). None where it was not measured."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Number format of each part as the checkpoint stores it; empty where there is no checkpoint."""
    layers: tuple[LayerWork, ...] = ()
    """The rung of each layer; () where nothing was trained."""
    predictor_format: str = ""
    """Number format that the layers' bytes and losses were measured with; empty where nothing was trained."""
    inputs: str = ""
    """Digest of what it was made from: checkpoint, text and settings."""
    source: str = ""
    """Where the counts come from, in words."""

    def check_model(self, decoder: Decoder) -> None:
        """Raise ProfileError for a model that it is not of."""
        if self.decoder != decoder:
            raise ProfileError("the activation profile is of another model", expected=decoder, found=self.decoder)

    def ordered_counts(self) -> Counts:
        """(layers, F) counts in stored order."""
        return np.take_along_axis(self.counts, self.order.astype(np.int64), axis=1)

    def density(self) -> npt.NDArray[np.float64]:
        """(layers,) mean fraction of neurons that fire for a token, among those of the experts it is routed to."""
        return np.asarray(self.counts.sum(1) / (self.tokens * self.decoder.experts_per_token * self.decoder.d_ff))

    def persistent_shares(self) -> npt.NDArray[np.float64] | None:
        """(layers, 4) share of a token's active neurons that had fired in the last 1, 2, 4, 8 tokens."""
        if self.persistence is None:
            return None
        return np.asarray(self.persistence[:, 1:] / np.maximum(self.persistence[:, :1], 1))

    def cumulative_curve(self, points: int = 100) -> npt.NDArray[np.float64]:
        """(layers, points + 1) fraction of all activations that the hottest 0, 1/points, … 1 of the neurons have."""
        falling = -np.sort(-self.counts.astype(np.int64), axis=1)
        mass = np.concatenate([np.zeros((len(falling), 1), np.int64), np.cumsum(falling, axis=1)], axis=1)
        neurons = np.linspace(0, falling.shape[1], points + 1).round().astype(np.int64)
        return np.asarray(mass[:, neurons] / np.maximum(mass[:, -1:], 1))

    # The keys of both digests are part of every artifact and every lock, so they stay whatever the fields are called.

    def digest(self) -> str:
        """sha256 of the counts and their order, which training and packing go by."""
        return self._digest({"decoder": attributes(self.decoder), "tokens": self.tokens, "inputs": None})

    def placing_digest(self) -> str:
        """sha256 of all that placing reads: the counts and their order, persistence, formats and rungs."""
        keys = ("rung", "rank", "ffn_bytes", "read_ppm", "loss_ppb")
        measured = {} if self.persistence is None else {"persistence": self.persistence.tolist()}
        return self._digest(
            {
                "shape": attributes(self.decoder),
                "formats": dict(self.formats),
                "tokens": self.tokens,
                "table": [{key: getattr(layer, key) for key in keys} for layer in self.layers],
                "predictor_format": self.predictor_format,
                **measured,
            }
        )

    def _digest(self, meta: dict[str, Any]) -> str:
        h = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
        h.update(self.counts.astype("<u8").tobytes())
        h.update(self.order.astype("<u4").tobytes())
        if self.routed is not None:
            h.update(self.routed.astype("<u8").tobytes())
        return h.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        meta = {key: getattr(self, key) for key in ("tokens", "predictor_format", "inputs")}
        meta |= {"version": VERSION, "decoder": attributes(self.decoder), "formats": dict(self.formats)}
        meta["layers"] = [asdict(layer) for layer in self.layers]
        names = ("counts", "order", "routed", "persistence")
        arrays: dict[str, npt.NDArray[Any] | None] = {name: getattr(self, name) for name in names}
        smallest = {name: _smallest(array) for name, array in arrays.items() if array is not None}
        write_arrays(path, {"meta": np.array(json.dumps(meta, sort_keys=True)), **smallest}, compressed=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a file. Raises ProfileError."""
        problems: list[str] = []
        try:
            text = read_arrays(path, names=["meta"], most=_LARGEST_META)["meta"]
            meta = decode(_Meta, parse_json(str(text).encode()), "meta", problems)
            if not problems and meta.version != VERSION:
                problems.append(f"meta.version: expected {VERSION}, found {meta.version}")
            problems = problems or [f"decoder.{problem}" for problem in meta.decoder.problems()]
            if problems:
                raise ValueError("; ".join(problems))
            d = meta.decoder
            kinds = {"counts": ("u8", d.neurons), "order": ("u4", d.neurons)}
            if d.n_experts > 1:
                kinds["routed"] = ("u8", d.n_experts)
            most = 8 * d.n_layers * d.neurons + _LARGEST_HEADER
            stored = read_arrays(path, names=[*kinds, "persistence"], most=most)
            if "persistence" in stored:
                kinds["persistence"] = ("u8", 1 + len(WINDOWS))
            arrays: dict[str, Any] = {
                name: _all_rows(stored[name].astype(dtype, casting="safe"), (d.n_layers, columns))
                for name, (dtype, columns) in kinds.items()
            }
        except FileNotFoundError:
            raise ProfileError(f"{path}: no such activation profile", remedy=_REMEDY) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ProfileError(f"{path}: not an activation profile", found=error, remedy=_REMEDY) from None
        fields = {name: value for name, value in vars(meta).items() if name != "version"}
        profile = cls(**fields, **arrays, source=f"counts of {meta.tokens} tokens in {path.name}")
        problem = profile._problem()
        if problem:
            raise ProfileError(f"{path}: contradicts itself", found=problem, remedy=_REMEDY)
        return profile

    def _problem(self) -> str:
        """What contradicts what in the profile; empty where nothing does."""
        d = self.decoder
        if not is_order_by_expert(self.order, d.n_experts):
            return "the order of a layer does not name every neuron once"
        if self.tokens < 1 or not counts_within_routed(self.counts, self.routed, self.tokens, d.n_experts):
            return f"counts above the {self.tokens} tokens profiled, or above those routed to an expert"
        if not _shares_rise(self.persistence):
            return "more activations that persisted than activations, or fewer in a longer window"
        return self._problem_of_layers()

    def _problem_of_layers(self) -> str:
        """What contradicts what in the layers' rungs; empty where nothing does."""
        d = self.decoder
        if self.layers and len(self.layers) != d.n_layers:
            return f"rungs of {len(self.layers)} layers for {d.n_layers}"
        if not all(layer.rung in RUNGS for layer in self.layers):
            return f"a rung that is none of {', '.join(RUNGS)}"
        if any(layer.kind.parameter == "rank" and not layer.rank for layer in self.layers):
            return "a rung with a low-rank predictor that has no rank"
        return ""


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


def _shares_rise(persistence: Counts | None) -> bool:
    """Whether a longer window holds no fewer activations, and none holds more than there are."""
    return persistence is None or bool((np.diff(persistence[:, [1, 2, 3, 4, 0]].astype(np.int64), axis=1) >= 0).all())


_REMEDY = "`pi-compile profile RECIPE --export FILE` makes one; `train` in place of `profile` adds the rungs"


@dataclass(frozen=True)
class _Meta:
    """The JSON in a profile's file."""

    version: int
    decoder: Decoder
    formats: Mapping[str, str]
    tokens: int
    layers: tuple[LayerWork, ...]
    predictor_format: str
    inputs: str


def _all_rows(array: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
    """An array of the file with a row for each layer. Raises ValueError for another shape."""
    if array.shape not in (shape, (1, shape[1])):
        raise ValueError(f"an array of shape {array.shape}, expected {shape}")
    return np.broadcast_to(array, shape)


def _smallest(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array for a small file: one row where all are alike, in the smallest unsigned type that holds the values."""
    rows = values[:1] if (values == values[:1]).all() else values
    return rows.astype(np.min_scalar_type(int(rows.max(initial=0))))


LOSS = 0.01
"""Largest fraction of a prefix's mass that ordering by co-firing may cost."""

LARGEST = 4096
"""Most neurons of a band: ordering by co-firing takes their square of time and memory."""

Ints = npt.NDArray[np.integer]


def order_neurons(counts: Ints, fired: npt.NDArray[np.uint8], experts: int = 1) -> npt.NDArray[np.uint32]:
    """(F,) counts and (samples, F) co-firing bits → (F,) index in the checkpoint of each stored neuron.

    An expert's neurons stay together. Ties go to the lower index, so the order is a function of its inputs.
    """
    size = len(counts) // experts
    of_experts = (slice(start, start + size) for start in range(0, len(counts), size))
    return np.concatenate([_expert_order(counts[e], fired[:, e]) + np.uint32(e.start) for e in of_experts])


def _expert_order(counts: Ints, fired: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    falling = counts.astype(np.int64)[order]
    for start, stop in bands(falling):
        members = order[start:stop]
        order[start:stop] = members[similarity_order(fired[:, members])]
    return order.astype(np.uint32)


def bands(falling: Ints) -> list[tuple[int, int]]:
    """The widest bands of falling counts inside which no order costs any prefix of groups more than `LOSS`."""
    mass = np.concatenate([[0], np.cumsum(falling)])
    found, start, size = [], 0, len(falling)
    while start < size:
        stop = min(size, start + GROUP)  # one group has no cut inside it
        while stop < size and stop - start < LARGEST and _worst_loss(mass, start, min(size, stop + GROUP)) <= LOSS:
            stop = min(size, stop + GROUP)
        found.append((start, stop))
        start = stop
    return found


def _worst_loss(mass: Ints, start: int, stop: int) -> float:
    """Largest fraction of its mass that a prefix of groups ending inside [start, stop) can lose.

    That is the loss if the hottest neurons of the band, up to the end of the prefix, change places with the coldest.
    """
    worst = 0.0
    for end in range((start // GROUP + 1) * GROUP, stop, GROUP):
        size = end - start
        loss = (mass[end] - mass[start]) - (mass[stop] - mass[stop - size])
        worst = max(worst, loss / max(int(mass[end]), 1))
    return worst


def similarity_order(fired: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """(samples, n) bits → an order of n neurons, in which each is followed by the most similar one of those left.

    Similarity is the cosine of the two bit columns. The order starts with the first; ties go to the lower index.
    """
    n = fired.shape[1]
    bits = fired.astype(np.float32)
    together = bits.T @ bits  # integers below 2²⁴: exact in float32, whatever the order of summing
    length = np.sqrt(np.maximum(np.diag(together).astype(np.float64), 1))
    left, placed = np.ones(n, bool), [0]
    left[0] = False
    for _ in range(n - 1):
        similarity = np.where(left, together[placed[-1]] / length, -1.0)
        placed.append(int(np.argmax(similarity)))
        left[placed[-1]] = False
    return np.array(placed, np.int64)
