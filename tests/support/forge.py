"""An artifact taken apart into entries and put together again, rightly or wrongly: a second writer, for attacks.

Shares no code with the first: plain struct, and the digest as documented. What an attacker would do: everything
consistent but the one lie.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pi_runtime.artifact.reader import Artifact
from pi_runtime.errors import ArtifactError

PREFIX = b"pi-artifact/1 sha256-4MiB "


@dataclass
class Forged:
    """One entry; what is None is computed when it is packed."""

    name: bytes
    data: bytes
    align: int = 1
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    """Size stated, if not the real one."""
    offset: int | None = None
    """Offset stated in the directory, if not the real one."""
    local_name: bytes | None = None
    fill: bytes = b"\0"
    comment: bytes = b""
    data_offset: int = field(default=0, init=False)


def take_apart(path: Path) -> list[Forged]:
    """The entries of a valid artifact."""
    data, entries, at = path.read_bytes(), [], 0
    while data[at : at + 4] == b"PK\3\4":
        size, name_nbytes, extra_nbytes = struct.unpack_from("<IHH", data, at + 22)
        start = at + 30 + name_nbytes + extra_nbytes
        align = (4096 if size >= 65536 else 64) if extra_nbytes else 1
        entries.append(Forged(data[at + 30 : at + 30 + name_nbytes], data[start : start + size], align))
        at = start + size
    return entries


def put_together(
    entries: list[Forged],
    *,
    before: bytes = b"",
    between: bytes = b"",
    count: int | None = None,
    directory_size: int | None = None,
    directory_offset: int | None = None,
    prefix: bytes = PREFIX,
) -> bytes:
    """A ZIP file with the digest of whatever it has become."""
    out, records = bytearray(before), bytearray()
    for e in entries:
        offset = len(out)
        crc = zlib.crc32(e.data) if e.crc is None else e.crc
        size = len(e.data) if e.size is None else e.size
        local_name = e.name if e.local_name is None else e.local_name
        extra = b""
        if e.align > 1:
            pad = -(offset + 30 + len(local_name) + 6) % e.align
            extra = struct.pack("<HHH", 0xD935, pad + 2, 64) + e.fill * pad
        common = struct.pack("<HHHHIII", e.flags, e.method, 0, 33, crc, size, size)
        out += b"PK\3\4" + struct.pack("<H", 20) + common + struct.pack("<HH", len(local_name), len(extra))
        out += local_name + extra
        e.data_offset = len(out)
        out += e.data
        stated = offset if e.offset is None else e.offset
        tail = struct.pack("<HHHHHII", len(e.name), 0, len(e.comment), 0, 0, 0o100644 << 16, stated)
        records += b"PK\1\2" + struct.pack("<HH", 3 << 8 | 20, 20) + common + tail + e.name + e.comment
    out += between
    start = len(out)
    out += records
    n = len(entries) if count is None else count
    size = len(records) if directory_size is None else directory_size
    at = start if directory_offset is None else directory_offset
    out += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, n, n, size, at, len(prefix) + 64) + prefix
    return seal(bytes(out))


def seal(covered: bytes) -> bytes:
    """Append the digest."""
    chunks = (covered[n : n + (4 << 20)] for n in range(0, len(covered), 4 << 20))
    return covered + hashlib.sha256(b"".join(hashlib.sha256(c).digest() for c in chunks)).hexdigest().encode()


def change_manifest(entries: list[Forged], change: Callable[[Any], object]) -> None:
    """Edit the manifest in place, in canonical spelling."""
    manifest = json.loads(entries[-1].data)
    change(manifest)
    entries[-1].data = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def refusal(path: Path, check: Callable[[Path], object] = Artifact.open) -> str:
    """The message with which `check` refuses the file, and nothing but an ArtifactError."""
    with pytest.raises(ArtifactError) as caught:
        check(path)
    assert caught.value.exit_code == 3
    assert str(path) in str(caught.value)
    return str(caught.value)


def refused(path: Path, data: bytes, check: Callable[[Path], object] = Artifact.open) -> str:
    path.write_bytes(data)
    return refusal(path, check)
