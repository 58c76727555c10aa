"""Tensors that lie in a segment of memory or in a file while who computes with them sleeps.

A head names them, with a checksum of each; the mark, a checksum of the head, is written last. So
what a death has left half written is never taken for whole, and what has changed since is found.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.checksum import BYTES, Checksum, Checksummer, checksum_of
from meshrl.common.base.errors import Damaged, Refused, StorageFull
from meshrl.common.base.files.append_file import FULL
from meshrl.common.base.files.durable import flush, sync

Octets = NDArray[np.uint8]
MAGIC = b"MeshKept"
MARK = slice(16, 32)
HEAD_BYTES = 32  # magic, length of the description, mark
ALIGN = 64  # a cache line, and the widest vector
AHEAD_BYTES = 16 << 20  # of a file that are read before they are asked for
PIECE_BYTES = 1 << 20  # copied and summed at a time, while a core's cache holds it


class Content(Protocol):
    """Named runs of bytes, as whoever sleeps has them."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each."""

    def read(self, name: str, start: int, end: int) -> Octets:
        """Bytes [start, end) of one; a view where that can be."""


class Resumable(Content, Protocol):
    """Such bytes that can be put back."""

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Puts bytes back where they were."""


class Medium(Protocol):
    """Where they lie meanwhile."""

    @property
    def where(self) -> str:
        """For people."""

    @property
    def size(self) -> int:
        """Bytes that it has room for, or holds."""

    def put(self, offset: int, piece: Octets) -> None:
        """Writes bytes."""

    def get(self, offset: int, count: int) -> Octets:
        """Bytes that were written; fewer where it ends."""

    def flush(self) -> None:
        """Returns once what was put is as lasting as the medium is."""

    def close(self) -> None:
        """Lets go of it; what lies there stays."""


@dataclass(frozen=True)
class Head:
    """What a medium holds, as its head says."""

    about: dict[str, Any]  # in the words of who sleeps
    sizes: Mapping[str, int]
    offsets: Mapping[str, int]
    checksums: Mapping[str, Checksum]


def _described(about: Mapping[str, Any], sizes: Mapping[str, int]) -> bytes:
    return json.dumps({"about": about, "sizes": list(sizes.items())}).encode()


def _offsets(description: int, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each begins, and where the last ends."""
    found, at = {}, HEAD_BYTES + description + BYTES * len(sizes)
    for name, size in sizes.items():
        at += -at % ALIGN
        found[name] = at
        at += size
    return found, at


def room_for(about: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Bytes that a medium must have room for."""
    return _offsets(len(_described(about, sizes)), sizes)[1]


def keep(medium: Medium, about: Mapping[str, Any], content: Content) -> None:
    """Writes all of `content` to the medium, and the mark when the rest is there. `about` is JSON.
    StorageFull, and nothing that could be read, where there is no room.
    """
    description = _described(about, content.sizes)
    offsets, _ = _offsets(len(description), content.sizes)
    checksums = b""
    for name in content.sizes:
        summed = Checksummer()
        for start, end in _pieces(content.sizes[name]):
            piece = content.read(name, start, end)
            summed.update(piece.data)
            medium.put(offsets[name] + start, piece)
        checksums += summed.checksum
    length = len(description).to_bytes(8, "little")
    medium.put(0, _octets(MAGIC + length + bytes(BYTES) + description + checksums))
    medium.flush()
    medium.put(MARK.start, _octets(checksum_of(description + checksums)))
    medium.flush()


def head_of(medium: Medium) -> Head:
    """What lies there; Damaged when it is not whole."""
    first = medium.get(0, HEAD_BYTES).tobytes()
    length = int.from_bytes(first[8:16], "little")
    if first[:8] != MAGIC or len(first) < HEAD_BYTES or length > medium.size:
        raise Damaged("nothing whole is kept there", where=medium.where)
    description = medium.get(HEAD_BYTES, length).tobytes()
    try:
        told = json.loads(description)
        sizes = {str(name): int(size) for name, size in told["sizes"]}
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged("its head is garbled", where=medium.where) from error
    table = medium.get(HEAD_BYTES + length, BYTES * len(sizes)).tobytes()
    if checksum_of(description + table) != first[MARK]:
        raise Damaged("it was not written to its end", where=medium.where)
    offsets, end = _offsets(length, sizes)
    if end > medium.size:
        raise Damaged(f"it has {medium.size} of {end} bytes", where=medium.where)
    cut = [Checksum(table[i : i + BYTES]) for i in range(0, len(table), BYTES)]
    return Head(told["about"], sizes, offsets, dict(zip(sizes, cut, strict=True)))


def take(medium: Medium, head: Head, content: Resumable) -> None:
    """Writes back to `content` what it has names for. Damaged when bytes are not those that were
    kept: what was written by then is to be thrown away.
    """
    for name, size in content.sizes.items():
        if head.sizes.get(name) != size:
            raise Damaged(f"{name} of {size} bytes is not there", where=medium.where)
        summed = Checksummer()
        for start, end in _pieces(size):
            piece = medium.get(head.offsets[name] + start, end - start)
            summed.update(piece.data)
            content.write(name, start, piece)
        if summed.checksum != head.checksums[name]:
            raise Damaged(f"{name} is not what its checksum says", where=medium.where)


class Lying:
    """What lies on one medium, as the content of another."""

    def __init__(self, medium: Medium, head: Head) -> None:
        self._medium, self._head, self.sizes = medium, head, head.sizes

    def read(self, name: str, start: int, end: int) -> Octets:
        """Bytes of one, as they lie there."""
        return self._medium.get(self._head.offsets[name] + start, end - start)


def moved(source: Medium, target: Medium) -> Head:
    """Copies what lies on one medium to another; Damaged, and nothing whole there, when it is not
    what was kept.
    """
    head = head_of(source)
    keep(target, head.about, Lying(source, head))
    copy = head_of(target)
    if copy.checksums != head.checksums:
        target.put(MARK.start, _octets(bytes(BYTES)))
        raise Damaged("it is not what its checksums say", where=source.where)
    return copy


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PIECE_BYTES):
        yield start, min(size, start + PIECE_BYTES)


def _octets(content: bytes) -> Octets:
    return np.frombuffer(content, np.uint8)


def segment_name(process: str) -> str:
    """What the segment of a process is called."""
    return process.replace("/", "-")


class Mapped:
    """A segment of memory that another process owns, opened by its path."""

    def __init__(self, path: str, process: str = "") -> None:
        """`process`: whose tensors it is for. Refused, and nothing is written, when it is for
        another's, or something else than a segment.
        """
        self.where = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}")
            if process and found != f"/memfd:{segment_name(process)} (deleted)":
                raise Refused(f"{found} is no segment for {process}", where=path)
            self.size = os.fstat(descriptor).st_size
            mapped = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapped, np.uint8)

    def put(self, offset: int, piece: Octets) -> None:
        """Copies bytes there; they are there for whoever maps it."""
        self._bytes[offset : offset + len(piece)] = piece

    def get(self, offset: int, count: int) -> Octets:
        """A view of bytes."""
        return self._bytes[offset : offset + count]

    def flush(self) -> None:
        """Memory is as lasting as it gets."""

    def close(self) -> None:
        """Unmaps it, once nobody has a view."""
        self._bytes = np.zeros(0, np.uint8)


class File:
    """A file; one that is being written has another name until it is `finished`."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """FileNotFoundError without one, unless it is to be `fresh`: then StorageFull where none
        can be made.
        """
        self._path = path
        self._at = path.with_name(f"{path.name}.new") if fresh else path
        if fresh:
            self._at.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if fresh else os.O_RDONLY
        try:
            self._descriptor = os.open(self._at, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._full(error) from error
        self._scratch = np.zeros(PIECE_BYTES, np.uint8)
        self._asked = 0  # up to where the kernel has been told that it will be read

    @property
    def where(self) -> str:
        """Its path."""
        return str(self._at)

    @property
    def size(self) -> int:
        """Its length."""
        return os.fstat(self._descriptor).st_size

    def put(self, offset: int, piece: Octets) -> None:
        """Writes bytes; StorageFull where there is no room for them."""
        view = piece.data
        try:
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._full(error) from error

    def get(self, offset: int, count: int) -> Octets:
        """Bytes, which the next call overwrites if they are a piece at most."""
        if offset + count > self._asked - AHEAD_BYTES // 2:  # the disk reads while this is digested
            self._asked = offset + count + AHEAD_BYTES
            os.posix_fadvise(self._descriptor, offset, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        into = self._scratch[:count] if count <= PIECE_BYTES else np.zeros(count, np.uint8)
        done = 0
        while done < len(into):
            read = os.preadv(self._descriptor, [into.data[done:]], offset + done)
            if not read:
                break
            done += read
        return into[:done]

    def flush(self) -> None:
        """Returns once its bytes are on the disk."""
        try:
            flush(self._descriptor)
        except OSError as error:
            raise self._full(error) from error

    def finished(self) -> None:
        """Gives it its name, for good."""
        self._at.replace(self._path)
        self._at = self._path
        sync(self._path.parent)

    def close(self) -> None:
        """Closes it; one without its name is gone."""
        os.close(self._descriptor)
        if self._at != self._path:
            self._at.unlink(missing_ok=True)

    def _full(self, error: OSError) -> Exception:
        if error.errno not in FULL:
            return error
        return StorageFull(
            "no room for what a process keeps while it sleeps",
            where=str(self._path),
            fix="free space on this disk; it computes on meanwhile",
        )
