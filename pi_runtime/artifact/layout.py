"""The layout of the file: a pure function of the arrays, the plain files and the manifest's length.

arrays, in the order of `array_specs`   tokenizer.json …, by name   zarr.json …   manifest.json
central directory   end record   comment with the digest

The Zarr v3 hierarchy around the arrays: one `zarr.json` a node, generated, so that any Zarr reader opens the file.

Source: Zarr core specification 3.1. Every array is one chunk under the codec `bytes`. Shapes are the stored ones;
the logical shape and the number format stand in the array's attributes.

The digest of a whole file is defined so that it can be computed in parallel:

digest(data) = sha256( sha256(data[0 : 4 MiB]) ‖ sha256(data[4 MiB : 8 MiB]) ‖ … )        the last piece may be shorter
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.guess_head import guess_layer_arrays
from pi_runtime.artifact.records import Entry, local_header, place
from pi_runtime.artifact.schema import FORMAT_NAME, FORMAT_VERSION, Manifest
from pi_runtime.artifact.sizes import ArraySpec, array_specs, with_scales

DOCUMENT = "zarr.json"


def chunk_name(array: str, spec: ArraySpec) -> str:
    """Name of the entry that holds an array's only chunk: `layers/0/ffn/first` → `layers/0/ffn/first/c/0/0`."""
    return f"{array}/c" + "/0" * len(spec.shape)


def documents(specs: Mapping[str, ArraySpec], root_attributes: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Every `zarr.json` as (entry name, content): the root's first, then those of the other nodes by name."""
    group = canonical_json(_group({}))
    arrays: dict[ArraySpec, bytes] = {}
    nodes = dict.fromkeys((parent for name in specs for parent in _parents(name)), group)
    for name, spec in specs.items():
        if spec not in arrays:
            arrays[spec] = canonical_json(_array(spec))
        nodes[name] = arrays[spec]
    root = (DOCUMENT, canonical_json(_group(root_attributes)))
    return [root, *((f"{name}/{DOCUMENT}", nodes[name]) for name in sorted(nodes))]


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _array(spec: ArraySpec) -> dict[str, Any]:
    fmt = FORMATS[spec.format]
    shape = fmt.stored_shape(spec.shape)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": fmt.stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0 if fmt.stored.kind == "f" else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"format": spec.format, "shape": spec.shape},
    }


MANIFEST = "manifest.json"
ALIGN, ALIGN_LARGE, LARGE_FROM = 64, 4096, 1 << 16
COMMENT = f"{FORMAT_NAME}/{FORMAT_VERSION} sha256-4MiB ".encode()
"""The ZIP's comment up to the 64 hexadecimal digits of the digest."""
DIGEST_NBYTES = 64


def place_array(name: str, spec: ArraySpec, offset: int) -> Entry:
    """The entry of an array whose local header starts at `offset`: data on a cache line, large data on a page."""
    nbytes = spec.nbytes
    return place(chunk_name(name, spec), nbytes, offset, ALIGN_LARGE if nbytes >= LARGE_FROM else ALIGN)


def place_arrays(specs: Mapping[str, ArraySpec]) -> tuple[dict[str, Entry], int]:
    """The entries of all arrays by array name, and the offset after them: nearly all of the file's size."""
    entries, offset = {}, 0
    for name, spec in specs.items():
        entries[name] = entry = place_array(name, spec, offset)
        offset = entry.data + entry.size
    return entries, offset


def place_files(sizes: Iterable[tuple[str, int]], offset: int) -> tuple[dict[str, Entry], int]:
    """The entries of plain files (name, size) from `offset`, one after the other, and the offset after them."""
    entries = {}
    for name, size in sizes:
        entries[name] = entry = place(name, size, offset, 1)
        offset = entry.data + entry.size
    return entries, offset


def manifest_specs(manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays an artifact with this manifest holds."""
    ranks = [layer.rank for layer in manifest.layers]
    specs = array_specs(manifest.decoder, manifest.formats, ranks, manifest.profiled_tokens > 0, manifest.layouts)
    if manifest.guess is not None:
        specs |= with_scales(manifest.guess.arrays(manifest.decoder))
    if manifest.guess_layers:
        specs |= with_scales(guess_layer_arrays(manifest.decoder, manifest.formats, manifest.ffn_layout))
    return specs


def stored_files(contents: Iterable[tuple[str, bytes]], offset: int) -> tuple[list[Entry], bytes]:
    """The entries of files (name, content) from `offset`, and their bytes, headers included."""
    entries, parts = [], []
    for name, content in contents:
        entry = place(name, len(content), offset, 1)._replace(crc=crc32(content))
        entries.append(entry)
        parts += [local_header(entry), content]
        offset = entry.data + entry.size
    return entries, b"".join(parts)


def trailer(specs: Mapping[str, ArraySpec], manifest: bytes, offset: int) -> tuple[list[Entry], bytes]:
    """The generated entries from `offset` to the central directory, and their bytes, headers included."""
    attributes = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "manifest": MANIFEST}
    return stored_files([*documents(specs, attributes), (MANIFEST, manifest)], offset)


CHUNK = 4 << 20


def combine(chunk_digests: Iterable[bytes]) -> str:
    """The digest of a file from the sha256 of its chunks, as 64 hexadecimal digits."""
    return hashlib.sha256(b"".join(chunk_digests)).hexdigest()


def workers() -> int:
    """Number of threads that hash; hashlib releases the GIL."""
    return min(4, os.cpu_count() or 1)


class GrowingDigest:
    """Digest of a file that is being written: threads read back and hash the chunks that will not change any more.

    Reading back costs little: the bytes were just written and lie in the page cache.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0
        self._pool = ThreadPoolExecutor(workers(), thread_name_prefix="pi-digest")
        self._chunks: list[Future[bytes]] = []

    def advance(self, final: int) -> None:
        """Hash the whole chunks of the bytes [0, final), which will not change any more."""
        while self._next + CHUNK <= final:
            self._submit(CHUNK)

    def finish(self, nbytes: int) -> str:
        """The digest of the first `nbytes` bytes. Raises OSError where they cannot be read."""
        self.advance(nbytes)
        if self._next < nbytes:
            self._submit(nbytes - self._next)
        return combine(chunk.result() for chunk in self._chunks)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, nbytes: int) -> None:
        self._chunks.append(self._pool.submit(_hash_piece, self._path, self._next, nbytes))
        self._next += nbytes


def _hash_piece(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(nbytes)
    if len(data) != nbytes:
        raise OSError(f"{path} became shorter while it was written")
    return hashlib.sha256(data).digest()
