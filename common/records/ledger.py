"""Ledger of a rollout shard: append-only segments of CRC-framed records.

A record counts once `write(2)` has returned: a SIGKILL loses none, a host crash only what was not
yet synced. A torn tail ends a segment at its last complete record. An invalid record before a
complete one, or before the sealed length, is corruption instead. A segment belongs to one owner (a
shard's incarnation). A predecessor that was presumed dead may write after its successor sealed the
segment; those bytes are past the sealed length and are ignored.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from meshrl.common.base.errors import BadMessage, CorruptData, Refused, StorageFull
from meshrl.common.records import token_records

if TYPE_CHECKING:
    from meshrl.common.base.files.append_file import AppendFile
    from meshrl.common.mesh.process.host import Host

MAGIC = b"MRLEDGR"
FORMAT = 3  # version of the segments' format
FORMATS_WITHOUT_CRC = (1, 2)  # their header has no CRC


def make_header(version: int) -> bytes:
    """Return the header of a segment: magic word, format, and a CRC-32 of both."""
    prefix = MAGIC + bytes([version])
    return prefix + zlib.crc32(prefix).to_bytes(4, "little")


HEADER = make_header(FORMAT)
FRAME_HEADER = struct.Struct("<IIB")  # payload bytes, CRC-32 of kind and payload, kind
DEFLATED_FLAG = 0x80  # in a kind: the payload is compressed
MIN_DEFLATE_BYTES = 256  # a turn's text shrinks by half, shorter payloads hardly
_DEFLATE_WINDOW_BITS, _DEFLATE_MEMORY_LEVEL = (
    -12,
    5,
)  # zlib: 4 KiB, no header; its default clears 256 KiB for each record
MAX_SEGMENT_BYTES = 8 << 20  # a longer one is sealed, so that finished segments can be deleted
MAX_RECORD_BYTES = 64 << 20


class RecordKind(IntEnum):
    """Kind of a record, with the fields of its payload."""

    OPEN = 1  # [group, member, prompt row, version, prompt ids]
    TOKENS = 2  # TokenRows; see meshrl.common.records.token_records
    TOOL = 3  # [trajectory, name, input, value]
    TURN = 4  # [trajectory, text]: the model's turn as the environment saw it
    APPEND = 5  # [trajectory, ids]
    END = 6  # [trajectory, reason, reward or None, error, metrics]
    CLOSE = 7  # [group, fate]
    REWARDS = 8  # [group, [[member, reward], ...]]: before the ends of a group scored as a whole


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One record of the ledger."""

    kind: RecordKind
    payload: Any


def make_trajectory_id(group: int, member: int) -> int:
    """Return the number of a group's member among all trajectories of the job."""
    return group << token_records.MEMBER_BITS | member


def extract_group(trajectory: int) -> int:
    """Return the group of a trajectory; the inverse of `make_trajectory_id`."""
    return trajectory >> token_records.MEMBER_BITS


def extract_groups(record: LedgerRecord) -> set[int]:
    """Return the groups that a record mentions."""
    if record.kind in (RecordKind.OPEN, RecordKind.CLOSE, RecordKind.REWARDS):
        return {record.payload[0]}
    if record.kind is RecordKind.TOKENS:
        return set(np.unique(record.payload.trajectory_ids >> token_records.MEMBER_BITS).tolist())
    return {extract_group(record.payload[0])}


def encode_record(kind: RecordKind, payload: Any) -> bytes:
    """Return the bytes of one record in a segment."""
    body: bytes
    if kind is RecordKind.TOKENS:
        return _add_frame(kind, token_records.encode_token_rows(payload))
    body = msgpack.packb(payload, use_bin_type=True)
    if len(body) < MIN_DEFLATE_BYTES:
        return _add_frame(kind, body)
    deflate = zlib.compressobj(
        zlib.Z_BEST_SPEED, zlib.DEFLATED, _DEFLATE_WINDOW_BITS, _DEFLATE_MEMORY_LEVEL
    )
    return _add_frame(kind | DEFLATED_FLAG, deflate.compress(body) + deflate.flush())


def _add_frame(kind: int, body: bytes) -> bytes:
    return FRAME_HEADER.pack(len(body), zlib.crc32(body, kind), kind) + body


def iter_records_with_offsets(
    path: Path, sealed_bytes: int = -1
) -> Iterator[tuple[LedgerRecord, int]]:
    """Yield the complete records of a segment, each with the offset after it.

    Args:
        sealed_bytes: Length to read up to; -1: to the end of the file, whose tail may be torn.
    Raises:
        CorruptData: The segment is not what was written; raised after all records before that.
        BadMessage: The segment has another format.
    """
    content = path.read_bytes() if path.exists() else b""
    end = len(content) if sealed_bytes < 0 else min(sealed_bytes, len(content))
    offset = len(HEADER)
    if content[:offset] != HEADER:
        _check_format(path, content)
        # A crash may have cut a segment short before its first record.
        is_truncated = HEADER.startswith(content) or not any(content[: len(HEADER)])
        if sealed_bytes == 0 or (
            sealed_bytes < 0 and is_truncated and not _has_record_after(content, 0)
        ):
            return
        size_mismatch = f"it has {len(content)} bytes, but was sealed at {sealed_bytes}"
        raise CorruptData("its header is corrupt" if content else size_mismatch, where=str(path))
    while offset + FRAME_HEADER.size <= end:
        length, crc, kind = FRAME_HEADER.unpack_from(content, offset)
        start, stop = offset + FRAME_HEADER.size, offset + FRAME_HEADER.size + length
        if length > MAX_RECORD_BYTES or stop > end or zlib.crc32(content[start:stop], kind) != crc:
            break
        body = content[start:stop]
        if kind == RecordKind.TOKENS:
            yield LedgerRecord(RecordKind.TOKENS, token_records.decode_token_rows(body)), stop
        else:
            if kind & DEFLATED_FLAG:
                body = zlib.decompressobj(_DEFLATE_WINDOW_BITS).decompress(body, MAX_RECORD_BYTES)
            yield (
                LedgerRecord(RecordKind(kind & ~DEFLATED_FLAG), msgpack.unpackb(body, raw=False)),
                stop,
            )
        offset = stop
    if sealed_bytes > len(content):
        raise CorruptData(
            f"it has {len(content)} bytes, but was sealed at {sealed_bytes}", where=str(path)
        )
    if offset < end and (sealed_bytes >= 0 or _has_record_after(content, offset + 1)):
        raise CorruptData(f"its record at byte {offset} is inconsistent", where=str(path))


def _check_format(path: Path, content: bytes) -> None:
    """Raise BadMessage for a valid header of another format: corruption does not fix a CRC."""
    found = content[: len(HEADER)]
    version = found[len(MAGIC)] if len(found) == len(HEADER) else FORMAT
    if found == make_header(version) != HEADER or (
        version in FORMATS_WITHOUT_CRC
        and found.startswith(MAGIC)
        and found[len(MAGIC) + 1 :] != HEADER[len(MAGIC) + 1 :]
    ):
        raise BadMessage(
            f"the segment has format {version}; this version reads format {FORMAT}",
            where=str(path),
            fix="Finish the run with the MeshRL version that started it",
        )


def _has_record_after(content: bytes, offset: int) -> bool:
    """Return True if a complete record begins anywhere from `offset` on.

    Offsets with an impossible length or kind are skipped at once, so a segment takes milliseconds.
    """
    raw = np.frombuffer(content, np.uint8)[offset:]
    places = len(raw) - FRAME_HEADER.size
    if places <= 0:
        return False
    lengths = sum(raw[i : places + i].astype(np.int64) << 8 * i for i in range(4))
    kinds = raw[FRAME_HEADER.size - 1 :][:places] & ~np.uint8(DEFLATED_FLAG)
    fits = lengths <= np.minimum(MAX_RECORD_BYTES, places - np.arange(places))
    possible = fits & (lengths > 1) & (kinds >= min(RecordKind)) & (kinds <= max(RecordKind))
    for place in np.flatnonzero(possible).tolist():
        length, crc, kind = FRAME_HEADER.unpack_from(content, offset + place)
        start = offset + place + FRAME_HEADER.size
        if zlib.crc32(content[start : start + length], kind) == crc:
            return True
    return False


class Ledger:
    """Segments of one owner in `directory`; an append is complete or raises StorageFull."""

    def __init__(self, host: Host, directory: Path, owner: str) -> None:
        self._host = host
        self.directory = directory
        self._owner = owner
        self._segment_number = 0
        self._file: AppendFile | None = None
        self.segment_path = Path()  # the open segment
        self._groups_by_segment: dict[Path, set[int]] = {}  # groups that still need each segment
        self._deferred_records: list[tuple[RecordKind, Any]] = []
        self.bytes_written = 0
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def next_segment_path(self) -> Path:
        """Segment that `open_next_segment` opens; it is recorded before its first byte is
        written.
        """
        return self.directory / f"{self._owner}-{self._segment_number + 1:05d}.ledger"

    @property
    def is_segment_full(self) -> bool:
        """True if the open segment is full, so that the next record begins another."""
        return self._file is not None and self._file.tell() >= MAX_SEGMENT_BYTES

    def open_next_segment(self) -> tuple[Path, int] | None:
        """Open the next segment; return the one sealed by it and its length."""
        self.flush()
        path = self.next_segment_path
        opened = self._host.open_append(path)
        if not opened.tell():  # at once: a segment without a header counts as corrupt
            opened.write(HEADER)
        sealed = None
        if self._file is not None:
            sealed = (self.segment_path, self._file.tell())
            self._file.sync()
            self._file.close()
        self._segment_number += 1
        self._file, self.segment_path = opened, path
        self._groups_by_segment[path] = set()
        return sealed

    def adopt_segment(self, path: Path, groups: set[int]) -> None:
        """Take over a predecessor's segment, which `groups` still need."""
        self._groups_by_segment[path] = set(groups)

    def defer(self, kind: RecordKind, payload: Any, group: int) -> None:
        """Queue a record to be written before the next append.

        It must be derivable from records already written: its loss costs work only.
        """
        self._deferred_records.append((kind, payload))
        self._groups_by_segment[self.segment_path].add(group)

    def append(self, records: Iterable[tuple[RecordKind, Any]], groups: Iterable[int] = ()) -> None:
        """Write records with one system call.

        Args:
            groups: Groups that the records belong to.
        Raises:
            StorageFull: The disk is full; nothing was written.
        """
        deferred = self._deferred_records
        block = self.encode_block(records, groups)
        try:
            self.write_block(block)
        except StorageFull:
            self._deferred_records = deferred
            raise

    def encode_block(
        self, records: Iterable[tuple[RecordKind, Any]], groups: Iterable[int] = ()
    ) -> bytes:
        """Return the bytes for `write_block`, with all deferred records, for the open segment."""
        if self._file is None:
            raise Refused("no segment of the ledger is open", where=str(self.directory))
        deferred, self._deferred_records = self._deferred_records, []
        self._groups_by_segment[self.segment_path].update(groups)
        return b"".join(encode_record(kind, payload) for kind, payload in (*deferred, *records))

    def write_block(self, block: bytes) -> None:
        """Write a block with one system call, which may block: use one thread, one call at a time.

        Raises:
            StorageFull: The disk is full; nothing was written.
        """
        if self._file is None or not block:
            return
        self._file.write(block)
        self.bytes_written += len(block)

    def forget_group(self, group: int) -> list[Path]:
        """Drop a finished group; return the segments that no group needs any more, to be
        deleted.
        """
        for live in self._groups_by_segment.values():
            live.discard(group)
        freed = [
            path
            for path, live in self._groups_by_segment.items()
            if not live and path != self.segment_path
        ]
        for path in freed:
            del self._groups_by_segment[path]
        return freed

    def flush(self) -> None:
        """Write the deferred records."""
        if self._deferred_records:
            self.append([])

    def sync(self) -> None:
        """Sync everything written to the disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Write the deferred records, sync, and close the open segment."""
        if self._file is not None:
            with suppress(StorageFull):  # deferred records can be derived again
                self.flush()
            self._file.sync()
            self._file.close()
            self._file = None


def list_segments(directory: Path) -> list[Path]:
    """Return a shard's segments, by owner in order of start: owners are named by fencing tokens."""
    return sorted(directory.glob("*.ledger"), key=lambda path: path.name)


def iter_records(directory: Path) -> Iterator[LedgerRecord]:
    """Yield every complete record of a shard's segments, up to the corruption in a corrupt one."""
    for path in list_segments(directory):
        with suppress(CorruptData):
            for record, _ in iter_records_with_offsets(path):
                yield record
