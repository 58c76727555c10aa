"""Group commit: whatever engines flush, and whenever they go, ledger and trajectories agree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.api.engine import Finish, Tokens
from meshrl.common.base.errors import BadMessage
from meshrl.common.base.random import Random
from meshrl.common.records.token_record import TokenRows
from meshrl.services.rollout.record.group_commit import WINDOW_S, GroupCommit
from meshrl.services.rollout.record.staging import OpenRequest
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on

RUNNING, STOP, ABORTED = Finish.RUNNING, Finish.STOP, Finish.ABORTED
PROMPT = [7, 8, 9]


@dataclass
class Written:
    """Keeps what a ledger would hold, in order; writes nothing while `full`."""

    clock: VirtualClock
    tokens_of: dict[int, list[int]] = field(default_factory=dict)
    records: int = 0
    full: bool = False

    async def tokens(self, rows: TokenRows) -> None:
        while self.full:
            await self.clock.sleep(0.5)
        self.records += 1
        at = 0
        for identity, count in zip(rows.ids.tolist(), rows.counts.tolist(), strict=True):
            assert count > 0
            self.tokens_of.setdefault(identity, []).extend(rows.tokens[at : at + count].tolist())
            at += count


class Bench:
    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock = clock
        self.mesh = alone(
            "rollout/job/0", clock, random, SimulatedHost(clock, random.child("host"))
        )
        self.written = Written(clock)
        self.commits = GroupCommit(self.mesh, self.written)
        self.made = 0

    def open(self, recorded: bool = True) -> tuple[Trajectory, OpenRequest, asyncio.Future[int]]:
        self.made += 1
        t = Trajectory(self.made // 8, self.made % 8, 0, 0, 0)
        t.recorded = recorded
        t.begin(PROMPT)
        request = self.commits.open(t)
        return t, request, request.done

    def in_ledger(self, t: Trajectory) -> list[int]:
        return self.written.tokens_of.get(t.id, [])


def on_bench(story: Callable[[Bench], Any]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(Bench(clock, random))

    run_virtual(main, limit_s=3600.0)


def flush(*rows: tuple[OpenRequest, list[int], int]) -> Tokens:
    """Of (request, tokens, finish)."""
    tokens = np.array([token for _, ts, _ in rows for token in ts], np.int32)
    return Tokens(
        ids=np.array([request.id for request, _, _ in rows], np.int64),
        counts=np.array([len(ts) for _, ts, _ in rows], np.int32),
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        unmodified=np.zeros(0, np.float32),
        versions=tokens % 5,
        finish=np.array([finish for *_, finish in rows], np.int8),
        version=0,
    )


@story_on(on_bench)
async def test_a_turn_ends_once_its_last_token_is_written(bench: Bench) -> None:
    t, request, done = bench.open()
    bench.written.full = True
    await bench.commits.put("a", flush((request, [1, 2], RUNNING)))
    await bench.commits.put("a", flush((request, [3], STOP)))
    await bench.clock.sleep(5.0)
    assert t.length == 3 and not done.done()
    bench.written.full = False
    assert await done == STOP
    assert t.turn.tolist() == bench.in_ledger(t) == [1, 2, 3]
    assert t.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert t.versions.tolist() == [-1, -1, -1, 1, 2, 3]


@story_on(on_bench)
async def test_what_arrives_within_a_window_is_one_record(bench: Bench) -> None:
    turns = [bench.open() for _ in range(200)]
    await bench.commits.put("first", flush())
    await bench.commits.settled()
    for n in range(10):
        part = [(request, [n], RUNNING) for _, request, _ in turns[20 * n : 20 * n + 20]]
        await bench.commits.put(f"engine {n}", flush(*part))
    await bench.clock.sleep(2 * WINDOW_S)
    assert bench.written.records == 1
    assert all(t.length == 4 for t, _, _ in turns)


@story_on(on_bench)
async def test_tokens_count_as_they_are_written_though_nobody_has_woken(bench: Bench) -> None:
    t, request, done = bench.open()
    for n in range(500):  # more than a row holds
        await bench.commits.put("a", flush((request, [n], RUNNING)))
        await bench.commits.settled()
        assert t.length == 4 + n
        if n % 97 == 0:
            assert t.turn.tolist() == list(range(n + 1))
    await bench.commits.put("a", flush((request, list(range(500, 1000)), STOP)))
    assert await done == STOP
    assert t.turn.tolist() == bench.in_ledger(t) == list(range(1000))


@story_on(on_bench)
async def test_an_engine_that_goes_ends_its_requests_after_all_that_it_flushed(
    bench: Bench,
) -> None:
    t, request, done = bench.open()
    await bench.commits.put("a", flush((request, [1], RUNNING)))
    await bench.commits.put("a", flush((request, [2], RUNNING)))
    bench.commits.abort("a", [request.id])
    assert await done == ABORTED
    assert t.turn.tolist() == bench.in_ledger(t) == [1, 2]
    again = bench.commits.open(t)
    await bench.commits.put("a", flush((request, [9], STOP), (again, [3], RUNNING)))
    await bench.commits.settled()
    assert t.turn.tolist() == bench.in_ledger(t) == [1, 2, 3]


@story_on(on_bench)
async def test_evaluation_is_not_written_down(bench: Bench) -> None:
    off, request, done = bench.open(recorded=False)
    on, other, _ = bench.open()
    await bench.commits.put("a", flush((request, [1, 2], STOP), (other, [4], RUNNING)))
    assert await done == STOP
    assert (off.turn.tolist(), on.turn.tolist()) == ([1, 2], [4])
    assert bench.written.tokens_of == {on.id: [4]}
    assert bench.commits.sampled == 3


@story_on(on_bench)
async def test_columns_that_do_not_fit_are_refused(bench: Bench) -> None:
    _, request, _ = bench.open()
    good = flush((request, [1, 2], RUNNING))
    with pytest.raises(BadMessage, match="engine/3"):
        bad = replace(good, counts=good.counts + 1)
        await bench.commits.put("engine/3", bad)


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


@settings(max_examples=200)
@given(script=actions)
@story_on(on_bench)
async def test_ledger_and_trajectories_never_differ(bench: Bench, script: list[Any]) -> None:
    """Twelve trajectories over three engines: each token in flight is the next of its request."""
    turns = [bench.open(recorded=n % 5 != 4) for n in range(12)]
    sent = [0] * 12  # tokens made for the request that is out
    over: dict[int, asyncio.Future[int]] = {}

    def next_of(n: int, count: int, finish: int) -> tuple[OpenRequest, list[int], int]:
        first = 1000 * n + sent[n]
        sent[n] += count
        return turns[n][1], list(range(first, first + count)), finish

    for action, *given_ in script:
        match action:
            case "flush":
                engine, members = given_
                mine = [n for n in members if n % 3 == engine]
                rows = [next_of(n, 1 + n % 2, RUNNING) for n in mine]
                put = bench.commits.put(str(engine), flush(*rows))
                await asyncio.wait_for(put, 60)
            case "large":
                row = next_of(given_[0], 300, RUNNING)
                await bench.commits.put(str(given_[0] % 3), flush(row))
            case "end":
                n = given_[0]
                await bench.commits.put(str(n % 3), flush(next_of(n, 1, STOP)))
                over[n] = turns[n][2]
            case "forget":
                bench.commits.forget(turns[given_[0]][1])
            case "gone":
                mine = [n for n in range(12) if n % 3 == given_[0]]
                bench.commits.abort(str(given_[0]), [turns[n][1].id for n in mine])
            case "wait":
                await bench.clock.sleep(given_[0])
            case "full":
                bench.written.full = given_[0]
            case "read":
                assert turns[given_[0]][0].turn is not None
    bench.written.full = False
    await bench.commits.settled()
    for n, (t, request, _) in enumerate(turns):
        ours, theirs = t.turn.tolist(), bench.in_ledger(t)
        assert ours == list(range(1000 * n, 1000 * n + len(ours))), "skipped or doubled"
        if n % 5 == 4:
            assert theirs == []
        elif not forgotten(script, n):
            assert ours == theirs
        else:  # cancelled while it was being written: only the ledger counts from then on
            assert ours == theirs[: len(ours)]
        assert t.length == len(PROMPT) + len(ours)
        bench.commits.forget(request)
    for n, done in over.items():
        assert done.done() or forgotten(script, n)


def forgotten(script: list[Any], n: int) -> bool:
    return ("forget", n) in script
