"""The identity of tensors does not depend on who holds which rows, and on nothing less."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.weights.identity import MODULUS, Described, added, identity, of_rows

SHAPES = [(7, 300), (9, 5), (40,), (), (3, 4, 50), (0, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=3))
def test_any_cut_by_rows_adds_up_to_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, cuts: list[int]
) -> None:
    whole = drawn(shape, dtype)
    if not shape:
        return
    ends = [0, *sorted(min(cut, shape[0]) for cut in cuts), shape[0]]
    parts = [{"w": of_rows(whole[a:b], a)} for a, b in pairwise(ends)]
    assert added(parts)["w"] == of_rows(whole, 0)


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_each_bit_counts_and_where_it_lies(shape: tuple[int, ...]) -> None:
    whole = drawn(shape, torch.float32)
    changed = whole.clone()
    changed.view(-1).view(torch.int32)[-1] ^= 1
    found = {of_rows(whole, 0), of_rows(changed, 0), of_rows(whole, 1)}
    if len(shape) and shape[0] > 1:
        found.add(of_rows(whole.flip(0), 0))
        assert len(found) == 4
    assert len(found) >= 3
    assert all(0 <= one < MODULUS for one in found)


def test_names_types_and_shapes_count() -> None:
    whole = drawn((4, 6), torch.float32)
    found = of_rows(whole, 0)
    told = {
        identity({name: Described(dtype, shape)}, {name: found})
        for name, dtype, shape in [
            ("a", "F32", (4, 6)),
            ("b", "F32", (4, 6)),
            ("a", "I32", (4, 6)),
            ("a", "F32", (2, 12)),
        ]
    }
    assert len(told) == 4
    assert Described.of(whole) == Described("F32", (4, 6))
