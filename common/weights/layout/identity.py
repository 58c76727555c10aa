"""The identity of tensors, which depends on their names, types, shapes and bytes alone: not on
chunks, nor on how many ranks hold which rows.

The identity of a tensor is the root of a Merkle tree over its bytes in row-major order, as in
RFC 6962: leaves of `LEAF_BYTES`, and a node for each pair of them, each with its BLAKE3, whose key
tells leaves from nodes. A process that holds some rows hashes
the largest whole subtrees in them, and hands on the bytes of leaves that it has only a part of. So
ranks put their parts together, and nobody can make other rows of the same identity.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from meshrl.common.base.digest import digest_of, keyed_digest
from meshrl.common.base.errors import BadMessage
from meshrl.common.model.files.safetensors_file import DTYPES, NAMES

LEAF_BYTES = 16 << 10  # little to send at the ends of rows; at 4 KiB a digest costs twice as much
DIGEST_BYTES = 32
_LEAF, _NODE = b"leaf".ljust(32, b"\0"), b"node".ljust(32, b"\0")  # keys of the digests
_HEAD = struct.Struct("<QQ")  # of a packed part: offset, bytes; then its digest, or these bytes


@dataclass(frozen=True)
class Described:
    """A whole tensor, of which a process holds rows."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        """Describe a tensor, also one on the `meta` device."""
        return cls(NAMES[tensor.dtype], tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        """Bytes of all its rows."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Tree:
    """What a process knows of the bytes of one tensor: digests of whole subtrees, and the bytes of
    leaves that are not whole.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[int, bytes]] = {}  # bytes and digest, by offset
        self._parts: dict[int, bytes] = {}  # of leaves that are not whole, by offset

    def add_rows(self, rows: torch.Tensor, first: int) -> None:
        """Add rows first .. first + len(rows), which are in the host's memory; a tensor without
        dimensions is one row.
        """
        rows = rows.detach().reshape(1) if rows.dim() == 0 else rows.detach()
        if rows.numel():
            content = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
            self.add(first * (len(content) // len(rows)), content)

    def add(self, offset: int, content: memoryview) -> None:
        """Add the tensor's bytes from `offset` on. BadMessage for bytes that are there already."""
        at, end = offset, offset + len(content)
        while at < end:
            stop = min(end, (at // LEAF_BYTES + 1) * LEAF_BYTES)
            piece = content[at - offset : stop - offset]
            if len(piece) == LEAF_BYTES:
                self._add_node(at, LEAF_BYTES, _leaf(piece))
            else:
                self._add_part(at, bytes(piece))
            at = stop

    def _add_part(self, at: int, piece: bytes) -> None:
        """Join a part of a leaf with its neighbours; one that is whole becomes a node."""
        leaf = at // LEAF_BYTES * LEAF_BYTES
        there = [one for one in self._parts.items() if leaf <= one[0] < leaf + LEAF_BYTES]
        for begin, held in there:
            if begin < at + len(piece) and at < begin + len(held):
                raise BadMessage(f"bytes {at} of a tensor are there twice")
            if begin + len(held) == at:
                at, piece = begin, held + piece
                del self._parts[begin]
            elif at + len(piece) == begin:
                piece += held
                del self._parts[begin]
        if len(piece) == LEAF_BYTES:
            self._add_node(at, LEAF_BYTES, _leaf(piece))
        elif leaf in self._nodes:
            raise BadMessage(f"bytes {at} of a tensor are there twice")
        else:
            self._parts[at] = piece

    def _add_node(self, at: int, size: int, digest: bytes) -> None:
        """Add a subtree, and join it with its sibling as long as there is one."""
        if at in self._nodes:
            raise BadMessage(f"bytes {at} of a tensor are there twice")
        while (sibling := self._nodes.get(at ^ size, (0, b"")))[0] == size:
            del self._nodes[at ^ size]
            left, right = (sibling[1], digest) if at & size else (digest, sibling[1])
            at, size, digest = at & ~size, 2 * size, _node(left, right)
        self._nodes[at] = size, digest

    def merge(self, packed: bytes) -> None:
        """Add what another process has packed. BadMessage for what is no part of a tree."""
        view, at = memoryview(packed), 0
        while at < len(view):
            if len(view) - at < _HEAD.size:
                raise BadMessage("parts of a tensor's identity are cut short")
            offset, size = _HEAD.unpack_from(view, at)
            at += _HEAD.size
            length = size if size < LEAF_BYTES else DIGEST_BYTES
            content = view[at : at + length]
            at += length
            whole = size >= LEAF_BYTES
            fits = offset % size == 0 and (size // LEAF_BYTES).bit_count() == 1 if whole else size
            if not fits or (whole and size % LEAF_BYTES) or len(content) != length:
                raise BadMessage(f"{size} bytes at {offset} are no part of a tensor's identity")
            if whole:
                self._add_node(offset, size, bytes(content))
            else:
                self.add(offset, content)

    @property
    def packed(self) -> bytes:
        """All parts, for `merge` in another process."""
        parts = [(at, len(part), part) for at, part in self._parts.items()]
        parts += [(at, size, digest) for at, (size, digest) in self._nodes.items()]
        return b"".join(_HEAD.pack(at, size) + part for at, size, part in sorted(parts))

    def root(self, size: int) -> str:
        """Return the identity of a tensor of `size` bytes as 64 hexadecimal digits. BadMessage
        when rows are missing.
        """
        nodes, last = dict(self._nodes), size // LEAF_BYTES * LEAF_BYTES
        if size % LEAF_BYTES:
            part = self._parts.get(last, b"")
            if len(part) != size - last:
                raise BadMessage(f"a tensor of {size} bytes has not all of its rows")
            nodes[last] = LEAF_BYTES, _leaf(part)
        if len(self._parts) != bool(size % LEAF_BYTES):
            raise BadMessage(f"a tensor of {size} bytes has rows in pieces")
        peaks, at = list[bytes](), 0
        while at < size:
            length, digest = nodes.pop(at, (0, b""))
            if not length:
                raise BadMessage(f"a tensor of {size} bytes lacks those from {at} on")
            peaks.append(digest)
            at += length
        if nodes:
            raise BadMessage(f"a tensor of {size} bytes has more of them")
        if not peaks:
            return _leaf(b"").hex()
        found = peaks.pop()
        while peaks:
            found = _node(peaks.pop(), found)
        return found.hex()


Trees = dict[str, Tree]  # by tensor


def _leaf(content: bytes | memoryview) -> bytes:
    return keyed_digest(content, _LEAF)


def _node(left: bytes, right: bytes) -> bytes:
    return keyed_digest(left + right, _NODE)


def merged(packed: Iterable[Mapping[str, bytes]]) -> Trees:
    """Put together what ranks have packed of their rows, by tensor. BadMessage."""
    found: Trees = {}
    for parts in packed:
        for name, part in parts.items():
            found.setdefault(name, Tree()).merge(part)
    return found


def identity(described: Mapping[str, Described], trees: Mapping[str, Tree]) -> str:
    """Return the identity of all tensors together as 64 hexadecimal digits; `trees` has all rows of
    each. BadMessage when some are missing.
    """
    told = [
        [name, one.dtype, list(one.shape), trees[name].root(one.size_bytes)]
        for name, one in sorted(described.items())
    ]
    return digest_of(json.dumps(told, separators=(",", ":")).encode())
