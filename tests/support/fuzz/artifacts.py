"""Artifacts with one lie, or a few: made by a seed, with every checksum computed anew so that the lie gets past it."""

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import canonical_json, decode, default_of
from pi_runtime.artifact.features import used
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.layout import chunk_name, documents
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import BY_NEURON, PARTS, ArraySpec, array_specs
from support.forge import Forged, put_together, seal, take_apart
from support.fuzz import mutations

MANIFEST = b"manifest.json"
LARGEST = 4 << 20
"""Most bytes of arrays that a forged decoder may ask for."""
SIZES = (1, 2, 3, 5, 8, 31, 32, 33, 40, 63, 64, 65, 72, 96, 100, 128, 256)
OFFSETS = (0, 1, 64, 0xFFFF, 1 << 31, 0xFFFFFFFE, 0xFFFFFFFF)


@dataclass
class Lie:
    """A file, and what is known of it."""

    what: str
    data: bytes
    damages_data: bool = False
    """Whether arrays differ from their digests, and nothing else is wrong: it opens, and `verify` finds it."""


class Forger:
    """Makes lies of one valid artifact. The same seed makes the same lie."""

    def __init__(self, path: Path) -> None:
        self._truth, self._entries = path.read_bytes(), take_apart(path)
        self._manifest = json.loads(self._entries[-1].data)

    def lie(self, rng: Random) -> Lie:
        """One lie."""
        kind: Callable[[Random], Lie] = rng.choice(
            [self._raw, self._cut, self._container, *(4 * [self._claim]), self.shape, self._file, self.damage]
        )
        found = kind(rng)
        found.what = f"{kind.__name__} {found.what}"
        return found

    def damage(self, rng: Random) -> Lie:
        """Other bytes in some arrays; their digests are those of before, or their own."""
        entries, manifest = deepcopy(self._entries), deepcopy(self._manifest)
        hides = rng.random() < 0.5
        for name in rng.sample(sorted(manifest["arrays"]), rng.choice((1, 1, 3, 100)) % len(manifest["arrays"]) or 1):
            entry = next(e for e in entries if e.name.startswith(f"{name}/c/".encode()))
            entry.data = other_bytes(rng, entry.data)
            if hides:
                manifest["arrays"][name]["sha256"] = hashlib.sha256(entry.data).hexdigest()
        entries[-1].data = mutations.spelled(manifest)
        data = put_together(entries)
        changed = any(a.data != b.data for a, b in zip(entries[:-1], self._entries, strict=False))
        return Lie("arrays" + (" and digests" if hides else ""), data, damages_data=changed and not hides)

    def _raw(self, rng: Random) -> Lie:
        data = mutations.data(rng, self._truth)
        if rng.random() < 0.7:
            data = seal(data[:-64])
        return Lie("bytes", data)

    def _cut(self, rng: Random) -> Lie:
        """Truncation where an entry, its data, the directory or a record begins, or one byte before or behind."""
        marks = [at for e in self._entries for at in (self._truth.index(e.name) - 30, self._truth.index(e.data))]
        at = rng.choice([*marks, self._truth.rindex(b"PK\5\6"), len(self._truth) - 64]) + rng.choice((-1, 0, 1))
        return Lie(f"at {at}", seal(self._truth[:at]) if rng.random() < 0.5 else self._truth[:at])

    def _container(self, rng: Random) -> Lie:
        entries, options, what = deepcopy(self._entries), {}, []
        for _ in range(rng.choice((1, 1, 2, 4))):
            n, field = rng.randrange(len(entries)), rng.choice(CONTAINER)
            what.append(f"{field} of {entries[n].name!r}")
            change_container(rng, entries, n, field, options)
            if not entries:
                break
        return Lie(", ".join(what), put_together(entries, **options))

    def _claim(self, rng: Random) -> Lie:
        """Some other value in the manifest, while everything else stays."""
        entries, manifest = deepcopy(self._entries), deepcopy(self._manifest)
        what = [mutations.tree(rng, self._part(rng, manifest)) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        entries[-1].data = mutations.spelled(manifest)
        if rng.random() < 0.05:
            what.append("its bytes")
            entries[-1].data = mutations.data(rng, entries[-1].data)
        return Lie(", ".join(what), put_together(entries))

    @staticmethod
    def _part(rng: Random, manifest: dict[str, Any]) -> Any:
        """The whole manifest, or one part of it that is not mostly arrays."""
        parts = [part for part in manifest.values() if isinstance(part, dict | list) and part]
        return rng.choice([manifest, *parts])

    def shape(self, rng: Random) -> Lie:
        """Another decoder, other formats and rungs, with arrays of the sizes that follow from them, and any bytes."""
        manifest = deepcopy(self._manifest)
        decoder = manifest["decoder"] = {**DEFAULTS, **manifest["decoder"]}
        for _ in range(rng.choice((1, 1, 2, 3))):
            name = rng.choice(sorted(decoder))
            if type(decoder[name]) is int and rng.random() < 0.8:
                decoder[name] = rng.choice(SIZES)
            elif name == "rotary_frequencies":
                decoder[name] = [abs(rng.choice(mutations.NUMBERS)) or 1.0 for _ in range(rng.choice((0, 1, 4, 12)))]
            else:
                decoder[name] = mutations.near(rng, decoder[name])
        if rng.random() < 0.5:
            manifest["formats"] = {part: rng.choice(WEIGHT_FORMATS) for part in PARTS}
        try:
            specs = specs_of(manifest)
            sizes = [spec.nbytes for spec in specs.values()]
            sound = min(sizes) > 0 and sum(sizes) < LARGEST
        except (KeyError, TypeError, ValueError, OverflowError):
            sound = False
        if not sound:  # no arrays follow from that: the old ones stay
            claimed = Forged(MANIFEST, mutations.spelled(agreed(manifest)))
            return Lie("claimed", put_together([*self._entries[:-1], claimed]))
        return Lie(f"{decoder}", self._assembled(manifest, specs, rng))

    def _file(self, rng: Random) -> Lie:
        """Another tokenizer or template, with its digest."""
        manifest, files = deepcopy(self._manifest), self._files()
        name = rng.choice(sorted(files))
        if name.endswith(".json") and rng.random() < 0.8:
            document = json.loads(files[name])
            what = ", ".join(mutations.tree(rng, document) for _ in range(rng.choice((1, 1, 2, 5))))
            files[name] = mutations.spelled(document)
        else:
            files[name], what = mutations.data(rng, files[name]), "bytes"
        arrays = [e for e in self._entries if b"/c/" in e.name]
        return Lie(f"{name} {what}", self._packed(manifest, arrays, files, specs_of(manifest)))

    def _files(self) -> dict[str, bytes]:
        return {e.name.decode(): e.data for e in self._entries if e.name.decode() in self._manifest["files"]}

    def _assembled(self, manifest: dict[str, Any], specs: dict[str, ArraySpec], rng: Random) -> bytes:
        manifest["arrays"] = {}
        arrays = []
        for name, spec in specs.items():
            data = rng.randbytes(spec.nbytes) if rng.random() < 0.3 else sensible_bytes(rng, spec)
            entry = {"format": spec.format, "shape": spec.shape, "nbytes": len(data), "offset": 0}
            manifest["arrays"][name] = {**entry, "sha256": hashlib.sha256(data).hexdigest()}
            arrays.append(Forged(chunk_name(name, spec).encode(), data, 4096 if len(data) >= 65536 else 64))
        return self._packed(manifest, arrays, self._files(), specs)

    def _packed(
        self, manifest: dict[str, Any], arrays: list[Forged], files: dict[str, bytes], specs: dict[str, ArraySpec]
    ) -> bytes:
        """The file of these parts, with offsets and digests that agree."""
        root = {"format": manifest["format"], "version": manifest["version"], "manifest": "manifest.json"}
        stored = [Forged(name.encode(), files[name]) for name in sorted(files)]
        nodes = [Forged(name.encode(), data) for name, data in documents(specs, root)]
        put_together([*arrays, *stored])  # finds where data lies
        for name, entry in zip(specs, arrays, strict=True):
            manifest["arrays"][name]["offset"] = entry.data_offset
        for entry in stored:
            digest = hashlib.sha256(entry.data).hexdigest()
            about = {"nbytes": len(entry.data), "offset": entry.data_offset, "sha256": digest}
            manifest["files"][entry.name.decode()] = about
        return put_together([*arrays, *stored, *nodes, Forged(MANIFEST, mutations.spelled(agreed(manifest)))])


DEFAULTS = {f.name: default_of(f) for f in fields(Decoder) if default_of(f) is not MISSING}
"""What a manifest says of a decoder by saying nothing."""


def agreed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest as its writer spells it, with the features that it uses; as it is where it says no such thing."""
    problems: list[str] = []
    read = decode(Manifest, json.loads(json.dumps(manifest)), "", problems)
    if problems:
        return manifest
    try:
        found: dict[str, Any] = json.loads(canonical_json(replace(read, features=used(read))))
    except (KeyError, TypeError, ValueError):  # a rung or format that there is none of
        return manifest
    return found


CONTAINER = (
    *("name", "local_name", "align", "method", "flags", "crc", "size", "offset", "fill", "comment", "data", "twice"),
    *("gone", "swapped", "many", "before", "between", "count", "directory_size", "directory_offset", "prefix"),
)


def change_container(rng: Random, entries: list[Forged], n: int, field: str, options: dict[str, Any]) -> None:
    """One lie of the container, about entry n or about the whole."""
    entry = entries[n]
    number = rng.choice((*OFFSETS, rng.randrange(1 << rng.randrange(1, 33)))) & 0xFFFFFFFF
    old = entry.name.decode(errors="replace")
    other = rng.randrange(len(entries))
    values: dict[str, Any] = {
        **dict.fromkeys(("name", "local_name"), mutations.text(rng, old).encode("utf-8", "replace")[:65000]),
        **dict.fromkeys(("method", "flags", "count"), number & 0xFFFF),
        **dict.fromkeys(("crc", "size", "offset", "directory_size", "directory_offset"), number),
        **dict.fromkeys(("fill", "comment"), rng.randbytes(1)),
        **dict.fromkeys(("before", "between", "prefix"), rng.randbytes(rng.choice((1, 64, 4096)))),
        "align": rng.choice((1, 2, 64, 128, 4096)),
        "data": mutations.data(rng, entry.data),
    }
    if field == "many":
        entries[n:n] = [Forged(b"%x" % k, b"") for k in range(rng.choice((100, 15_000)))]
    elif field == "twice":
        entries.insert(n, replace(entry))
    elif field == "gone":
        del entries[n]
    elif field == "swapped":
        entries[n], entries[other] = entries[other], entries[n]
    elif hasattr(entry, field):
        setattr(entry, field, values[field])
    else:
        options[field] = values[field]


def specs_of(manifest: dict[str, Any]) -> dict[str, ArraySpec]:
    """The arrays that follow from a manifest's decoder, formats and layers."""
    decoder = Decoder(**{k: tuple(v) if isinstance(v, list) else v for k, v in manifest["decoder"].items()})
    ranks = [layer.get("rank") for layer in manifest["layers"]]
    if len(ranks) != decoder.n_layers:
        ranks = [None] * decoder.n_layers if decoder.n_layers <= 8 else ranks
        manifest["layers"] = [{**manifest["layers"][0], "rung": "dense", "rank": None} for _ in ranks]
    manifest["plans"] = []
    layout = manifest.get("ffn_layout", BY_NEURON)
    return array_specs(decoder, manifest["formats"], ranks, manifest["profiled_tokens"] > 0, layout)


def sensible_bytes(rng: Random, spec: ArraySpec) -> bytes:
    """Bytes that are small numbers in most formats: zeros, or one pattern again and again."""
    size = FORMATS[spec.format].itemsize
    pattern = rng.choice((bytes(size), rng.randbytes(size)))
    return (pattern * (spec.nbytes // size + 1))[: spec.nbytes]


def other_bytes(rng: Random, old: bytes) -> bytes:
    """As many bytes: noise, one pattern, all bits set, or the old ones with a piece changed."""
    kind, size = rng.randrange(5), len(old)
    if kind == 0:
        return rng.randbytes(size)
    if kind == 1:
        # NaN, infinity and the largest number, in the order of their bytes in float16, bfloat16 and float32.
        word = rng.choice((b"\x00\x7e", b"\x00\x7c", b"\x00\xfc", b"\xff\x7b", b"\xc0\x7f", b"\x80\x7f", b"\x7f\x7f"))
        return (rng.choice((word, b"\0\0" + word)) * size)[:size]
    if kind == 2:
        return rng.choice((b"\xff", b"\x80", b"\x7f", b"\x00")) * size
    at = rng.randrange(size)
    piece = rng.randbytes(rng.choice((1, 4, 64)))[: size - at]
    return old[:at] + piece + old[at + len(piece) :]
