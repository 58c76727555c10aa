"""Identity of tensors: it depends on names, dtypes, shapes and bytes only.

It does not depend on chunks, nor on the division of rows among ranks. The identity of a tensor is
the root of a Merkle tree over its bytes in row-major order, as in RFC 6962. Leaves have
`LEAF_BYTES`; each pair of nodes has a parent. Each node has its BLAKE3, whose key separates leaves
from nodes. A process that has some rows hashes the largest complete subtrees in them, and sends the
bytes of incomplete leaves. Ranks merge their parts, and no other rows can be made to have the same
identity.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from meshrl.common.base.digest import compute_digest, compute_keyed_digest
from meshrl.common.base.errors import BadMessage
from meshrl.common.model.files.safetensors_writer import DTYPE_NAMES, DTYPES

# few bytes to send at the ends of rows; at 4 KiB a digest costs twice as much
LEAF_BYTES = 16 << 10
DIGEST_BYTES = 32
_LEAF_KEY, _NODE_KEY = b"leaf".ljust(32, b"\0"), b"node".ljust(32, b"\0")  # keys of the digests
# of a packed part: offset, size in bytes; the digest or the bytes follow
_PART_HEADER = struct.Struct("<QQ")


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor of which a process has rows."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor, also one on the `meta` device."""
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class MerkleTree:
    """Known parts of one tensor's bytes: digests of complete subtrees, and bytes of incomplete
    leaves.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[int, bytes]] = {}  # bytes and digest, by offset
        self._partial_leaves: dict[int, bytes] = {}  # bytes of incomplete leaves, by offset

    def add_rows(self, rows: torch.Tensor, first_row: int) -> None:
        """Add rows first_row .. first_row + len(rows), in host memory; a 0-dimensional tensor is
        one row.
        """
        rows = rows.detach().reshape(1) if rows.dim() == 0 else rows.detach()
        if rows.numel():
            content = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
            self.add_bytes(first_row * (len(content) // len(rows)), content)

    def add_bytes(self, offset: int, content: memoryview) -> None:
        """Add the tensor's bytes from `offset` on. BadMessage: some of them were added before."""
        at, end = offset, offset + len(content)
        while at < end:
            stop = min(end, (at // LEAF_BYTES + 1) * LEAF_BYTES)
            piece = content[at - offset : stop - offset]
            if len(piece) == LEAF_BYTES:
                self._add_node(at, LEAF_BYTES, _hash_leaf(piece))
            else:
                self._add_part(at, bytes(piece))
            at = stop

    def _add_part(self, offset: int, piece: bytes) -> None:
        """Join a part of a leaf with its neighbours; a complete leaf becomes a node."""
        leaf = offset // LEAF_BYTES * LEAF_BYTES
        there = [one for one in self._partial_leaves.items() if leaf <= one[0] < leaf + LEAF_BYTES]
        for begin, neighbour in there:
            if begin < offset + len(piece) and offset < begin + len(neighbour):
                raise BadMessage(f"a tensor has two pieces at byte {offset}")
            if begin + len(neighbour) == offset:
                offset, piece = begin, neighbour + piece
                del self._partial_leaves[begin]
            elif offset + len(piece) == begin:
                piece += neighbour
                del self._partial_leaves[begin]
        if len(piece) == LEAF_BYTES:
            self._add_node(offset, LEAF_BYTES, _hash_leaf(piece))
        elif leaf in self._nodes:
            raise BadMessage(f"a tensor has two pieces at byte {offset}")
        else:
            self._partial_leaves[offset] = piece

    def _add_node(self, offset: int, size: int, digest: bytes) -> None:
        """Add a subtree and merge it with its sibling while there is one."""
        if offset in self._nodes:
            raise BadMessage(f"a tensor has two pieces at byte {offset}")
        while (sibling := self._nodes.get(offset ^ size, (0, b"")))[0] == size:
            del self._nodes[offset ^ size]
            left, right = (sibling[1], digest) if offset & size else (digest, sibling[1])
            offset, size, digest = offset & ~size, 2 * size, _hash_node(left, right)
        self._nodes[offset] = size, digest

    def merge(self, packed: bytes) -> None:
        """Add the packed parts of another process. BadMessage: they are no parts of a tree."""
        view, at = memoryview(packed), 0
        while at < len(view):
            if len(view) - at < _PART_HEADER.size:
                raise BadMessage("the parts of a tensor's identity are truncated")
            offset, size = _PART_HEADER.unpack_from(view, at)
            at += _PART_HEADER.size
            length = size if size < LEAF_BYTES else DIGEST_BYTES
            content = view[at : at + length]
            at += length
            is_node = size >= LEAF_BYTES
            fits = offset % size == 0 and (size // LEAF_BYTES).bit_count() == 1 if is_node else size
            if not fits or (is_node and size % LEAF_BYTES) or len(content) != length:
                raise BadMessage(f"{size} bytes at {offset} are not part of a tensor's identity")
            if is_node:
                self._add_node(offset, size, bytes(content))
            else:
                self.add_bytes(offset, content)

    @property
    def packed_parts(self) -> bytes:
        """All parts, encoded for `merge` in another process."""
        parts = [(at, len(part), part) for at, part in self._partial_leaves.items()]
        parts += [(at, size, digest) for at, (size, digest) in self._nodes.items()]
        return b"".join(_PART_HEADER.pack(at, size) + part for at, size, part in sorted(parts))

    def compute_root(self, size_bytes: int) -> str:
        """Return the identity of a tensor of `size_bytes` bytes as 64 hexadecimal digits.

        Raises:
            BadMessage: Rows are missing.
        """
        nodes, last = dict(self._nodes), size_bytes // LEAF_BYTES * LEAF_BYTES
        if size_bytes % LEAF_BYTES:
            part = self._partial_leaves.get(last, b"")
            if len(part) != size_bytes - last:
                raise BadMessage(f"a tensor of {size_bytes} bytes lacks some rows")
            nodes[last] = LEAF_BYTES, _hash_leaf(part)
        if len(self._partial_leaves) != bool(size_bytes % LEAF_BYTES):
            raise BadMessage(f"a tensor of {size_bytes} bytes has split rows")
        peaks, at = list[bytes](), 0
        while at < size_bytes:
            length, digest = nodes.pop(at, (0, b""))
            if not length:
                raise BadMessage(f"a tensor of {size_bytes} bytes lacks the rows from {at} on")
            peaks.append(digest)
            at += length
        if nodes:
            raise BadMessage(f"a tensor of {size_bytes} bytes has too many rows")
        if not peaks:
            return _hash_leaf(b"").hex()
        found = peaks.pop()
        while peaks:
            found = _hash_node(peaks.pop(), found)
        return found.hex()


MerkleTrees = dict[str, MerkleTree]  # by tensor


def _hash_leaf(content: bytes | memoryview) -> bytes:
    return compute_keyed_digest(content, _LEAF_KEY)


def _hash_node(left: bytes, right: bytes) -> bytes:
    return compute_keyed_digest(left + right, _NODE_KEY)


def merge_trees(packed: Iterable[Mapping[str, bytes]]) -> MerkleTrees:
    """Merge the packed parts of several ranks, by tensor. BadMessage: parts overlap or are
    invalid.
    """
    found: MerkleTrees = {}
    for parts in packed:
        for name, part in parts.items():
            found.setdefault(name, MerkleTree()).merge(part)
    return found


def compute_identity(specs: Mapping[str, TensorSpec], trees: Mapping[str, MerkleTree]) -> str:
    """Return the identity of all tensors together as 64 hexadecimal digits.

    Args:
        trees: All rows of each tensor.
    Raises:
        BadMessage: Rows are missing.
    """
    tensors = [
        [name, one.dtype, list(one.shape), trees[name].compute_root(one.size_bytes)]
        for name, one in sorted(specs.items())
    ]
    return compute_digest(json.dumps(tensors, separators=(",", ":")).encode())
