"""Chunks of keys and values as files of one directory, which all engines of a host share.

A chunk lies at `DIRECTORY/DOMAIN/NAME[:2]/NAME`: a head, and its bytes. It appears whole or not at
all, and says itself what it is, so that a torn, changed or foreign file is a miss. Its name is a
digest of all that it depends on, the tokens before it among them, so that equal names mean equal
content. It is a cache: nothing is durable, and nothing fails because of what lies here.
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

NAME_BYTES = 32  # as many as the bulk port's digests have
NAME_DIGITS = 2 * NAME_BYTES
MAGIC = b"MRLKV\x00\x00\x01"
_HEADER = struct.Struct("<8sIIQdQ32s")  # before the sum of it and of the content, which is last
_SUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _SUM_BYTES
MAX_CHUNK_BYTES = 1 << 32  # of one chunk
MAX_CREATE_TRIES = 5  # to make a file in a directory that others remove
_scratch_numbers = itertools.count()


@dataclass(frozen=True)
class ChunkHeader:
    """What a chunk says of itself."""

    start_token: int  # its first token's place
    tokens: int
    compute_s: float  # that computing it takes, as measured when it was written
    session_tag: int  # tag of the one that it is kept for; 0: for all that begin so


@dataclass(frozen=True)
class StoredChunk:
    path: Path
    bytes: int
    last_used_s: (
        float  # when it was last used or written, of the wall clock; reserved if yet to come
    )
    header: ChunkHeader | None  # None: it cannot be read


class ChunkFiles:
    """The chunks below one directory. Safe to use by any number of threads and processes."""

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
        """Whether there is such a file; if so it counts as used, and as reserved until then."""
        try:
            os.utime(self.path(domain, name), (until_s, until_s))
        except OSError:
            return False
        return True

    def read(self, domain: str, name: str) -> tuple[ChunkHeader, ChunkBytes] | None:
        """A chunk as it was written, which nobody removes meanwhile; None: it is not there, or not
        what its name says, and is removed then.
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
        """Writes a chunk; the bytes that it takes. OSError leaves nothing behind."""
        return self._write_atomically(
            domain, name, (_pack_header(name, header, content), content.data)
        )

    def copy_from(self, path: Path, domain: str, name: str) -> int:
        """Writes a copy of a chunk of another directory, as it is; the bytes that it takes."""
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
        """Removes a chunk, unless somebody reads it; whether this did so."""
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
            path.parent.rmdir()  # once it is empty
        return True

    def scan(self, domain: str = "*") -> Iterator[StoredChunk]:
        """Chunks, and those in the making, whose writer may have been killed; of all domains, or of
        one.
        """
        for path in self.directory.glob(f"{domain}/??/*"):
            with suppress(OSError):
                stat = path.stat()
                yield StoredChunk(path, stat.st_size, stat.st_mtime, self.read_header(path))

    def read_header(self, path: Path) -> ChunkHeader | None:
        """What a file says of itself, unchecked: enough to choose what goes. None: nothing."""
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
    """A new file, whose directory others may take away while it is empty."""
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # Also FileExistsError, of a directory that is gone when pathlib looks whether it is one.
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
    """What a chunk of this name says of itself; None: it is not that chunk as it was written."""
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
    """The name of what one set of weights computes in one layout, 64 hexadecimal digits: chunks of
    different domains never serve each other. `weights` is the digest of a version's manifest,
    `policy` says what becomes of a cache when other weights come.
    """
    parts = (weights, adapter, layout, policy)
    told = b"".join(len(part).to_bytes(4, "little") + part.encode() for part in parts)
    return blake2b(told, digest_size=NAME_BYTES).hexdigest()


def is_domain(text: str) -> bool:
    """Whether a text from elsewhere can be the name of a domain, and so of a directory."""
    return len(text) == NAME_DIGITS and set(text) <= set("0123456789abcdef")


def compute_chunk_names(
    domain: str, tokens: IntArray, *, include_partial: bool = False
) -> list[str]:
    """The names of the chunks of `tokens` [n], first to last, each 64 hexadecimal digits; with
    `tail` of the last one too if it is not whole.
    """
    row = np.ascontiguousarray(tokens, np.int32).tobytes()
    size = CHUNK_TOKENS * np.dtype(np.int32).itemsize
    end = len(row) if include_partial else len(row) // size * size
    names, parent = [], bytes.fromhex(domain)
    for at in range(0, end, size):
        parent = blake2b(parent + row[at : at + size], digest_size=NAME_BYTES).digest()
        names.append(parent.hex())
    return names
