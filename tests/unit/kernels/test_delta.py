"""What differs between two runs of bytes is found to the last bit, natively as by NumPy; written
over the old run, it makes the new one.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.kernels import delta

native = pytest.mark.needs("compiler")
BLOCKS = 1000  # bytes of a block in `rebuilt`: no multiple of what the native code looks at


def drawn(elements: int, width: int, share: float, seed: int) -> tuple[delta.Bytes, delta.Bytes]:
    """Two runs of bytes, of whose elements about a share differ, each in some bit."""
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, elements * width, np.uint8)
    new = old.copy()
    changed = np.flatnonzero(generator.random(elements) < share)
    new[changed * width + generator.integers(0, width, len(changed))] ^= np.uint8(
        1 << int(generator.integers(0, 8))
    )
    return old, new


def rebuilt(old: delta.Bytes, found: delta.Differences, write: Callable[..., int]) -> delta.Bytes:
    """The new run, put together block by block with gaps and values alone."""
    width = found.values.itemsize
    positions = (np.cumsum(found.gaps.astype(np.int64) + 1) - 1).astype(np.uint32)
    new, done, step = old.copy(), 0, BLOCKS // width * width
    for first in range(0, len(new), step):
        done = write(new[first : first + step], first // width, positions, found.values, done)
    assert done == len(positions)
    return new


CASES = given(
    st.integers(0, 3000),
    st.sampled_from(delta.WIDTHS),
    st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]),
    st.integers(0, 1 << 30),
)


@settings(max_examples=80)
@CASES
def test_plainly(elements: int, width: int, share: float, seed: int) -> None:
    old, new = drawn(elements, width, share, seed)
    found = delta.plain_differences(old, new, width, elements)
    assert found is not None
    assert (rebuilt(old, found, delta.plain_overwrite) == new).all()


@native
@settings(max_examples=80)
@CASES
def test_natively(elements: int, width: int, share: float, seed: int) -> None:
    old, new = drawn(elements, width, share, seed)
    assert delta.functions() is not None
    found = delta.differences(old, new, width, elements)
    plain = delta.plain_differences(old, new, width, elements)
    assert found is not None and plain is not None
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(found, plain, strict=True))
    assert (rebuilt(old, found, delta.overwrite) == new).all()


@native
@settings(max_examples=80)
@given(st.integers(0, 400), st.sampled_from(delta.WIDTHS), st.integers(0, 400), st.integers(0, 99))
def test_more_than_are_wanted_are_none(elements: int, width: int, most: int, seed: int) -> None:
    old, new = drawn(elements, width, 0.5, seed)
    plain = delta.plain_differences(old, new, width, most)
    assert (delta.differences(old, new, width, most) is None) == (plain is None)


@pytest.mark.parametrize(
    ("was", "now"),
    [(0.0, -0.0), (float("nan"), -float("nan")), (1.0, np.nextafter(np.float32(1), np.float32(2)))],
)
def test_what_compares_equal_or_not_at_all_is_told_apart_by_its_bits(
    was: float, now: float
) -> None:
    old, new = (np.full(100, x, np.float32).view(np.uint8) for x in (was, was))
    new = new.copy()
    new.view(np.float32)[41] = now
    found = delta.differences(old, new, 4, 100)
    alike = delta.differences(old, old, 4, 100)
    assert found is not None and alike is not None
    assert found.gaps.tolist() == [41] and len(found.values) == 1
    assert alike.gaps.size == 0  # also where nothing is a number


def test_runs_that_do_not_match_are_refused() -> None:
    run = np.zeros(12, np.uint8)
    with pytest.raises(ValueError, match="12 and 8 bytes"):
        delta.differences(run, run[:8], 4, 3)
    with pytest.raises(ValueError, match="elements of 8"):
        delta.differences(run, run, 8, 3)
