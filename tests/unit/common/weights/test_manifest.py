"""A manifest says where each element lies, and is read only as it was written."""

from __future__ import annotations

import pytest

from meshrl.common.api.weights import Base, Manifest, Tensor
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.errors import BadMessage, Damaged
from meshrl.common.weights.layout.manifest import (
    LEAST_BYTES,
    MOST_BYTES,
    Rows,
    by_chunk,
    chunk_bytes,
    overlapping,
    packed,
    unpacked,
)

A, B = "a" * 32, "b" * 32
PIECES = [
    Tensor("w", "BF16", [8, 4], A, 0, 32, 0, 0, 16),
    Tensor("w", "BF16", [8, 4], B, 0, 32, 0, 16, 32),
    Tensor("v", "F32", [3], B, 32, 12, 0, 0, 3),
]
MANIFEST = Manifest("job", 1, 7, PIECES, base=Base(1, 0, A), image="c" * 32)


def test_one_is_read_as_it_was_written() -> None:
    found = unpacked(packed(MANIFEST))
    assert (found.tensors, found.base, found.image) == (PIECES, MANIFEST.base, MANIFEST.image)


def test_a_changed_one_is_damaged() -> None:
    content = bytearray(packed(MANIFEST))
    content[content.index(A.encode())] ^= 1
    with pytest.raises(Damaged, match="sha256"):
        unpacked(bytes(content), where="there")


def test_one_of_an_earlier_format_is_refused() -> None:
    old = [Tensor("w", "F32", [4, 2], A, 0, 16), Tensor("w", "F32", [4, 2], B, 0, 16)]
    with pytest.raises(BadMessage, match="format 1") as refused:
        unpacked(pack(Manifest("job", 0, 1, old)))
    assert "the version of the software that began it" in refused.value.fix


@pytest.mark.parametrize(
    "wrong",
    [
        [PIECES[0]],
        [PIECES[0], PIECES[0], PIECES[1]],
        [Tensor("w", "BF16", [8, 4], A, 0, 60, 0, 0, 32)],
        [Tensor("w", "NONE", [8, 4], A, 0, 64, 0, 0, 32)],
        [Tensor("w", "BF16", [8, 4], A, 0, 64, 2, 0, 32)],
    ],
)
def test_pieces_that_are_not_their_tensor_are_refused(wrong: list[Tensor]) -> None:
    with pytest.raises(BadMessage):
        unpacked(packed(Manifest("job", 1, 7, wrong)))


def test_who_wants_rows_gets_the_pieces_that_have_them() -> None:
    def chunks(**wanted: Rows | None) -> list[str]:
        return list(by_chunk(overlapping(PIECES, wanted)))

    assert chunks(w=Rows(0, 0, 4)) == [A]
    assert chunks(w=Rows(0, 3, 5)) == [A, B]
    assert chunks(w=Rows(0, 4, 8)) == [B]
    assert chunks(w=Rows(1, 0, 1)) == [A, B]
    assert chunks(w=None) == [A, B]
    assert chunks(v=None) == [B]
    assert chunks() == []


def test_a_version_is_cut_into_parts_that_hosts_relay() -> None:
    assert chunk_bytes(1000) == LEAST_BYTES
    assert chunk_bytes(1 << 30) == 16 << 20
    assert chunk_bytes(140 << 30) == MOST_BYTES
