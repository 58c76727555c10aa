"""What is staged by rows is the same version, whoever has which rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.api.weights import Tensor
from meshrl.common.base.digest import digest_of
from meshrl.common.model.files.safetensors_file import DTYPES
from meshrl.common.weights.layout.laying import Chunk, How, Laying, Part, slices, whole
from meshrl.common.weights.staging import StagedVersion, assembled

TENSORS = {
    "embedding": torch.randn(37, 40, generator=torch.Generator().manual_seed(1)),
    "layers.0.qkv": torch.randn(7, 129, generator=torch.Generator().manual_seed(2)),
    "layers.0.adapters.q_proj.a": torch.randn(2, 40, generator=torch.Generator().manual_seed(3)),
    "layers.0.experts.gate_up": torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(4)),
    "norm": torch.randn(40, generator=torch.Generator().manual_seed(5)),
}


def rows_of(rank: int, ranks: int, names: list[str], part: int, parts: int) -> dict[str, Part]:
    """Those that FSDP gives a rank."""
    found = {}
    for name in names:
        tensor = TENSORS[name]
        each = -(-len(tensor) // ranks)
        low, high = min(rank * each, len(tensor)), min((rank + 1) * each, len(tensor))
        found[name] = Part(tuple(tensor.shape), low, tensor[low:high]).slice(part, parts)
    return found


def staged(how: How, ranks: int, most: int) -> tuple[StagedVersion, dict[str, bytes]]:
    """A version of so many ranks that copy `most` bytes at a time, and its chunks."""
    laid, chunks = [], {}

    def written(found: list[Chunk]) -> list[Tensor]:
        pieces = []
        for chunk in found:
            digest = digest_of(chunk.content)
            chunks[digest] = bytes(chunk.content)
            assert len(chunk.content) <= how.chunk_bytes
            pieces += [replace(piece, chunk=digest) for piece in chunk.pieces]
        return pieces

    for rank in range(ranks):
        laying, pieces = Laying(how), list[Tensor]()
        for names, part, parts in slices(TENSORS, most):
            pieces += written(laying.add(rows_of(rank, ranks, names, part, parts)))
        pieces += written(laying.rest())
        laid.append(laying.laid(pieces))
    return assembled("job", 0, 1, TENSORS, laid), chunks


def read(version: StagedVersion, chunks: dict[str, bytes]) -> dict[str, torch.Tensor]:
    """The tensors, put together of their pieces."""
    found = {}
    for name, tensor in TENSORS.items():
        pieces = [piece for piece in version.manifest.tensors if piece.name == name]
        raw = b"".join(chunks[p.chunk][p.offset : p.offset + p.size] for p in pieces)
        dtype = DTYPES[pieces[0].dtype]
        found[name] = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tensor.shape)
    return found


@pytest.mark.rotating(2)
@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 5),
    chunk_bytes=st.integers(16, 20_000),
    most=st.integers(16, 10_000),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
)
def test_any_ranks_and_chunks_publish_the_same_image_of_the_same_masters(
    ranks: int, chunk_bytes: int, most: int, dtype: str
) -> None:
    alone, _ = staged(How(dtype, 1 << 20), 1, 1 << 20)
    version, chunks = staged(How(dtype, chunk_bytes), ranks, most)
    assert (version.image, version.masters) == (alone.image, alone.masters)
    again, _ = staged(How(dtype, chunk_bytes), ranks, most)
    assert again.digest == version.digest
    for name, tensor in read(version, chunks).items():
        assert torch.equal(tensor, TENSORS[name].to(DTYPES[dtype])), name


def test_masters_are_told_from_each_other_where_the_image_is_the_same() -> None:
    one, _ = staged(How("BF16", 1 << 20), 1, 1 << 20)
    norm = TENSORS["norm"].clone()
    TENSORS["norm"].view(torch.int32)[3] ^= 1  # below what bfloat16 has
    other, _ = staged(How("BF16", 1 << 20), 2, 1 << 20)
    TENSORS["norm"].copy_(norm)
    assert one.image == other.image and one.masters != other.masters
    plain, _ = staged(How("F32", 1 << 20), 2, 1 << 20)
    assert plain.masters == one.masters, "whatever type is published"


def test_adapters_share_no_chunk_with_what_they_are_added_to() -> None:
    version, _ = staged(How("F32", 1 << 20), 2, 1 << 20)
    adapters = {p.chunk for p in version.manifest.tensors if "adapters" in p.name}
    assert len(adapters) == 2
    assert not adapters & {p.chunk for p in version.manifest.tensors if "adapters" not in p.name}


def test_rows_are_copied_when_they_are_laid() -> None:
    tensor = torch.ones(4, 4)
    laying = Laying(How("F32", 1 << 20))
    laying.add(whole({"w": tensor}))
    tensor.zero_()
    (chunk,) = laying.rest()
    assert bytes(chunk.content) == torch.ones(4, 4).numpy().tobytes()
