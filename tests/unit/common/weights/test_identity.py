"""Identities and manifests of tensors, and versions staged by rows."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.api.weights import Manifest, TensorPiece, VersionRef
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.errors import BadMessage, CorruptData
from meshrl.common.model.files.safetensors_writer import DTYPES
from meshrl.common.weights.layout.chunk_builder import (
    ChunkBuilder,
    StagedChunk,
    StagingOptions,
    TensorRows,
    as_complete_rows,
    plan_copies,
)
from meshrl.common.weights.layout.identity import (
    LEAF_BYTES,
    MerkleTree,
    TensorSpec,
    compute_identity,
    merge_trees,
)
from meshrl.common.weights.layout.manifest import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    RowRange,
    choose_chunk_bytes,
    decode_manifest,
    encode_manifest,
    group_by_chunk,
    select_pieces,
)
from meshrl.common.weights.staging import StagedVersion, build_version

SHAPES = [(7, 3000), (9, 5), (40_000,), (), (3, 4, 5000), (0, 8), (4, LEAF_BYTES // 4)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
A, B = "a" * 32, "b" * 32
PIECES = [
    TensorPiece("w", "BF16", [8, 4], A, 0, 32, 0, 0, 16),
    TensorPiece("w", "BF16", [8, 4], B, 0, 32, 0, 16, 32),
    TensorPiece("v", "F32", [3], B, 32, 12, 0, 0, 3),
]
MANIFEST = Manifest("job", 1, 7, PIECES, base=VersionRef(1, 0, A), image="c" * 32)
TENSORS = {
    "embedding": torch.randn(37, 40, generator=torch.Generator().manual_seed(1)),
    "layers.0.qkv": torch.randn(7, 129, generator=torch.Generator().manual_seed(2)),
    "layers.0.adapters.q_proj.a": torch.randn(2, 40, generator=torch.Generator().manual_seed(3)),
    "layers.0.experts.gate_up": torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(4)),
    "norm": torch.randn(40, generator=torch.Generator().manual_seed(5)),
}


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def build_tree(rows: torch.Tensor, first: int = 0) -> MerkleTree:
    tree = MerkleTree()
    tree.add_rows(rows, first)
    return tree


def compute_root(tensor: torch.Tensor) -> str:
    return build_tree(tensor).compute_root(tensor.nbytes)


def compute_root_recursively(content: bytes) -> bytes:
    """Compute the root of the RFC 6962 tree by its recursive definition."""
    leaves = [content[at : at + LEAF_BYTES] for at in range(0, len(content), LEAF_BYTES)] or [b""]

    def hash_leaves(part: list[bytes]) -> bytes:
        if len(part) == 1:
            return blake3(part[0], key=b"leaf".ljust(32, b"\0")).digest()
        half = 1 << ((len(part) - 1).bit_length() - 1)
        return blake3(
            hash_leaves(part[:half]) + hash_leaves(part[half:]), key=b"node".ljust(32, b"\0")
        ).digest()

    return hash_leaves(leaves)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 40_000), max_size=4), seed=st.integers(0, 9))
def test_any_partition_by_rows_has_the_root_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, cuts: list[int], seed: int
) -> None:
    tensor = random_tensor(shape, dtype)
    if not shape:
        return
    ends = [0, *sorted(cut % (shape[0] + 1) for cut in cuts), shape[0]]
    parts = [{"w": build_tree(tensor[a:b], a).packed_parts} for a, b in pairwise(ends)]
    random.Random(seed).shuffle(parts)
    assert merge_trees(parts)["w"].compute_root(tensor.nbytes) == compute_root(tensor)


@pytest.mark.parametrize("leaves", [0, 1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("extra_bytes", [0, 1, LEAF_BYTES - 1])
def test_root_is_that_of_rfc_6962(leaves: int, extra_bytes: int) -> None:
    content = random.Random(leaves).randbytes(leaves * LEAF_BYTES + extra_bytes)
    tree = MerkleTree()
    tree.add_bytes(0, memoryview(content))
    assert tree.compute_root(len(content)) == compute_root_recursively(content).hex()


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_root_depends_on_each_bit_and_its_position(shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, torch.float32)
    changed = tensor.clone()
    changed.view(-1).view(torch.int32)[-1] ^= 1
    roots = {compute_root(tensor), compute_root(changed)}
    if len(shape) and shape[0] > 1:
        roots.add(compute_root(tensor.flip(0)))
        assert len(roots) == 3
    assert len(roots) >= 2


def test_missing_and_duplicate_rows_are_rejected() -> None:
    tensor = random_tensor((9, 5000), torch.float32)
    size = tensor.nbytes
    lower, upper = build_tree(tensor[:4]).packed_parts, build_tree(tensor[5:], 5).packed_parts
    with pytest.raises(BadMessage):
        merge_trees([{"w": lower}, {"w": upper}])["w"].compute_root(size)
    with pytest.raises(BadMessage):
        merge_trees([{"w": build_tree(tensor).packed_parts}, {"w": upper}])["w"].compute_root(size)
    with pytest.raises(BadMessage):
        build_tree(tensor).compute_root(size - 4)
    with pytest.raises(BadMessage):
        build_tree(tensor).compute_root(size + 4)


@pytest.mark.parametrize(
    "packed",
    [
        b"x",
        (1).to_bytes(8, "little") + LEAF_BYTES.to_bytes(8, "little") + bytes(32),
        bytes(8) + (3 * LEAF_BYTES).to_bytes(8, "little") + bytes(32),
        bytes(8) + (LEAF_BYTES + 1).to_bytes(8, "little") + bytes(32),
        bytes(8) + (7).to_bytes(8, "little") + b"short",
        bytes(16),
    ],
)
def test_malformed_tree_parts_are_rejected(packed: bytes) -> None:
    with pytest.raises(BadMessage):
        MerkleTree().merge(packed)


def test_identity_depends_on_name_dtype_and_shape() -> None:
    tree = build_tree(tensor := random_tensor((4, 6), torch.float32))
    identities = {
        compute_identity({name: TensorSpec(dtype, shape)}, {name: tree})
        for name, dtype, shape in [
            ("a", "F32", (4, 6)),
            ("b", "F32", (4, 6)),
            ("a", "I32", (4, 6)),
            ("a", "F32", (2, 12)),
        ]
    }
    assert len(identities) == 4
    assert TensorSpec.from_tensor(tensor) == TensorSpec("F32", (4, 6))


def test_corrupt_manifest_is_rejected() -> None:
    decoded = decode_manifest(encode_manifest(MANIFEST))
    assert (decoded.tensors, decoded.base, decoded.image) == (PIECES, MANIFEST.base, MANIFEST.image)
    content = bytearray(encode_manifest(MANIFEST))
    content[content.index(A.encode())] ^= 1
    with pytest.raises(CorruptData, match="SHA-256"):
        decode_manifest(bytes(content), where="there")


def test_manifest_of_an_earlier_format_is_rejected() -> None:
    old_pieces = [
        TensorPiece("w", "F32", [4, 2], A, 0, 16),
        TensorPiece("w", "F32", [4, 2], B, 0, 16),
    ]
    with pytest.raises(BadMessage, match="format 1") as error:
        decode_manifest(pack(Manifest("job", 0, 1, old_pieces)))
    assert "the MeshRL version that started it" in error.value.fix


@pytest.mark.parametrize(
    "invalid_pieces",
    [
        [PIECES[0]],
        [PIECES[0], PIECES[0], PIECES[1]],
        [TensorPiece("w", "BF16", [8, 4], A, 0, 60, 0, 0, 32)],
        [TensorPiece("w", "NONE", [8, 4], A, 0, 64, 0, 0, 32)],
        [TensorPiece("w", "BF16", [8, 4], A, 0, 64, 2, 0, 32)],
    ],
)
def test_pieces_that_do_not_cover_their_tensor_are_rejected(
    invalid_pieces: list[TensorPiece],
) -> None:
    with pytest.raises(BadMessage):
        decode_manifest(encode_manifest(Manifest("job", 1, 7, invalid_pieces)))


def test_row_selection_returns_the_pieces_with_these_rows() -> None:
    def select_chunks(**selection: RowRange | None) -> list[str]:
        return list(group_by_chunk(select_pieces(PIECES, selection)))

    assert select_chunks(w=RowRange(0, 0, 4)) == [A]
    assert select_chunks(w=RowRange(0, 3, 5)) == [A, B]
    assert select_chunks(w=RowRange(0, 4, 8)) == [B]
    assert select_chunks(w=RowRange(1, 0, 1)) == [A, B]
    assert select_chunks(w=None) == [A, B]
    assert select_chunks(v=None) == [B]
    assert select_chunks() == []


def test_chunk_size_grows_with_the_version() -> None:
    assert choose_chunk_bytes(1000) == MIN_CHUNK_BYTES
    assert choose_chunk_bytes(1 << 30) == 16 << 20
    assert choose_chunk_bytes(140 << 30) == MAX_CHUNK_BYTES


def select_rank_rows(
    rank: int, ranks: int, names: list[str], part: int, parts: int
) -> dict[str, TensorRows]:
    """Return the rows that FSDP gives a rank."""
    rank_rows = {}
    for name in names:
        tensor = TENSORS[name]
        rows_per_rank = -(-len(tensor) // ranks)
        low, high = (
            min(rank * rows_per_rank, len(tensor)),
            min((rank + 1) * rows_per_rank, len(tensor)),
        )
        rank_rows[name] = TensorRows(tuple(tensor.shape), low, tensor[low:high]).split(part, parts)
    return rank_rows


def stage(
    options: StagingOptions, ranks: int, max_copy_bytes: int
) -> tuple[StagedVersion, dict[str, bytes]]:
    """Stage a version on `ranks` ranks that copy `most` bytes at a time; return it and its
    chunks.
    """
    results, chunks = [], {}

    def store_chunks(staged_chunks: list[StagedChunk]) -> list[TensorPiece]:
        pieces = []
        for chunk in staged_chunks:
            digest = compute_digest(chunk.content)
            chunks[digest] = bytes(chunk.content)
            assert len(chunk.content) <= options.max_chunk_bytes
            pieces += [replace(piece, chunk=digest) for piece in chunk.pieces]
        return pieces

    for rank in range(ranks):
        builder, pieces = ChunkBuilder(options), list[TensorPiece]()
        for names, part, parts in plan_copies(TENSORS, max_copy_bytes):
            pieces += store_chunks(
                builder.add_rows(select_rank_rows(rank, ranks, names, part, parts))
            )
        pieces += store_chunks(builder.take_partial_chunk())
        results.append(builder.finish(pieces))
    return build_version("job", 0, 1, TENSORS, results), chunks


def assemble_tensors(version: StagedVersion, chunks: dict[str, bytes]) -> dict[str, torch.Tensor]:
    """Assemble the tensors from their pieces."""
    tensors = {}
    for name, tensor in TENSORS.items():
        pieces = [piece for piece in version.manifest.tensors if piece.name == name]
        raw = b"".join(chunks[p.chunk][p.offset : p.offset + p.size_bytes] for p in pieces)
        dtype = DTYPES[pieces[0].dtype]
        tensors[name] = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tensor.shape)
    return tensors


@settings(max_examples=12)
@given(
    ranks=st.integers(1, 5),
    chunk_bytes=st.integers(16, 20_000),
    max_copy_bytes=st.integers(16, 10_000),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
)
def test_identities_do_not_depend_on_ranks_or_chunks(
    ranks: int, chunk_bytes: int, max_copy_bytes: int, dtype: str
) -> None:
    single_rank, _ = stage(StagingOptions(dtype, 1 << 20), 1, 1 << 20)
    version, chunks = stage(StagingOptions(dtype, chunk_bytes), ranks, max_copy_bytes)
    assert (version.published_identity, version.masters_identity) == (
        single_rank.published_identity,
        single_rank.masters_identity,
    )
    repeated, _ = stage(StagingOptions(dtype, chunk_bytes), ranks, max_copy_bytes)
    assert repeated.digest == version.digest
    for name, tensor in assemble_tensors(version, chunks).items():
        assert torch.equal(tensor, TENSORS[name].to(DTYPES[dtype])), name


def test_masters_identity_differs_where_the_published_image_is_the_same() -> None:
    reference, _ = stage(StagingOptions("BF16", 1 << 20), 1, 1 << 20)
    norm = TENSORS["norm"].clone()
    TENSORS["norm"].view(torch.int32)[3] ^= 1  # below the precision of bfloat16
    other, _ = stage(StagingOptions("BF16", 1 << 20), 2, 1 << 20)
    TENSORS["norm"].copy_(norm)
    assert (
        reference.published_identity == other.published_identity
        and reference.masters_identity != other.masters_identity
    )
    plain, _ = stage(StagingOptions("F32", 1 << 20), 2, 1 << 20)
    assert plain.masters_identity == reference.masters_identity, (
        "independent of the published dtype"
    )


def test_adapters_share_no_chunk_with_base_weights() -> None:
    version, _ = stage(StagingOptions("F32", 1 << 20), 2, 1 << 20)
    adapters = {p.chunk for p in version.manifest.tensors if "adapters" in p.name}
    assert len(adapters) == 2
    assert not adapters & {p.chunk for p in version.manifest.tensors if "adapters" not in p.name}


def test_rows_are_copied_when_they_are_added() -> None:
    tensor = torch.ones(4, 4)
    builder = ChunkBuilder(StagingOptions("F32", 1 << 20))
    builder.add_rows(as_complete_rows({"w": tensor}))
    tensor.zero_()
    (chunk,) = builder.take_partial_chunk()
    assert bytes(chunk.content) == torch.ones(4, 4).numpy().tobytes()
