"""Manifest of a version: the position of each tensor's elements in chunks.

A manifest is stored under its digest. A sha256 inside it proves that it is complete.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from meshrl.common.api.weights import Manifest, TensorPiece
from meshrl.common.base.encoding.blob import pack, unpack
from meshrl.common.base.errors import BadMessage, CorruptData

FORMAT = 2
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 20, 64 << 20  # of a chunk
PAGE_BYTES = 4096  # of memory
# Bytes of an element by safetensors' dtype names; a reader of manifests needs no torch.
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
MIN_CHUNKS = 64  # of a version, unless chunks would be too small: hosts relay chunks


def choose_chunk_bytes(version_bytes: int) -> int:
    """Return the maximum chunk size of a version of this size, in bytes.

    It is a multiple of the page size, so that chunks can be adjacent in memory.
    """
    share = -(-version_bytes // MIN_CHUNKS // PAGE_BYTES) * PAGE_BYTES
    return min(max(share, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest for storage, sealed by its sha256."""
    plain = replace(manifest, format=FORMAT, sha256="")
    return pack(replace(plain, sha256=hashlib.sha256(pack(plain)).hexdigest()))


def decode_manifest(content: bytes | memoryview, where: str = "") -> Manifest:
    """Decode a stored manifest.

    Raises:
        BadMessage: The bytes are no manifest, have another format, or pieces do not cover tensors.
        CorruptData: The content does not match its sha256.
    """
    found = check_manifest(unpack(Manifest, content))
    plain = replace(found, sha256="")
    if hashlib.sha256(pack(plain)).hexdigest() != found.sha256:
        raise CorruptData("a manifest does not match its SHA-256", where=where)
    return found


def check_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest if it is valid.

    Raises:
        BadMessage: It has another format, or its pieces do not cover its tensors.
    """
    if any(piece.end < 0 for piece in manifest.tensors):  # format 1: its pieces have no ranges
        fix = "Finish the run with the MeshRL version that started it"
        raise BadMessage(f"the manifest has format 1; this version reads format {FORMAT}", fix=fix)
    if manifest.format > FORMAT:
        raise BadMessage(
            f"the manifest has the unknown format {manifest.format}", fix="Use a newer MeshRL"
        )
    check_pieces(manifest.tensors)
    return manifest


def merge_base(adapters: Manifest, base: Manifest) -> Manifest:
    """Return a version of adapters with the other tensors of its base."""
    names = {piece.name for piece in adapters.tensors}
    shared = [piece for piece in check_manifest(base).tensors if piece.name not in names]
    return replace(adapters, tensors=[*shared, *adapters.tensors])


def read_complete_manifest(read: Callable[[str], bytes], digest: str) -> Manifest:
    """Read and decode a version's manifest, merged with that of its base.

    Args:
        read: Returns the bytes stored under a digest.
    """
    own = decode_manifest(read(digest), digest)
    return (
        own
        if own.base is None
        else merge_base(own, decode_manifest(read(own.base.manifest), digest))
    )


def get_element_bytes(piece: TensorPiece) -> int:
    """Return the bytes of an element. BadMessage: unknown dtype."""
    if (size := ELEMENT_BYTES.get(piece.dtype)) is None:
        raise BadMessage(f"tensor {piece.name} of a manifest has the unknown type {piece.dtype}")
    return size


def group_by_tensor(tensors: Iterable[TensorPiece]) -> dict[str, list[TensorPiece]]:
    """Return the pieces of each tensor in element order."""
    return _group_pieces(tensors, lambda piece: piece.name, lambda piece: (piece.begin, piece.end))


def group_by_chunk(tensors: Iterable[TensorPiece]) -> dict[str, list[TensorPiece]]:
    """Return the pieces in each chunk, ordered by offset."""
    return _group_pieces(tensors, lambda piece: piece.chunk, lambda piece: (piece.offset, 0))


def _group_pieces(
    tensors: Iterable[TensorPiece],
    key: Callable[[TensorPiece], str],
    order: Callable[[TensorPiece], tuple[int, int]],
) -> dict[str, list[TensorPiece]]:
    found: dict[str, list[TensorPiece]] = {}
    for piece in tensors:
        found.setdefault(key(piece), []).append(piece)
    return {name: sorted(pieces, key=order) for name, pieces in found.items()}


def check_pieces(tensors: Iterable[TensorPiece]) -> None:
    """Raise BadMessage unless the pieces of each tensor cover every element exactly once."""
    for name, pieces in group_by_tensor(tensors).items():
        first, at = pieces[0], 0
        for piece in pieces:
            alike = (piece.dtype, piece.shape, piece.dim) == (first.dtype, first.shape, first.dim)
            if not alike or piece.begin != at or piece.end < piece.begin:
                raise BadMessage(f"the pieces of tensor {name} of a manifest are not contiguous")
            if (
                piece.size_bytes != (piece.end - piece.begin) * get_element_bytes(piece)
                or piece.offset < 0
            ):
                raise BadMessage(
                    f"a piece of tensor {name} of a manifest has {piece.size_bytes} bytes"
                )
            at = piece.end
        if at != math.prod(first.shape) or not 0 <= first.dim < max(1, len(first.shape)):
            raise BadMessage(f"tensor {name} of a manifest has {at} elements in {first.shape}")


@dataclass(frozen=True)
class RowRange:
    """Rows begin .. end of a tensor along dimension `dim`: a shard."""

    dim: int
    begin: int
    end: int


def select_pieces(
    tensors: Iterable[TensorPiece], selection: Mapping[str, RowRange | None]
) -> list[TensorPiece]:
    """Return the pieces that contain elements of the `selection`; None selects a whole tensor.

    Rows along another dimension than the one a tensor is cut along need all of its pieces.
    """
    found = []
    for piece in tensors:
        if piece.name not in selection:
            continue
        rows = selection[piece.name]
        if rows is not None and rows.dim == piece.dim and piece.shape:
            width = math.prod(piece.shape) // max(1, piece.shape[piece.dim])
            if piece.begin >= rows.end * width or rows.begin * width >= piece.end:
                continue
        found.append(piece)
    return found
