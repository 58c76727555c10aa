"""The identity of tensors does not depend on who holds which rows, and on nothing less."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import BadMessage
from meshrl.common.weights.layout.identity import LEAF_BYTES, Described, Tree, identity, merged

SHAPES = [(7, 3000), (9, 5), (40_000,), (), (3, 4, 5000), (0, 8), (4, LEAF_BYTES // 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def tree_of(rows: torch.Tensor, first: int = 0) -> Tree:
    tree = Tree()
    tree.add_rows(rows, first)
    return tree


def root(tensor: torch.Tensor) -> str:
    return tree_of(tensor).root(tensor.nbytes)


def brute_force(content: bytes) -> bytes:
    """The tree of RFC 6962, by its recursive definition."""
    leaves = [content[at : at + LEAF_BYTES] for at in range(0, len(content), LEAF_BYTES)] or [b""]

    def of(some: list[bytes]) -> bytes:
        if len(some) == 1:
            return blake3(some[0], key=b"leaf".ljust(32, b"\0")).digest()
        half = 1 << ((len(some) - 1).bit_length() - 1)
        return blake3(of(some[:half]) + of(some[half:]), key=b"node".ljust(32, b"\0")).digest()

    return of(leaves)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 40_000), max_size=4), seed=st.integers(0, 9))
def test_any_cut_by_rows_has_the_root_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, cuts: list[int], seed: int
) -> None:
    whole = drawn(shape, dtype)
    if not shape:
        return
    ends = [0, *sorted(cut % (shape[0] + 1) for cut in cuts), shape[0]]
    parts = [{"w": tree_of(whole[a:b], a).packed} for a, b in pairwise(ends)]
    random.Random(seed).shuffle(parts)
    assert merged(parts)["w"].root(whole.nbytes) == root(whole)


@pytest.mark.parametrize("leaves", [0, 1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("more", [0, 1, LEAF_BYTES - 1])
def test_the_root_is_that_of_rfc_6962(leaves: int, more: int) -> None:
    content = random.Random(leaves).randbytes(leaves * LEAF_BYTES + more)
    tree = Tree()
    tree.add(0, memoryview(content))
    assert tree.root(len(content)) == brute_force(content).hex()


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_each_bit_counts_and_where_it_lies(shape: tuple[int, ...]) -> None:
    whole = drawn(shape, torch.float32)
    changed = whole.clone()
    changed.view(-1).view(torch.int32)[-1] ^= 1
    found = {root(whole), root(changed)}
    if len(shape) and shape[0] > 1:
        found.add(root(whole.flip(0)))
        assert len(found) == 3
    assert len(found) >= 2


def test_rows_that_are_missing_or_there_twice_have_no_identity() -> None:
    whole = drawn((9, 5000), torch.float32)
    size = whole.nbytes
    lower, upper = tree_of(whole[:4]).packed, tree_of(whole[5:], 5).packed
    with pytest.raises(BadMessage):
        merged([{"w": lower}, {"w": upper}])["w"].root(size)
    with pytest.raises(BadMessage):
        merged([{"w": tree_of(whole).packed}, {"w": upper}])["w"].root(size)
    with pytest.raises(BadMessage):
        tree_of(whole).root(size - 4)
    with pytest.raises(BadMessage):
        tree_of(whole).root(size + 4)


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
def test_parts_that_no_tree_packed_are_refused(packed: bytes) -> None:
    with pytest.raises(BadMessage):
        Tree().merge(packed)


def test_names_types_and_shapes_count() -> None:
    tree = tree_of(whole := drawn((4, 6), torch.float32))
    told = {
        identity({name: Described(dtype, shape)}, {name: tree})
        for name, dtype, shape in [
            ("a", "F32", (4, 6)),
            ("b", "F32", (4, 6)),
            ("a", "I32", (4, 6)),
            ("a", "F32", (2, 12)),
        ]
    }
    assert len(told) == 4
    assert Described.of(whole) == Described("F32", (4, 6))
