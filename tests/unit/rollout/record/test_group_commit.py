"""Group commit: ledger and trajectories agree when engines flush, leave or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.api.engine import FinishReason, TokenBatch
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.encoding import blob, messages
from meshrl.common.base.encoding.blob import pack, unpack
from meshrl.common.base.errors import BadMessage
from meshrl.common.base.expert_routing import NO_EXPERTS, UNKNOWN_EXPERT, concatenate_experts
from meshrl.common.base.random import Random
from meshrl.common.generation.engine_contract import EngineOutput
from meshrl.common.records.ledger import Ledger, RecordKind, iter_records
from meshrl.common.records.token_records import TokenRows
from meshrl.services.engine.stepping.shard_streams import cut_flush
from meshrl.services.rollout.record.finished_groups import build_group
from meshrl.services.rollout.record.group_commit import WINDOW_S, GroupCommit
from meshrl.services.rollout.record.staging import ROW_TOKENS, OpenRequest, Staging
from meshrl.services.rollout.trajectories.trajectory import (
    RestoredGroups,
    Trajectory,
    TrajectoryOutcome,
)
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.records.test_ledger import HOST

RUNNING, STOP, ABORTED = FinishReason.RUNNING, FinishReason.STOP, FinishReason.ABORTED
PROMPT = [7, 8, 9]


@dataclass
class RecordedLedger:
    """Ledger that retains token rows in order and writes nothing while `full`."""

    clock: VirtualClock
    tokens_of: dict[int, list[int]] = field(default_factory=dict)
    records: int = 0
    full: bool = False

    async def write_tokens(self, rows: TokenRows) -> None:
        while self.full:
            await self.clock.sleep(0.5)
        self.records += 1
        at = 0
        for identity, count in zip(rows.trajectory_ids.tolist(), rows.counts.tolist(), strict=True):
            assert count > 0
            self.tokens_of.setdefault(identity, []).extend(rows.tokens[at : at + count].tolist())
            at += count


class Bench:
    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock = clock
        self.mesh = alone(
            "rollout/job/0", clock, random, SimulatedHost(clock, random.child("host"))
        )
        self.written = RecordedLedger(clock)
        self.commits = GroupCommit(self.mesh, self.written)
        self.made = 0

    def open(self, recorded: bool = True) -> tuple[Trajectory, OpenRequest, asyncio.Future[int]]:
        self.made += 1
        t = Trajectory(self.made // 8, self.made % 8, 0, 0, 0)
        t.is_recorded = recorded
        t.set_prompt(PROMPT)
        request = self.commits.open_request(t)
        return t, request, request.done

    def in_ledger(self, t: Trajectory) -> list[int]:
        return self.written.tokens_of.get(t.id, [])


def run_on_bench(story: Callable[[Bench], Any]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(Bench(clock, random))

    run_virtual(main, limit_s=3600.0)


def flush(*rows: tuple[OpenRequest, list[int], int]) -> TokenBatch:
    """Build a batch from (request, tokens, finish reason) rows."""
    tokens = np.array([token for _, ts, _ in rows for token in ts], np.int32)
    return TokenBatch(
        request_ids=np.array([request.id for request, _, _ in rows], np.int64),
        token_counts=np.array([len(ts) for _, ts, _ in rows], np.int32),
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        raw_logprobs=np.zeros(0, np.float32),
        token_versions=tokens % 5,
        finish_reasons=np.array([finish for *_, finish in rows], np.int8),
        loaded_version=0,
    )


@story_on(run_on_bench)
async def test_turn_ends_once_its_last_token_is_written(bench: Bench) -> None:
    t, request, done = bench.open()
    bench.written.full = True
    await bench.commits.add_flush("a", flush((request, [1, 2], RUNNING)))
    await bench.commits.add_flush("a", flush((request, [3], STOP)))
    await bench.clock.sleep(5.0)
    assert t.length == 3 and not done.done()
    bench.written.full = False
    assert await done == STOP
    assert t.turn_tokens.tolist() == bench.in_ledger(t) == [1, 2, 3]
    assert t.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert t.versions.tolist() == [-1, -1, -1, 1, 2, 3]


@story_on(run_on_bench)
async def test_tokens_within_a_window_form_one_record(bench: Bench) -> None:
    turns = [bench.open() for _ in range(200)]
    await bench.commits.add_flush("first", flush())
    await bench.commits.wait_until_written()
    for n in range(10):
        part = [(request, [n], RUNNING) for _, request, _ in turns[20 * n : 20 * n + 20]]
        await bench.commits.add_flush(f"engine {n}", flush(*part))
    await bench.clock.sleep(2 * WINDOW_S)
    assert bench.written.records == 1
    assert all(t.length == 4 for t, _, _ in turns)


@story_on(run_on_bench)
async def test_written_tokens_count_before_their_waiter_wakes(bench: Bench) -> None:
    t, request, done = bench.open()
    for n in range(500):  # more than a row holds
        await bench.commits.add_flush("a", flush((request, [n], RUNNING)))
        await bench.commits.wait_until_written()
        assert t.length == 4 + n
        if n % 97 == 0:
            assert t.turn_tokens.tolist() == list(range(n + 1))
    await bench.commits.add_flush("a", flush((request, list(range(500, 1000)), STOP)))
    assert await done == STOP
    assert t.turn_tokens.tolist() == bench.in_ledger(t) == list(range(1000))


@story_on(run_on_bench)
async def test_lost_engine_ends_its_requests_after_its_flushes(bench: Bench) -> None:
    t, request, done = bench.open()
    await bench.commits.add_flush("a", flush((request, [1], RUNNING)))
    await bench.commits.add_flush("a", flush((request, [2], RUNNING)))
    bench.commits.abort("a", [request.id])
    assert await done == ABORTED
    assert t.turn_tokens.tolist() == bench.in_ledger(t) == [1, 2]
    again = bench.commits.open_request(t)
    await bench.commits.add_flush("a", flush((request, [9], STOP), (again, [3], RUNNING)))
    await bench.commits.wait_until_written()
    assert t.turn_tokens.tolist() == bench.in_ledger(t) == [1, 2, 3]


@story_on(run_on_bench)
async def test_evaluation_tokens_are_not_recorded(bench: Bench) -> None:
    off, request, done = bench.open(recorded=False)
    on, other, _ = bench.open()
    await bench.commits.add_flush("a", flush((request, [1, 2], STOP), (other, [4], RUNNING)))
    assert await done == STOP
    assert (off.turn_tokens.tolist(), on.turn_tokens.tolist()) == ([1, 2], [4])
    assert bench.written.tokens_of == {on.id: [4]}
    assert bench.commits.sampled_tokens == 3


@story_on(run_on_bench)
async def test_mismatched_columns_are_rejected(bench: Bench) -> None:
    _, request, _ = bench.open()
    good = flush((request, [1, 2], RUNNING))
    with pytest.raises(BadMessage, match="engine/3"):
        bad = replace(good, token_counts=good.token_counts + 1)
        await bench.commits.add_flush("engine/3", bad)


COLUMNS = ("tokens", "logprobs", "unmodified", "versions", "finish")

actions = st.lists(
    st.one_of(
        st.tuples(st.just("flush"), st.integers(0, 2), st.lists(st.integers(0, 11), max_size=6)),
        st.tuples(st.just("large"), st.integers(0, 11)),
        st.tuples(st.just("forget"), st.integers(0, 11)),
        st.tuples(st.just("gone"), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 11)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.004, 0.02])),
        st.tuples(st.just("full"), st.booleans()),
        st.tuples(st.just("read"), st.integers(0, 11)),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(script=actions)
@story_on(run_on_bench)
async def test_ledger_and_trajectories_never_differ(bench: Bench, script: list[Any]) -> None:
    """Run twelve trajectories over three engines; each token in flight is the next of its
    request.
    """
    turns = [bench.open(recorded=n % 5 != 4) for n in range(12)]
    encode_experts = [0] * 12  # Tokens of the open request.
    over: dict[int, asyncio.Future[int]] = {}

    def next_of(n: int, count: int, finish: int) -> tuple[OpenRequest, list[int], int]:
        first = 1000 * n + encode_experts[n]
        encode_experts[n] += count
        return turns[n][1], list(range(first, first + count)), finish

    for action, *given_ in script:
        match action:
            case "flush":
                engine, members = given_
                mine = [n for n in members if n % 3 == engine]
                rows = [next_of(n, 1 + n % 2, RUNNING) for n in mine]
                put = bench.commits.add_flush(str(engine), flush(*rows))
                await asyncio.wait_for(put, 60)
            case "large":
                row = next_of(given_[0], 300, RUNNING)
                await bench.commits.add_flush(str(given_[0] % 3), flush(row))
            case "end":
                n = given_[0]
                await bench.commits.add_flush(str(n % 3), flush(next_of(n, 1, STOP)))
                over[n] = turns[n][2]
            case "forget":
                bench.commits.close_request(turns[given_[0]][1])
            case "gone":
                mine = [n for n in range(12) if n % 3 == given_[0]]
                bench.commits.abort(str(given_[0]), [turns[n][1].id for n in mine])
            case "wait":
                await bench.clock.sleep(given_[0])
            case "full":
                bench.written.full = given_[0]
            case "read":
                assert turns[given_[0]][0].turn_tokens is not None
    bench.written.full = False
    await bench.commits.wait_until_written()
    for n, (t, request, _) in enumerate(turns):
        ours, theirs = t.turn_tokens.tolist(), bench.in_ledger(t)
        assert ours == list(range(1000 * n, 1000 * n + len(ours))), "skipped or doubled"
        if n % 5 == 4:
            assert theirs == []
        elif not discard_script(script, n):
            assert ours == theirs
        else:  # Cancelled while it was being written: only the ledger counts from then on.
            assert ours == theirs[: len(ours)]
        assert t.length == len(PROMPT) + len(ours)
        bench.commits.close_request(request)
    for n, done in over.items():
        assert done.done() or discard_script(script, n)


def discard_script(script: list[Any], n: int) -> bool:
    return ("forget", n) in script


WIDTH = 4


def encode_experts(tokens: np.ndarray) -> np.ndarray:
    """Return experts that identify their token."""
    return (tokens[:, None] % 100 + np.arange(WIDTH)).astype(np.int16)


def flush_with_experts(
    *rows: tuple[OpenRequest, list[int], int], experts: bool = True
) -> TokenBatch:
    """Build a batch with experts from (request, tokens, finish reason) rows."""
    tokens = np.array([token for _, ts, _ in rows for token in ts], np.int32)
    return TokenBatch(
        request_ids=np.array([request.id for request, _, _ in rows], np.int64),
        token_counts=np.array([len(ts) for _, ts, _ in rows], np.int32),
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        raw_logprobs=np.zeros(0, np.float32),
        token_versions=np.zeros(len(tokens), np.int32),
        finish_reasons=np.array([finish for *_, finish in rows], np.int8),
        loaded_version=0,
        expert_ids=encode_experts(tokens) if experts else NO_EXPERTS,
    )


def assert_experts_match(t: Trajectory) -> None:
    """Check that prompt tokens have no experts and each sampled token has its own."""
    before = len(PROMPT)
    assert t.experts.shape == (t.length, WIDTH)
    assert (t.experts[:before] == UNKNOWN_EXPERT).all()
    assert np.array_equal(t.experts[before:], encode_experts(t.tokens[before:]))


@story_on(run_on_bench)
async def test_experts_arrive_with_their_tokens_in_any_batch_size(bench: Bench) -> None:
    turns = [bench.open() for _ in range(80)]  # more than the initial row capacity
    for n in range(ROW_TOKENS + 9):
        rows = [(r, [n + i] * (1 + i % 3), RUNNING) for i, (_, r, _) in enumerate(turns)]
        await bench.commits.add_flush("a", flush_with_experts(*rows))
    await bench.commits.add_flush(
        "a", flush_with_experts((turns[0][1], list(range(3 * ROW_TOKENS)), STOP))
    )
    assert await turns[0][2] == STOP
    await bench.commits.wait_until_written()
    for t, _, _ in turns:
        assert_experts_match(t)


@story_on(run_on_bench)
async def test_engine_without_experts_leaves_them_unknown(bench: Bench) -> None:
    (t, one, _), (u, two, _) = bench.open(), bench.open()
    await bench.commits.add_flush(
        "plain", flush_with_experts((two, [5, 6], RUNNING), experts=False)
    )
    await bench.commits.add_flush("moe", flush_with_experts((one, [7], RUNNING)))
    await bench.commits.add_flush("plain", flush_with_experts((one, [8], STOP), experts=False))
    await bench.commits.wait_until_written()
    assert t.experts[len(PROMPT) :].tolist() == [
        encode_experts(np.array([7]))[0].tolist(),
        [UNKNOWN_EXPERT] * 4,
    ]
    assert (u.experts == UNKNOWN_EXPERT).all()


@story_on(run_on_bench)
async def test_dense_model_stores_no_experts(bench: Bench) -> None:
    t, request, done = bench.open()
    await bench.commits.add_flush("a", flush_with_experts((request, [1, 2], STOP), experts=False))
    assert await done == STOP
    assert t.experts.shape == (0, 0)


@pytest.mark.parametrize("wrong", [np.zeros((1, 4), np.int16), np.zeros((2, 4), np.int64)])
@story_on(run_on_bench)
async def test_experts_that_do_not_match_tokens_are_rejected(
    bench: Bench, wrong: np.ndarray
) -> None:
    _, request, _ = bench.open()
    good = flush_with_experts((request, [1, 2], RUNNING))
    columns = (good.request_ids, good.token_counts, good.tokens, good.logprobs, good.raw_logprobs)
    with pytest.raises(BadMessage, match="experts"):
        bad = TokenBatch(*columns, good.token_versions, good.finish_reasons, 0, wrong)
        await bench.commits.add_flush("engine/3", bad)


def token_rows(*rows: tuple[int, list[int]], experts: bool = True) -> TokenRows:
    tokens = np.array([token for _, ts in rows for token in ts], np.int32)
    return TokenRows(
        trajectory_ids=np.array([trajectory for trajectory, _ in rows], np.int64),
        counts=np.array([len(ts) for _, ts in rows], np.int32),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        expert_ids=encode_experts(tokens) if experts else NO_EXPERTS,
    )


def test_restarted_shard_restores_experts_of_sampled_tokens_only(tmp_path: Path) -> None:
    ledger = Ledger(HOST, tmp_path, "1")
    ledger.open_next_segment()
    records: list[tuple[RecordKind, Any]] = [
        (RecordKind.OPEN, [0, 0, 0, 0, [1, 2, 3]]),
        (RecordKind.TOKENS, token_rows((0, list(range(10, 150))))),
        (RecordKind.TURN, [0, "said"]),
        (RecordKind.APPEND, [0, [9, 9]]),
        (RecordKind.TOKENS, token_rows((0, [20]), (1, [77]))),
        (RecordKind.TOKENS, token_rows((0, [21]), experts=False)),
    ]
    ledger.append(records, [0])
    found = RestoredGroups()
    for record in iter_records(tmp_path):
        found.apply_record(record, lambda group, member: 0)
    t = found.trajectories[0]
    known = np.flatnonzero((t.experts != UNKNOWN_EXPERT).all(1)).tolist()
    assert known == [*range(3, 143), 145]
    assert np.array_equal(t.experts[known], encode_experts(t.tokens[known]))
    t.set_prompt([1, 2, 3])
    t.append_sampled(*token_rows((0, [5]), experts=False).slice_token_columns(slice(None)))
    assert (t.experts == UNKNOWN_EXPERT).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=20))
def test_rows_separate_experts_by_request(script: list[tuple[int, int]]) -> None:
    staging = Staging()
    ts = [Trajectory(0, member, 0, 0, 0) for member in range(4)]
    for t in ts:
        t.set_prompt(PROMPT)
    loop = asyncio.new_event_loop()
    requests = [staging.open(t, loop.create_future()) for t in ts]
    for n, (member, count) in enumerate(script):
        rows = staging.find_rows(np.array([requests[member].id]))
        staging.add_tokens(rows, token_rows((ts[member].id, [17 * n + i for i in range(count)])))
    for t, request in zip(ts, requests, strict=True):
        staging.close(request.id)
        if t.length > len(PROMPT):
            assert_experts_match(t)


def test_split_flush_splits_experts() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    made = EngineOutput(
        ids=np.array([1, 2]),
        counts=np.array([1, 2], np.int32),
        tokens=tokens,
        logprobs=np.zeros(3, np.float32),
        raw_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(3, np.int32),
        finish_reasons=np.zeros(2, np.int8),
        experts=encode_experts(tokens),
    )
    routes: Any = [("somebody", 10), ("me", 20)]
    mine = cut_flush(made, routes, [False, True], 0, 3)
    assert np.array_equal(mine.expert_ids, encode_experts(tokens)[1:])
    body, buffers = messages.encode(mine)
    again = messages.decode(TokenBatch, body, buffers)
    assert again.expert_ids.dtype == np.int16 and np.array_equal(again.expert_ids, mine.expert_ids)


def test_stored_group_contains_experts() -> None:
    tokens = np.arange(6, dtype=np.int32)
    group = TrajectoryGroup(
        group=1,
        prompt=2,
        lengths=np.array([2, 4], np.int32),
        tokens=tokens,
        logprobs=np.zeros(6, np.float32),
        versions=np.zeros(6, np.int32),
        rewards=np.zeros(2, np.float32),
        expert_ids=concatenate_experts([(NO_EXPERTS, 2), (encode_experts(tokens[2:]), 4)]),
        expert_shape=[2, 2],
    )
    again = blob.unpack(TrajectoryGroup, blob.pack(group))
    assert again.expert_shape == [2, 2]
    assert (
        again.expert_ids.tolist()
        == [[UNKNOWN_EXPERT] * 4] * 2 + encode_experts(tokens[2:]).tolist()
    )


def complete_member(member: int, reason: str, reward: float | None) -> Trajectory:
    t = Trajectory(4, member, 0, 2, seed=member)
    t.set_prompt([1, 2])
    t.append_sampled(np.array([3], np.int32), np.zeros(1, np.float32), np.array([2], np.int32))
    t.outcome = TrajectoryOutcome(reason, reward)
    return t


def test_members_truncated_at_max_length_are_marked() -> None:
    endings = [("done", 1.0), ("length", 0.0), ("turns", 0.0), ("failed", None)]
    members = [complete_member(n, *ending) for n, ending in enumerate(endings)]
    encode_experts = unpack(TrajectoryGroup, pack(build_group(4, 0, members, (), lambda: [0, 0])))
    assert encode_experts.truncated.tolist() == [False, True, False, False]
    assert np.isfinite(encode_experts.rewards).tolist() == [True, True, True, False]


def test_scores_of_frozen_models_are_in_the_group() -> None:
    members = [complete_member(n, "done", 1.0) for n in range(2)]
    for n, member in enumerate(members):
        member.scores["teacher"] = np.full(member.length, -n - 1.0, np.float32)
    made = build_group(4, 0, members, ("reference", "teacher"), lambda: [0, 0])
    again = unpack(TrajectoryGroup, pack(made))
    assert again.reference_logprobs.tolist() == [0.0] * 6, "it did not score them"
    assert again.teacher_logprobs.tolist() == [-1.0] * 3 + [-2.0] * 3


def test_rewards_are_stored_as_float64() -> None:
    rewards = [1e39, 100000001.0, 100000002.0, 0.1]
    members = [complete_member(n, "done", reward) for n, reward in enumerate(rewards)]
    encode_experts = unpack(TrajectoryGroup, pack(build_group(4, 0, members, (), lambda: [0, 0])))
    assert encode_experts.rewards.tolist() == rewards


def test_group_of_an_earlier_version_is_read_with_float32_rewards() -> None:
    members = [complete_member(n, "done", float(n)) for n in range(2)]
    made = build_group(4, 0, members, (), lambda: [0, 0])
    old = replace(made, rewards=made.rewards.astype(np.float32))
    assert unpack(TrajectoryGroup, pack(old)).rewards.tolist() == [0.0, 1.0]
