"""Writing an artifact: arrays stream through, one block in memory; the file appears whole or not at all.

with ArtifactWriter("artifact.pi") as writer:
    for name, spec in array_specs(decoder, formats, ranks, profiled).items():
        writer.add_array(name, spec, blocks_of(name))
    writer.add_file("tokenizer.json", data)
    manifest = writer.finish(manifest)
"""

import errno
import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self
from zlib import crc32

import numpy as np

from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.artifact.features import used
from pi_runtime.artifact.formats import FORMATS, Array, Format
from pi_runtime.artifact.layout import (
    COMMENT,
    DIGEST_NBYTES,
    GrowingDigest,
    manifest_specs,
    place_array,
    stored_files,
    trailer,
)
from pi_runtime.artifact.manifest_file import read_manifest
from pi_runtime.artifact.quantisation import RoundingError, dequantise, quantise
from pi_runtime.artifact.records import LOCAL_CRC_OFFSET, EndRecord, Entry, central_record, local_header
from pi_runtime.artifact.schema import ArrayEntry, FileEntry, Manifest
from pi_runtime.artifact.sizes import ArraySpec, scales_name
from pi_runtime.errors import NO_ROOM, DoesNotFitError, InputError, UsageError, write_error
from pi_runtime.files import Replacement

_PIECE = 4 << 20  # bytes encoded, hashed and written at a time
_ELSEWHERE = "name an output on another disk"


class ArtifactWriter:
    """Writes one artifact to `path`; an older file there stays until `finish` has put the new one in its place.

    `expected_nbytes`, where given (see `layout.place_arrays`), is compared with the free disk space before anything is
    written. Raises DoesNotFitError where the disk is too small, UsageError where `path` cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, expected_nbytes: int | None = None) -> None:
        self._path, self._expected = Path(path), expected_nbytes
        self._offset = 0
        self._specs: dict[str, ArraySpec] = {}
        self._entries: list[Entry] = []
        self._arrays: dict[str, ArrayEntry] = {}
        self._files: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack, self._output():
            if self._path.exists() and not self._path.is_file():
                raise UsageError(f"{self._path}: exists and is not a file", remedy="name a file to write")
            if self._expected is not None:
                self._check_space(self._expected)
            self._out = stack.enter_context(Replacement(self._path))
            self._digest = GrowingDigest(self._out.path)
            stack.callback(self._digest.close)
            self._hashing = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="pi-sha256"))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def add_array(
        self, name: str, spec: ArraySpec, blocks: Iterable[Array], *, powers: bool = False
    ) -> RoundingError | None:
        """Write one array from its logical values, given as consecutive blocks of rows (axis 0).

        Values are float32 for weight formats and integers for u32 and u64; finite and representable. Arrays come in the
        order of `array_specs`. Block formats write their scales, which follow from the values, along with the array.
        Returns the error of quantising, None for other formats. For `powers` see `quantise`.
        """
        if spec.scales is None:
            self._add_stored(name, spec, (FORMATS[spec.format].encode(piece) for piece in _pieces(blocks, spec)))
            return None
        quantising = _Quantising(FORMATS[spec.format], spec.scales, powers)
        self._add_stored(name, spec, map(quantising.integers, _pieces(blocks, spec)))
        self._add_stored(scales_name(name), spec.scales, [quantising.scales])
        return quantising.error

    def add_stored(self, name: str, spec: ArraySpec, stored: Array, scales: Array | None = None) -> None:
        """Write one array that is in its stored form, with its scales: what `Format.encode` or `quantise` returned."""
        assert stored.shape == FORMATS[spec.format].stored_shape(spec.shape), f"{name}: {stored.shape} of {spec}"
        assert (scales is None) == (spec.scales is None), name
        self._add_stored(name, spec, [stored])
        if spec.scales is not None and scales is not None:
            self._add_stored(scales_name(name), spec.scales, [scales])

    def add_stored_blocks(self, name: str, spec: ArraySpec, blocks: Iterable[tuple[Array, Array | None]]) -> None:
        """`add_stored` from consecutive blocks of rows."""
        kept: list[Array] = []

        def integers() -> Iterator[Array]:
            for stored, scales in blocks:
                assert (scales is None) == (spec.scales is None), name
                if scales is not None:
                    kept.append(scales)
                yield stored

        self._add_stored(name, spec, integers())
        if spec.scales is not None:
            self._add_stored(scales_name(name), spec.scales, kept)

    def _add_stored(self, name: str, spec: ArraySpec, pieces: Iterable[Array]) -> None:
        assert name not in self._arrays, name
        entry = place_array(name, spec, self._offset)
        self._write(local_header(entry))
        sha, crc, rows = hashlib.sha256(), 0, 0
        for piece in pieces:
            stored = piece.reshape(-1).view(np.uint8).data
            hashing = self._hashing.submit(sha.update, stored)
            self._write(stored)
            crc, rows = crc32(stored, crc), rows + len(piece)
            hashing.result()  # before the next piece: its block may reuse this one's memory
        assert rows == spec.shape[0], f"{name}: {rows} rows given for {spec.shape}"
        self._entries.append(self._patch(entry._replace(crc=crc)))
        self._specs[name] = spec
        self._arrays[name] = ArrayEntry(
            format=spec.format, shape=spec.shape, offset=entry.data, nbytes=entry.size, sha256=sha.hexdigest()
        )

    def add_file(self, name: str, data: bytes) -> None:
        """Add one plain file, kept in memory until the end. `tokenizer.json` must be among them."""
        assert name not in self._files, name
        self._files[name] = bytes(data)

    def finish(self, manifest: Manifest) -> Manifest:
        """Write what remains and publish the file. `manifest` has no arrays and files yet; returns the whole one."""
        files = self._write_files()
        manifest = replace(manifest, features=used(manifest), arrays=self._arrays, files=files)
        assert list(manifest_specs(manifest).items()) == list(self._specs.items()), "not the arrays of this manifest"
        text = self._spell(manifest)
        manifest = read_manifest(text, str(self._path))
        entries, generated = trailer(self._specs, text, self._offset)
        self._entries += entries
        self._write(generated)
        records = b"".join(map(central_record, self._entries))
        end = EndRecord(len(self._entries), len(records), self._offset)
        self._write(records + end.pack(len(COMMENT) + DIGEST_NBYTES) + COMMENT)
        with self._output():
            self._out.write(self._digest.finish(self._offset).encode())
            self._out.publish()
        return manifest

    def _spell(self, manifest: Manifest) -> bytes:
        try:
            return canonical_json(manifest)
        except ValueError as error:
            remedy = "a recipe may hold neither NaN nor infinity, and paths must be Unicode"
            raise InputError(f"{self._path}: the manifest has no JSON form", found=error, remedy=remedy) from None

    def _write_files(self) -> dict[str, FileEntry]:
        entries, data = stored_files(sorted(self._files.items()), self._offset)
        self._write(data)
        self._entries += entries
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in self._files.items()}
        return {e.name: FileEntry(offset=e.data, nbytes=e.size, sha256=digests[e.name]) for e in entries}

    def _write(self, data: bytes | memoryview) -> None:
        with self._output():
            self._out.write(data)
        self._offset += len(data)

    def _patch(self, entry: Entry) -> Entry:
        """Put the checksum, known only now, into the local header; from here on the bytes so far are final."""
        with self._output():
            self._out.file.seek(entry.offset + LOCAL_CRC_OFFSET)
            self._out.write(entry.crc.to_bytes(4, "little"))
            self._out.file.seek(self._offset)
        self._digest.advance(self._offset)
        return entry

    @contextmanager
    def _output(self) -> Iterator[None]:
        """Turn errors of the operating system while writing into errors in the user's terms."""
        try:
            yield
        except FileNotFoundError:
            raise UsageError(
                f"{self._path}: no folder {self._folder()}", remedy="create it, or name another output"
            ) from None
        except OSError as error:
            if error.errno == errno.EFBIG:
                what = f"{self._path}: {NO_ROOM[error.errno]}"
                raise DoesNotFitError(what, found=f"stopped at {self._offset:,} bytes", remedy=_ELSEWHERE) from None
            if error.errno in NO_ROOM:
                needed = max(self._expected or 0, self._offset + 1)
                raise self._does_not_fit(NO_ROOM[error.errno], needed) from None
            raise write_error(self._path, error, _ELSEWHERE) from None

    def _check_space(self, needed: int) -> None:
        if needed > shutil.disk_usage(self._folder()).free:
            raise self._does_not_fit("not enough room on the disk", needed)

    def _does_not_fit(self, what: str, needed: int) -> DoesNotFitError:
        there = shutil.disk_usage(self._folder()).free + self._offset
        older = "; the file there now stays until the new one is complete" if self._path.exists() else ""
        return DoesNotFitError(
            f"{self._path}: {what}",
            expected=f"at least {needed:,} bytes for the artifact",
            found=f"{there:,} bytes in {self._folder()}{older}",
            remedy=f"make room there; {_ELSEWHERE}",
        )

    def _folder(self) -> Path:
        return Path(os.path.realpath(self._path)).parent


class _Quantising:
    """Quantises one array piece by piece. Integers are handed on, scales kept (a sixteenth of q8, an eighth of q4)."""

    def __init__(self, fmt: Format, scales: ArraySpec, powers: bool) -> None:
        self._fmt, self._rows, self._powers = fmt, 0, powers
        # One array from the start: small ones in between would keep the heap from shrinking after each piece.
        scale = FORMATS[scales.format]
        self.scales = np.zeros(scale.stored_shape(scales.shape), scale.stored)
        self.error = RoundingError()

    def integers(self, piece: Array) -> Array:
        stored, scales = quantise(self._fmt, piece, powers=self._powers)
        self.scales[self._rows : self._rows + len(piece)] = scales
        self._rows += len(piece)
        self.error += RoundingError.between(piece, dequantise(self._fmt, stored, scales, piece.shape[-1]))
        return stored


def _pieces(blocks: Iterable[Array], spec: ArraySpec) -> Iterator[Array]:
    """Split the blocks into pieces of a few MiB."""
    row = max(spec.nbytes // spec.shape[0], 4 * math.prod(spec.shape[1:]))  # stored, and given as float32
    rows = max(1, _PIECE // row)
    for block in blocks:
        assert block.shape[1:] == spec.shape[1:], f"a block {block.shape} of an array {spec.shape}"
        for start in range(0, len(block), rows):
            yield block[start : start + rows]
