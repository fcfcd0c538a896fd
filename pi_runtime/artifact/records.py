"""ZIP records as an artifact has them: one spelling each, stored entries only.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 (records), 4.4 (fields) and 4.5.3 (ZIP64). Integers are little-endian. A
field whose value is `ZIP64_FROM` or more holds 0xFFFFFFFF, and the value stands in a ZIP64 extra record.
"""

import struct
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

ZIP64_FROM = 0xFFFFFFFF
MANY_FROM = 0xFFFF
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
_DATE = (1 << 5) | 1  # 1980-01-01, the first day ZIP knows
_MODE = 0o100644 << 16  # a plain file, readable by all
_UNIX = 3 << 8
_PLAIN, _ZIP64 = 20, 45  # version needed to extract
_PADDING_ID = 0xD935  # the alignment record of Android's zipalign
_ZIP64_ID = 0x0001

LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_END64 = Struct("<4sQHHIIQQQQ")
_LOCATOR = Struct("<4sIQI")
_EXTRA = Struct("<HH")
_PADDING = Struct("<HHH")
LOCAL_CRC_OFFSET = 14
TAIL_NBYTES = _END64.size + _LOCATOR.size + _END.size
"""Bytes of the longest end record, without its comment."""


class Entry(NamedTuple):
    """One stored entry: its local header is at `offset`, its `size` bytes of data are at `data`."""

    name: str
    size: int
    offset: int
    data: int
    crc: int = 0


def place(name: str, size: int, offset: int, align: int) -> Entry:
    """The entry whose local header starts at `offset` and whose data starts at the next multiple of `align` > 1."""
    start = offset + LOCAL.size + len(name) + (20 if size >= ZIP64_FROM else 0)
    if align > 1:
        start += _PADDING.size
        start += -start % align
    return Entry(name, size, offset, start)


def local_header(entry: Entry) -> bytes:
    """Bytes `offset … data`: header, name, ZIP64 record if needed, zero padding in a record of its own."""
    size, version, extra = entry.size, _PLAIN, b""
    if size >= ZIP64_FROM:
        version, extra = _ZIP64, _EXTRA.pack(_ZIP64_ID, 16) + size.to_bytes(8, "little") * 2
        size = _FULL
    extra_nbytes = entry.data - entry.offset - LOCAL.size - len(entry.name)
    if padding := extra_nbytes - len(extra):
        # The record's first field repeats the alignment in zipalign; readers skip it, so it is a constant here.
        extra += _PADDING.pack(_PADDING_ID, padding - _EXTRA.size, 64).ljust(padding, b"\0")
    head = LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DATE, entry.crc, size, size, len(entry.name), len(extra))
    return head + entry.name.encode() + extra


def central_record(entry: Entry) -> bytes:
    """The entry's record in the central directory."""
    size, offset, extra = entry.size, entry.offset, b""
    if size >= ZIP64_FROM:
        extra, size = size.to_bytes(8, "little") * 2, _FULL
    if offset >= ZIP64_FROM:
        extra, offset = extra + offset.to_bytes(8, "little"), _FULL
    if extra:
        extra = _EXTRA.pack(_ZIP64_ID, len(extra)) + extra
    version, name = _ZIP64 if extra else _PLAIN, entry.name.encode()
    head = _CENTRAL.pack(
        b"PK\1\2", _UNIX | version, version, 0, 0, 0, _DATE, entry.crc, size, size,
        len(name), len(extra), 0, 0, 0, _MODE, offset,
    )  # fmt: skip
    return head + name + extra


class EndRecord(NamedTuple):
    """The end record: it says where the central directory is."""

    entries: int
    size: int
    offset: int

    def pack(self, comment_nbytes: int) -> bytes:
        """The end record, preceded by its ZIP64 form where a value needs it, without the comment itself."""
        count, size, offset = self
        large = count >= MANY_FROM or size >= ZIP64_FROM or offset >= ZIP64_FROM
        before = b""
        if large:
            at = offset + size
            before = _END64.pack(b"PK\6\6", 44, _UNIX | _ZIP64, _ZIP64, 0, 0, count, count, size, offset)
            before += _LOCATOR.pack(b"PK\6\7", 0, at, 1)
        few = _MANY if count >= MANY_FROM else count
        size = _FULL if size >= ZIP64_FROM else size
        offset = _FULL if offset >= ZIP64_FROM else offset
        return before + _END.pack(b"PK\5\6", 0, 0, few, few, size, offset, comment_nbytes)


def parse_end(tail: bytes) -> EndRecord:
    """Parse the end record at the end of `tail`, which has no comment. Raises ValueError where there is none."""
    if len(tail) < _END.size:
        raise ValueError("no end record")
    magic, _, _, _, count, size, offset, _ = _END.unpack_from(tail, len(tail) - _END.size)
    if magic != b"PK\5\6":
        raise ValueError("no end record")
    if (count == _MANY or _FULL in (size, offset)) and len(tail) >= TAIL_NBYTES:
        magic, _, _, _, _, _, _, count, size, offset = _END64.unpack_from(tail, len(tail) - TAIL_NBYTES)
        if magic != b"PK\6\6":
            raise ValueError("no ZIP64 end record")
    return EndRecord(count, size, offset)


def parse_directory(directory: bytes) -> Iterator[Entry]:
    """Parse the entries of a central directory; `data` is not in it and 0. Raises ValueError where it is malformed.

    Only what locates an entry is read: the rest is compared byte for byte with what `central_record` makes of it.
    """
    at = 0
    try:
        while at < len(directory):
            record = _CENTRAL.unpack_from(directory, at)
            magic, crc, size, name_nbytes, extra_nbytes, offset = record[0], *record[7:9], *record[10:12], record[16]
            start, end = at + _CENTRAL.size, at + _CENTRAL.size + name_nbytes + extra_nbytes
            if magic != b"PK\1\2" or end > len(directory):
                raise ValueError("malformed record")
            extra = directory[start + name_nbytes + _EXTRA.size : end]
            if size == _FULL:
                size, extra = int.from_bytes(extra[:8], "little"), extra[16:]
            if offset == _FULL:
                offset = int.from_bytes(extra[:8], "little")
            yield Entry(directory[start : start + name_nbytes].decode("ascii"), size, offset, 0, crc)
            at = end
    except struct.error:
        raise ValueError("truncated record") from None
