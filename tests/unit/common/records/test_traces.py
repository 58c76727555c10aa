"""Records of tokens and traces of groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import BadMessage
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, TrackingConfig
from meshrl.common.records import line_files
from meshrl.common.records.line_files import TraceWriter
from meshrl.common.records.token_records import (
    MEMBER_BITS,
    TokenRows,
    decode_token_rows,
    encode_token_rows,
    split_by_size,
)
from meshrl.sim.virtual_loop import VirtualClock
from tests.meshes import alone
from tests.simulated_host import SimulatedHost, virtual

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
        trajectory_ids=np.array(
            [group << MEMBER_BITS | member for group, member, _ in made], np.int64
        ),
        counts=np.array([len(ts) for *_, ts in made], np.int32),
        tokens=np.array([t[0] for t in tokens], np.int32),
        logprobs=np.array([t[1] for t in tokens], np.uint32).view(np.float32),
        versions=np.array([t[2] for t in tokens], np.int32),
        expert_ids=draw.integers(least, most, (len(tokens) if width else 0, width)).astype(
            np.int16
        ),
    )


def in_flight(n: int, vocabulary: int) -> TokenRows:
    """One token each of `n` trajectories, in groups of 8."""
    draw = np.random.default_rng(0)
    trajectories = np.arange(n)
    return TokenRows(
        trajectory_ids=(5000 + trajectories // 8) << MEMBER_BITS | trajectories % 8,
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
    back = decode_token_rows(encode_token_rows(rows))
    for name in COLUMNS:
        before, after = getattr(rows, name), getattr(back, name)
        assert before.dtype == after.dtype and before.shape == after.shape
        assert before.tobytes() == after.tobytes()


@given(st.lists(row, min_size=1, max_size=12), st.integers(0, 6), st.integers(1, 4000))
def test_parts_are_the_rows_in_their_order_and_small(made: list, width: int, most: int) -> None:  # type: ignore[type-arg]
    rows = rows_of(made, width)
    parts = list(split_by_size(rows, most))
    for name in COLUMNS:
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tobytes() == getattr(rows, name).tobytes()
    for part in parts:
        assert (
            len(part.trajectory_ids) == 1 or len(encode_token_rows(part)) <= most + 32
        )  # and the head


@given(st.lists(row, min_size=1, max_size=4), st.integers(0, 10_000))
def test_a_record_that_is_cut_is_refused(made: list, cut: int) -> None:  # type: ignore[type-arg]
    content = encode_token_rows(rows_of(made))
    with pytest.raises(BadMessage):
        decode_token_rows(content[: cut % len(content)])


def test_another_format_is_refused_by_name() -> None:
    content = bytearray(encode_token_rows(in_flight(1, 9)))
    content[0] += 1
    with pytest.raises(BadMessage, match="format 2; this is format 1"):
        decode_token_rows(bytes(content))


def test_a_token_of_a_large_vocabulary_takes_eleven_bytes_at_most_and_an_expert_one() -> None:
    assert len(encode_token_rows(in_flight(800, 151_936))) < 11 * 800
    assert len(encode_token_rows(in_flight(800, 256))) < 9 * 800
    many = [(0, 0, [(1, 0, 0)] * 1000)]
    plain = len(encode_token_rows(rows_of(many)))
    assert len(encode_token_rows(rows_of(many, 8, 0, 256))) == plain + 8 * 1000
    assert len(encode_token_rows(rows_of(many, 8, 0, 257))) == plain + 16 * 1000


def job(root: Path, share: float) -> JobData:
    config = JobConfig(name="tiny", tracking=TrackingConfig(trace=share))
    return JobData("tiny", config, root / "bundle", root)


def written(root: Path) -> list[dict[str, Any]]:
    path = root / "trace" / "shard-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@virtual
async def test_lines_are_gathered_for_a_second_and_all_are_there_at_the_end(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    host = SimulatedHost(clock, random.child("host"))
    told = TraceWriter(alone("rollout/tiny/0", clock, random, host), job(tmp_path, 1.0), "shard-0")
    for n in range(5):
        told.write({"n": n})
    assert [row["n"] for row in written(tmp_path)] == [0]
    await clock.sleep(line_files.FLUSH_INTERVAL_S)
    told.write({"n": 5})
    assert [row["n"] for row in written(tmp_path)] == [0, 1, 2, 3, 4, 5]
    told.write({"n": 6, "long": "x" * line_files.FLUSH_BYTES})
    assert written(tmp_path)[-1]["n"] == 6
    told.write({"n": 7})
    await told.close()
    assert [row["n"] for row in written(tmp_path)] == list(range(8))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.9, 1.0])
@virtual
async def test_the_share_of_groups_that_is_asked_for_is_traced(
    clock: VirtualClock, random: Random, share: float, tmp_path: Path
) -> None:
    host = SimulatedHost(clock, random.child("host"))
    told = TraceWriter(
        alone("rollout/tiny/0", clock, random, host), job(tmp_path, share), "shard-0"
    )
    for first in (0, 1 << 40):  # of training, of evaluation
        for groups in (100, 1000):
            found = sum(told.is_traced(first + group) for group in range(groups))
            assert found == pytest.approx(share * groups, abs=1)
    told.write({"n": 0})
    await told.close()
    assert bool(written(tmp_path)) == (share > 0)


@virtual
async def test_a_full_disk_costs_lines_and_nothing_else(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    host = SimulatedHost(clock, random.child("host"))
    told = TraceWriter(alone("rollout/tiny/0", clock, random, host), job(tmp_path, 1.0), "shard-0")
    host.disk_bytes = 0
    told.write({"n": 0})
    host.disk_bytes = -1
    await clock.sleep(line_files.FLUSH_INTERVAL_S)
    told.write({"n": 1})
    await told.close()
    assert [row["n"] for row in written(tmp_path)] == [1]
