"""Tokens of many trajectories as one record: what was packed comes back, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import BadMessage
from meshrl.common.records.token_record import MEMBER_BITS, TokenRows, in_parts, pack, unpack

INT32 = st.integers(-(2**31), 2**31 - 1)
token = st.tuples(st.integers(0, 2**31 - 1) | st.integers(0, 300), st.integers(0, 2**32 - 1), INT32)
row = st.tuples(
    st.integers(0, 2**62 >> MEMBER_BITS) | st.integers(0, 9),
    st.integers(0, 2**MEMBER_BITS - 1),
    st.lists(token, min_size=1, max_size=8).flatmap(lambda ts: st.sampled_from([ts, 100 * ts])),
)


def rows_of(made: list, width: int = 0, least: int = -1, most: int = 300) -> TokenRows:  # type: ignore[type-arg]
    tokens = [t for *_, ts in made for t in ts]
    draw = np.random.default_rng(len(tokens))
    return TokenRows(
        ids=np.array([group << MEMBER_BITS | member for group, member, _ in made], np.int64),
        counts=np.array([len(ts) for *_, ts in made], np.int32),
        tokens=np.array([t[0] for t in tokens], np.int32),
        logprobs=np.array([t[1] for t in tokens], np.uint32).view(np.float32),
        versions=np.array([t[2] for t in tokens], np.int32),
        experts=draw.integers(least, most, (len(tokens) if width else 0, width)).astype(np.int16),
    )


def in_flight(n: int, vocabulary: int) -> TokenRows:
    """One token each of `n` trajectories, in groups of 8."""
    draw = np.random.default_rng(0)
    trajectories = np.arange(n)
    return TokenRows(
        ids=(5000 + trajectories // 8) << MEMBER_BITS | trajectories % 8,
        counts=np.ones(n, np.int32),
        tokens=draw.integers(0, vocabulary, n).astype(np.int32),
        logprobs=draw.normal(size=n).astype(np.float32),
        versions=np.full(n, 7, np.int32),
    )


COLUMNS = ("ids", "counts", "tokens", "logprobs", "versions", "experts")
experts = st.tuples(st.integers(0, 6), st.sampled_from([(-1, 5), (0, 256), (0, 257), (-1, 32767)]))


@given(st.lists(row, min_size=1, max_size=12), experts)
def test_what_is_packed_comes_back_bit_for_bit(made: list, sent: tuple) -> None:  # type: ignore[type-arg]
    rows = rows_of(made, sent[0], *sent[1])
    back = unpack(pack(rows))
    for name in COLUMNS:
        before, after = getattr(rows, name), getattr(back, name)
        assert before.dtype == after.dtype and before.shape == after.shape
        assert before.tobytes() == after.tobytes()


@given(st.lists(row, min_size=1, max_size=12), st.integers(0, 6), st.integers(1, 4000))
def test_parts_are_the_rows_in_their_order_and_small(made: list, width: int, most: int) -> None:  # type: ignore[type-arg]
    rows = rows_of(made, width)
    parts = list(in_parts(rows, most))
    for name in COLUMNS:
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tobytes() == getattr(rows, name).tobytes()
    for part in parts:
        assert len(part.ids) == 1 or len(pack(part)) <= most + 32  # and the head


def test_an_expert_takes_a_byte_where_256_are_all_there_are() -> None:
    many = [(0, 0, [(1, 0, 0)] * 1000)]
    plain = len(pack(rows_of(many)))
    assert len(pack(rows_of(many, 8, 0, 256))) == plain + 8 * 1000
    assert len(pack(rows_of(many, 8, 0, 257))) == plain + 16 * 1000


@given(st.lists(row, min_size=1, max_size=4), st.integers(0, 10_000))
def test_a_record_that_is_cut_is_refused(made: list, cut: int) -> None:  # type: ignore[type-arg]
    content = pack(rows_of(made))
    with pytest.raises(BadMessage):
        unpack(content[: cut % len(content)])


def test_another_format_is_refused_by_name() -> None:
    content = bytearray(pack(in_flight(1, 9)))
    content[0] += 1
    with pytest.raises(BadMessage, match="format 2; this is format 1"):
        unpack(bytes(content))


def test_a_token_of_a_large_vocabulary_takes_eleven_bytes_at_most() -> None:
    assert len(pack(in_flight(800, 151_936))) < 11 * 800
    assert len(pack(in_flight(800, 256))) < 9 * 800
