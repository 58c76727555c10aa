"""Experts that tokens were sent to, from an engine's flush to the group that is trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.engine import Finish, Tokens
from meshrl.common.api.weights import Group
from meshrl.common.base.encoding import blob, messages
from meshrl.common.base.errors import BadMessage
from meshrl.common.base.experts import NO_EXPERTS, UNKNOWN, laid_out
from meshrl.common.generation.contract import Flush
from meshrl.common.records.ledger import Kind, Ledger, read
from meshrl.common.records.token_record import TokenRows
from meshrl.services.engine.stepping.shards import cut
from meshrl.services.rollout.record.staging import ROW_TOKENS, OpenRequest, Staging
from meshrl.services.rollout.trajectories.trajectory import Restored, Trajectory
from tests.stories import story_on
from tests.unit.common.records.test_ledger import HOST
from tests.unit.rollout.record.test_group_commit import PROMPT, Bench, on_bench

RUNNING, STOP = Finish.RUNNING, Finish.STOP
WIDTH = 4


def sent(tokens: np.ndarray) -> np.ndarray:
    """Experts that can be told from the token."""
    return (tokens[:, None] % 100 + np.arange(WIDTH)).astype(np.int16)


def flush(*rows: tuple[OpenRequest, list[int], int], experts: bool = True) -> Tokens:
    """Of (request, tokens, finish)."""
    tokens = np.array([token for _, ts, _ in rows for token in ts], np.int32)
    return Tokens(
        ids=np.array([request.id for request, _, _ in rows], np.int64),
        counts=np.array([len(ts) for _, ts, _ in rows], np.int32),
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        unmodified=np.zeros(0, np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish=np.array([finish for *_, finish in rows], np.int8),
        version=0,
        experts=sent(tokens) if experts else NO_EXPERTS,
    )


def holds(t: Trajectory) -> None:
    """The prompt has none, each sampled token its own."""
    before = len(PROMPT)
    assert t.experts.shape == (t.length, WIDTH)
    assert (t.experts[:before] == UNKNOWN).all()
    assert np.array_equal(t.experts[before:], sent(t.tokens[before:]))


@story_on(on_bench)
async def test_they_come_with_their_tokens_however_many_come_at_once(bench: Bench) -> None:
    turns = [bench.open() for _ in range(80)]  # more than rows there are at first
    for n in range(ROW_TOKENS + 9):
        rows = [(r, [n + i] * (1 + i % 3), RUNNING) for i, (_, r, _) in enumerate(turns)]
        await bench.commits.put("a", flush(*rows))
    await bench.commits.put("a", flush((turns[0][1], list(range(3 * ROW_TOKENS)), STOP)))
    assert await turns[0][2] == STOP
    await bench.commits.settled()
    for t, _, _ in turns:
        holds(t)


@story_on(on_bench)
async def test_an_engine_without_any_leaves_them_unknown(bench: Bench) -> None:
    (t, one, _), (u, two, _) = bench.open(), bench.open()
    await bench.commits.put("plain", flush((two, [5, 6], RUNNING), experts=False))
    await bench.commits.put("moe", flush((one, [7], RUNNING)))
    await bench.commits.put("plain", flush((one, [8], STOP), experts=False))
    await bench.commits.settled()
    assert t.experts[len(PROMPT) :].tolist() == [sent(np.array([7]))[0].tolist(), [UNKNOWN] * 4]
    assert (u.experts == UNKNOWN).all()


@story_on(on_bench)
async def test_a_dense_model_costs_nothing(bench: Bench) -> None:
    t, request, done = bench.open()
    await bench.commits.put("a", flush((request, [1, 2], STOP), experts=False))
    assert await done == STOP
    assert t.experts.shape == (0, 0)


@pytest.mark.parametrize("wrong", [np.zeros((1, 4), np.int16), np.zeros((2, 4), np.int64)])
@story_on(on_bench)
async def test_experts_that_do_not_fit_their_tokens_are_refused(
    bench: Bench, wrong: np.ndarray
) -> None:
    _, request, _ = bench.open()
    good = flush((request, [1, 2], RUNNING))
    columns = (good.ids, good.counts, good.tokens, good.logprobs, good.unmodified)
    with pytest.raises(BadMessage, match="experts"):
        bad = Tokens(*columns, good.versions, good.finish, 0, wrong)
        await bench.commits.put("engine/3", bad)


def token_rows(*rows: tuple[int, list[int]], experts: bool = True) -> TokenRows:
    tokens = np.array([token for _, ts in rows for token in ts], np.int32)
    return TokenRows(
        ids=np.array([trajectory for trajectory, _ in rows], np.int64),
        counts=np.array([len(ts) for _, ts in rows], np.int32),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        experts=sent(tokens) if experts else NO_EXPERTS,
    )


def test_a_shard_that_starts_again_has_them_and_what_a_tool_appended_has_none(
    tmp_path: Path,
) -> None:
    ledger = Ledger(HOST, tmp_path, "1")
    ledger.begin()
    records: list[tuple[Kind, Any]] = [
        (Kind.OPEN, [0, 0, 0, 0, [1, 2, 3]]),
        (Kind.TOKENS, token_rows((0, list(range(10, 150))))),
        (Kind.TURN, [0, "said"]),
        (Kind.APPEND, [0, [9, 9]]),
        (Kind.TOKENS, token_rows((0, [20]), (1, [77]))),
        (Kind.TOKENS, token_rows((0, [21]), experts=False)),
    ]
    ledger.append(records, [0])
    found = Restored()
    for record in read(tmp_path):
        found.apply(record, lambda group, member: 0)
    t = found.trajectories[0]
    known = np.flatnonzero((t.experts != UNKNOWN).all(1)).tolist()
    assert known == [*range(3, 143), 145]
    assert np.array_equal(t.experts[known], sent(t.tokens[known]))
    t.begin([1, 2, 3])
    t.sampled(*token_rows((0, [5]), experts=False).columns(slice(None)))
    assert (t.experts == UNKNOWN).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=20))
def test_rows_keep_them_apart(script: list[tuple[int, int]]) -> None:
    staging = Staging()
    ts = [Trajectory(0, member, 0, 0, 0) for member in range(4)]
    for t in ts:
        t.begin(PROMPT)
    loop = asyncio.new_event_loop()
    requests = [staging.open(t, loop.create_future()) for t in ts]
    for n, (member, count) in enumerate(script):
        rows = staging.rows_of(np.array([requests[member].id]))
        staging.add(rows, token_rows((ts[member].id, [17 * n + i for i in range(count)])))
    for t, request in zip(ts, requests, strict=True):
        staging.close(request.id)
        if t.length > len(PROMPT):
            holds(t)


def test_a_flush_is_cut_with_them() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    made = Flush(
        ids=np.array([1, 2]),
        counts=np.array([1, 2], np.int32),
        tokens=tokens,
        logprobs=np.zeros(3, np.float32),
        unmodified=np.zeros(0, np.float32),
        versions=np.zeros(3, np.int32),
        finish=np.zeros(2, np.int8),
        experts=sent(tokens),
    )
    routes: Any = [("somebody", 10), ("me", 20)]
    mine = cut(made, routes, [False, True], 0, 3)
    assert np.array_equal(mine.experts, sent(tokens)[1:])
    body, buffers = messages.encode(mine)
    again = messages.decode(Tokens, body, buffers)
    assert again.experts.dtype == np.int16 and np.array_equal(again.experts, mine.experts)


def test_a_group_is_stored_with_them() -> None:
    tokens = np.arange(6, dtype=np.int32)
    group = Group(
        group=1,
        prompt=2,
        lengths=np.array([2, 4], np.int32),
        tokens=tokens,
        logprobs=np.zeros(6, np.float32),
        versions=np.zeros(6, np.int32),
        rewards=np.zeros(2, np.float32),
        experts=laid_out([(NO_EXPERTS, 2), (sent(tokens[2:]), 4)]),
        expert_shape=[2, 2],
    )
    again = blob.unpack(Group, blob.pack(group))
    assert again.expert_shape == [2, 2]
    assert again.experts.tolist() == [[UNKNOWN] * 4] * 2 + sent(tokens[2:]).tolist()
