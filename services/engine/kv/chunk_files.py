"""Chunks of keys and values as files of one directory that all engines of a host share.

A chunk is the file `DIRECTORY/DOMAIN/NAME[:2]/NAME`: a header and its bytes. It is installed
atomically and describes itself, so that a torn, changed or foreign file is a miss. Its name is a
digest of everything that it depends on, including the tokens before it, so that equal names mean
equal content. The directory is a cache: nothing in it is durable, and no content of it can make an
engine fail.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from meshrl.common.base.checksum import Checksum, Checksummer
from meshrl.common.generation.engine_contract import IntArray
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, ChunkBytes

NAME_BYTES = 32  # equal to the length of the bulk port's digests
NAME_DIGITS = 2 * NAME_BYTES
MAGIC = b"MRLKV\x00\x00\x01"
_HEADER = struct.Struct("<8sIIQdQ32s")  # the digest of header and content follows
_SUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _SUM_BYTES
MAX_CHUNK_BYTES = 1 << 32  # of one chunk
MAX_CREATE_TRIES = 5  # attempts to create a file in a directory that other processes remove
_scratch_numbers = itertools.count()


@dataclass(frozen=True)
class ChunkHeader:
    """Header of a chunk file."""

    start_token: int  # position of the chunk's first token
    tokens: int
    compute_s: float  # time to compute the chunk, measured when it was written
    session_tag: int  # owning session; 0: shared by all requests with this prefix


@dataclass(frozen=True)
class StoredChunk:
    path: Path
    bytes: int
    last_used_s: float  # wall-clock time of the last use or write; a future time is a reservation
    header: ChunkHeader | None  # None: unreadable


class ChunkFiles:
    """Chunks below one directory; safe to use by any number of threads and processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, domain: str, name: str) -> Path:
        return self.directory / domain / name[:2] / name

    def has(self, domain: str, name: str) -> bool:
        try:
            return self.path(domain, name).exists()
        except OSError:
            return False

    def reserve(self, domain: str, name: str, until_s: float) -> bool:
        """Return True if the file exists; mark it as used and reserve it until `until_s`."""
        try:
            os.utime(self.path(domain, name), (until_s, until_s))
        except OSError:
            return False
        return True

    def read(self, domain: str, name: str) -> tuple[ChunkHeader, ChunkBytes] | None:
        """Read a chunk and protect it from removal during the read.

        Return None if there is none or if its content does not match its name; such a file is
        removed.
        """
        path = self.path(domain, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            found = _read_chunk(descriptor, name)
        except OSError:
            found = None
        finally:
            os.close(descriptor)
        if found is None:
            with suppress(OSError):
                path.unlink()
        return found

    def write(self, domain: str, name: str, header: ChunkHeader, content: ChunkBytes) -> int:
        """Write a chunk and return its size in bytes. An OSError leaves no file behind."""
        return self._write_atomically(
            domain, name, (_pack_header(name, header, content), content.data)
        )

    def copy_from(self, path: Path, domain: str, name: str) -> int:
        """Copy a chunk file of another directory unchanged and return its size in bytes."""
        return self._write_atomically(domain, name, (path.read_bytes(),))

    def _write_atomically(
        self, domain: str, name: str, parts: tuple[bytes | memoryview, ...]
    ) -> int:
        target = self.path(domain, name)
        scratch = target.with_name(f".{name}.{os.getpid()}.{next(_scratch_numbers)}")
        descriptor = _create_scratch_file(scratch)
        size = 0
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                size += len(view)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.rename(scratch, target)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise
        finally:
            os.close(descriptor)
        return size

    def remove(self, path: Path) -> bool:
        """Remove a chunk unless a process reads it; return True if this call removed it."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except OSError:
            return False
        finally:
            os.close(descriptor)
        with suppress(OSError):
            path.parent.rmdir()  # succeeds once the directory is empty
        return True

    def scan(self, domain: str = "*") -> Iterator[StoredChunk]:
        """Yield chunks of all domains or of one, with unfinished files whose writer may have been
        killed.
        """
        for path in self.directory.glob(f"{domain}/??/*"):
            with suppress(OSError):
                stat = path.stat()
                yield StoredChunk(path, stat.st_size, stat.st_mtime, self.read_header(path))

    def read_header(self, path: Path) -> ChunkHeader | None:
        """Read a file's header without verification, which suffices for eviction; None if
        unreadable.
        """
        if path.name.startswith("."):
            return None
        try:
            with path.open("rb") as file:
                packed = file.read(_HEADER.size)
        except OSError:
            return None
        if len(packed) != _HEADER.size:
            return None
        magic, start, tokens, _, seconds, session, _ = _HEADER.unpack(packed)
        return ChunkHeader(start, tokens, seconds, session) if magic == MAGIC else None


def _create_scratch_file(scratch: Path, tries: int = MAX_CREATE_TRIES) -> int:
    """Create a scratch file, in a directory that other processes may remove while it is empty."""
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # pathlib also raises FileExistsError if the directory disappears during its check.
    except (FileNotFoundError, FileExistsError):
        if tries == 1:
            raise
        return _create_scratch_file(scratch, tries - 1)


def _pack_header(name: str, header: ChunkHeader, content: ChunkBytes) -> bytes:
    about = header.start_token, header.tokens, content.nbytes, header.compute_s, header.session_tag
    packed = _HEADER.pack(MAGIC, *about, bytes.fromhex(name))
    return packed + _checksum(packed, content)


def _checksum(header: bytes, content: ChunkBytes) -> Checksum:
    summed = Checksummer(header)
    summed.update(content.data)
    return summed.checksum


def verify_chunk(name: str, header: bytes, content: ChunkBytes) -> ChunkHeader | None:
    """Return the header of a chunk, or None if it is not the chunk `name` as it was written."""
    if len(header) != HEADER_BYTES or header[_HEADER.size :] != _checksum(
        header[: _HEADER.size], content
    ):
        return None
    magic, start, tokens, size, seconds, session, key = _HEADER.unpack(header[: _HEADER.size])
    if magic != MAGIC or key.hex() != name or size != content.nbytes:
        return None
    return ChunkHeader(start, tokens, seconds, session)


def _read_chunk(descriptor: int, name: str) -> tuple[ChunkHeader, ChunkBytes] | None:
    size = os.fstat(descriptor).st_size - HEADER_BYTES
    if not 0 < size <= MAX_CHUNK_BYTES:
        return None
    content = np.empty(size, np.uint8)
    packed = os.read(descriptor, HEADER_BYTES)
    view = content.data
    while view:
        read = os.readv(descriptor, [view])
        if not read:
            return None
        view = view[read:]
    head = verify_chunk(name, packed, content)
    return None if head is None else (head, content)


def compute_domain(weights: str, adapter: str, layout: str, policy: str) -> str:
    """Return the domain of one set of weights in one layout, 64 hexadecimal digits.

    Chunks of different domains never serve each other. `weights` is the digest of a version's
    manifest; `policy` states how a cache is treated when weights are updated.
    """
    parts = (weights, adapter, layout, policy)
    encoded_parts = b"".join(len(part).to_bytes(4, "little") + part.encode() for part in parts)
    return blake2b(encoded_parts, digest_size=NAME_BYTES).hexdigest()


def is_domain(text: str) -> bool:
    """Return True if a received text can be the name of a domain, and so of a directory."""
    return len(text) == NAME_DIGITS and set(text) <= set("0123456789abcdef")


def compute_chunk_names(
    domain: str, tokens: IntArray, *, include_partial: bool = False
) -> list[str]:
    """Return the names of the chunks of `tokens` [n] in order, each 64 hexadecimal digits.

    With `include_partial`, include the last chunk even if it is incomplete.
    """
    row = np.ascontiguousarray(tokens, np.int32).tobytes()
    size = CHUNK_TOKENS * np.dtype(np.int32).itemsize
    end = len(row) if include_partial else len(row) // size * size
    names, parent = [], bytes.fromhex(domain)
    for at in range(0, end, size):
        parent = blake2b(parent + row[at : at + size], digest_size=NAME_BYTES).digest()
        names.append(parent.hex())
    return names
