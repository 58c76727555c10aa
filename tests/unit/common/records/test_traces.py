"""Token records and traces of groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
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
    st.lists(token, min_size=1, max_size=5).flatmap(lambda ts: st.sampled_from([ts, 100 * ts])),
)


def make_rows(
    drawn_rows: list[Any], width: int = 0, min_expert: int = -1, max_expert: int = 300
) -> TokenRows:
    tokens = [t for *_, ts in drawn_rows for t in ts]
    draw = np.random.default_rng(len(tokens))
    return TokenRows(
        trajectory_ids=np.array(
            [group << MEMBER_BITS | member for group, member, _ in drawn_rows], np.int64
        ),
        counts=np.array([len(ts) for *_, ts in drawn_rows], np.int32),
        tokens=np.array([t[0] for t in tokens], np.int32),
        logprobs=np.array([t[1] for t in tokens], np.uint32).view(np.float32),
        versions=np.array([t[2] for t in tokens], np.int32),
        expert_ids=draw.integers(
            min_expert, max_expert, (len(tokens) if width else 0, width)
        ).astype(np.int16),
    )


def make_single_tokens(n: int, vocabulary: int) -> TokenRows:
    """Make one token for each of `n` trajectories, in groups of 8."""
    draw = np.random.default_rng(0)
    trajectories = np.arange(n)
    return TokenRows(
        trajectory_ids=(5000 + trajectories // 8) << MEMBER_BITS | trajectories % 8,
        counts=np.ones(n, np.int32),
        tokens=draw.integers(0, vocabulary, n).astype(np.int32),
        logprobs=draw.normal(size=n).astype(np.float32),
        versions=np.full(n, 7, np.int32),
    )


COLUMNS = ("trajectory_ids", "counts", "tokens", "logprobs", "versions", "expert_ids")


experts = st.tuples(st.integers(0, 6), st.sampled_from([(-1, 5), (0, 256), (0, 257), (-1, 32767)]))


@settings(max_examples=60)
@given(st.lists(row, min_size=1, max_size=6), experts)
def test_token_rows_round_trip_bit_for_bit(drawn_rows: list, sent: tuple) -> None:  # type: ignore[type-arg]
    rows = make_rows(drawn_rows, sent[0], *sent[1])
    decoded = decode_token_rows(encode_token_rows(rows))
    for name in COLUMNS:
        before, after = getattr(rows, name), getattr(decoded, name)
        assert before.dtype == after.dtype and before.shape == after.shape
        assert before.tobytes() == after.tobytes()


@settings(max_examples=60)
@given(st.lists(row, min_size=1, max_size=6), st.integers(0, 6), st.integers(1, 4000))
def test_split_parts_keep_the_order_and_the_size_limit(
    drawn_rows: list[Any], width: int, max_bytes: int
) -> None:
    rows = make_rows(drawn_rows, width)
    parts = list(split_by_size(rows, max_bytes))
    for name in COLUMNS:
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tobytes() == getattr(rows, name).tobytes()
    for part in parts:
        # And the header.
        assert len(part.trajectory_ids) == 1 or len(encode_token_rows(part)) <= max_bytes + 32


@settings(max_examples=60)
@given(st.lists(row, min_size=1, max_size=3), st.integers(0, 10_000))
def test_truncated_record_is_rejected(drawn_rows: list, length: int) -> None:  # type: ignore[type-arg]
    content = encode_token_rows(make_rows(drawn_rows))
    with pytest.raises(BadMessage):
        decode_token_rows(content[: length % len(content)])


def test_unknown_format_is_rejected_by_name() -> None:
    content = bytearray(encode_token_rows(make_single_tokens(1, 9)))
    content[0] += 1
    with pytest.raises(BadMessage, match="format 2; this version reads format 1"):
        decode_token_rows(bytes(content))


def test_encoded_token_takes_at_most_eleven_bytes_and_an_expert_one() -> None:
    assert len(encode_token_rows(make_single_tokens(800, 151_936))) < 11 * 800
    assert len(encode_token_rows(make_single_tokens(800, 256))) < 9 * 800
    long_rows = [(0, 0, [(1, 0, 0)] * 1000)]
    plain_bytes = len(encode_token_rows(make_rows(long_rows)))
    assert len(encode_token_rows(make_rows(long_rows, 8, 0, 256))) == plain_bytes + 8 * 1000
    assert len(encode_token_rows(make_rows(long_rows, 8, 0, 257))) == plain_bytes + 16 * 1000


def make_job_data(root: Path, share: float) -> JobData:
    config = JobConfig(name="tiny", tracking=TrackingConfig(trace=share))
    return JobData("tiny", config, root / "bundle", root)


def read_lines(root: Path) -> list[dict[str, Any]]:
    path = root / "trace" / "shard-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@virtual
async def test_trace_lines_are_buffered_and_complete_after_close(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    host = SimulatedHost(clock, random.child("host"))
    writer = TraceWriter(
        alone("rollout/tiny/0", clock, random, host), make_job_data(tmp_path, 1.0), "shard-0"
    )
    for n in range(5):
        writer.write({"n": n})
    assert [row["n"] for row in read_lines(tmp_path)] == [0]
    await clock.sleep(line_files.FLUSH_INTERVAL_S)
    writer.write({"n": 5})
    assert [row["n"] for row in read_lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
    writer.write({"n": 6, "long": "x" * line_files.FLUSH_BYTES})
    assert read_lines(tmp_path)[-1]["n"] == 6
    writer.write({"n": 7})
    await writer.close()
    assert [row["n"] for row in read_lines(tmp_path)] == list(range(8))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.9, 1.0])
@virtual
async def test_configured_share_of_groups_is_traced(
    clock: VirtualClock, random: Random, share: float, tmp_path: Path
) -> None:
    host = SimulatedHost(clock, random.child("host"))
    writer = TraceWriter(
        alone("rollout/tiny/0", clock, random, host), make_job_data(tmp_path, share), "shard-0"
    )
    for first in (0, 1 << 40):  # ids of training groups, ids of evaluation groups
        for groups in (100, 1000):
            traced_count = sum(writer.is_traced(first + group) for group in range(groups))
            assert traced_count == pytest.approx(share * groups, abs=1)
    writer.write({"n": 0})
    await writer.close()
    assert bool(read_lines(tmp_path)) == (share > 0)


@virtual
async def test_full_disk_loses_only_trace_lines(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    host = SimulatedHost(clock, random.child("host"))
    writer = TraceWriter(
        alone("rollout/tiny/0", clock, random, host), make_job_data(tmp_path, 1.0), "shard-0"
    )
    host.disk_bytes = 0
    writer.write({"n": 0})
    host.disk_bytes = -1
    await clock.sleep(line_files.FLUSH_INTERVAL_S)
    writer.write({"n": 1})
    await writer.close()
    assert [row["n"] for row in read_lines(tmp_path)] == [1]
