"""Desired and actual state of gangs, the same on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio

from common.errors import Fenced, NotFound
from common.state import events, gangs, leader, registry
from common.state.client import State
from tests.contract.state.state_bench import Bench


async def lead(bench: Bench, owner: str = "planner/0", ttl_ms: int = 600_000) -> int:
    return await leader.campaign(bench.state, "planner", owner, ttl_ms)


async def test_a_worker_that_joins_is_an_idle_gang(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    joined = await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu:0")
    assert joined.workers == ["worker/g0"] and joined.accelerator == "cpu:0"
    assert (joined.desired_role, joined.actual_role, joined.epoch) == ("idle", "idle", 0)
    assert await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu:0") == joined
    assert await gangs.gangs(bench.state) == [joined]
    assert await gangs.gang(bench.state, "g1") is None


async def test_only_the_leader_decides(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    old = await lead(bench, "a", ttl_ms=20)
    await bench.pass_ms(50)
    new = await lead(bench, "b")
    with pytest.raises(Fenced):
        await gangs.set_desired(bench.state, old, "g0", "rollout", "job", False, "", "op1")
    assert await gangs.set_desired(bench.state, new, "g0", "rollout", "job", False, "", "op1") == 1
    with pytest.raises(NotFound):
        await gangs.set_desired(bench.state, new, "g9", "rollout", "job", False, "", "op2")


async def test_a_decision_sent_twice_counts_once(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    led = await lead(bench)
    details = {"stage_s": {"rollout": 2.5, "training": 1.0}, "threshold": 1.15}
    for _ in range(2):
        epoch = await gangs.set_desired(
            bench.state, led, "g0", "training", "job", True, "slow", "op", details=details
        )
        assert epoch == 1
    found = await gangs.gang(bench.state, "g0")
    assert found and (found.desired_role, found.desired_job, found.desired_core) == (
        "training",
        "job",
        True,
    )
    decided = [e for e in await events.read_all(bench.state) if e.kind == "desired"]
    assert len(decided) == 1
    assert decided[0].fields["stage_s"] == details["stage_s"]
    assert decided[0].fields["core"] is True and decided[0].fields["from_role"] == "idle"


async def test_a_report_counts_for_the_decision_it_was_made_under(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    led = await lead(bench)
    await gangs.set_desired(bench.state, led, "g0", "rollout", "job", False, "", "op1")
    assert await gangs.report_actual(bench.state, "g0", token, 1, "rollout", "ready")
    assert await gangs.report_actual(bench.state, "g0", token, 1, "rollout", "ready")
    found = await gangs.gang(bench.state, "g0")
    assert found and found.settled
    await gangs.set_desired(bench.state, led, "g0", "training", "job", False, "", "op2")
    assert not await gangs.report_actual(bench.state, "g0", token, 1, "rollout", "draining")
    found = await gangs.gang(bench.state, "g0")
    assert found and found.actual_state == "ready" and not found.settled
    kinds = [event.kind for event in await events.read_all(bench.state)]
    assert kinds.count("actual") == 1


async def test_a_worker_that_lost_its_lease_reports_nothing(bench: Bench) -> None:
    old = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", old, "cpu")
    led = await lead(bench)
    await gangs.set_desired(bench.state, led, "g0", "rollout", "job", False, "", "op1")
    await gangs.report_actual(bench.state, "g0", old, 1, "rollout", "ready")
    new = await bench.seat("worker/g0")
    with pytest.raises(Fenced):
        await gangs.report_actual(bench.state, "g0", old, 1, "rollout", "ready")
    with pytest.raises(Fenced):
        await gangs.join_gang(bench.state, "g0", "worker/g0", old, "cpu")
    again = await gangs.join_gang(bench.state, "g0", "worker/g0", new, "cpu")
    assert (again.desired_role, again.epoch) == ("rollout", 1)
    assert (again.actual_role, again.actual_epoch) == ("idle", 0)
    assert await gangs.report_actual(bench.state, "g0", new, 1, "rollout", "starting")


async def test_a_gang_of_several_workers_names_them_all(bench: Bench) -> None:
    for worker in ("worker/a", "worker/b"):
        token = await bench.seat(worker)
        joined = await gangs.join_gang(bench.state, "g0", worker, token, "gpu")
    assert joined.workers == ["worker/a", "worker/b"]


async def test_a_lost_gang_is_marked_once(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    led = await lead(bench)
    await gangs.lose_gang(bench.state, led, "g0", "its lease ended")
    await gangs.lose_gang(bench.state, led, "g0", "its lease ended")
    found = await gangs.gang(bench.state, "g0")
    assert found and found.actual_state == "lost"
    with pytest.raises(Fenced):
        await gangs.lose_gang(bench.state, led + 1, "g0", "its lease ended")
    assert [e.kind for e in await events.read_all(bench.state)].count("lost") == 1


async def test_a_move_that_is_asked_for_is_on_record_until_it_is_settled(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    led = await lead(bench, "a")
    assert await gangs.moves_asked_for(bench.state) == []
    asked = [gangs.MoveRequest("g0", "training", "m1"), gangs.MoveRequest("g0", "rollout", "m0")]
    for move in asked:
        for _ in range(2):
            await gangs.request_move(bench.state, move.gang, move.role, move.op_id)
        await bench.pass_ms(5)
    assert await gangs.moves_asked_for(bench.state) == asked
    await gangs.set_desired(
        bench.state, led, "g0", "training", "job", False, "asked", "m1", pinned=True
    )
    assert await gangs.moves_asked_for(bench.state) == asked[1:]
    found = await gangs.gang(bench.state, "g0")
    assert found and found.pinned


async def test_a_declined_move_is_off_the_record(bench: Bench) -> None:
    led = await lead(bench, "a")
    await gangs.request_move(bench.state, "g7", "training", "m1")
    with pytest.raises(Fenced):
        await gangs.decline_move(bench.state, led + 1, "m1", "there is no gang g7")
    for _ in range(2):
        await gangs.decline_move(bench.state, led, "m1", "there is no gang g7")
    assert await gangs.moves_asked_for(bench.state) == []
    assert [e.kind for e in await events.read_all(bench.state)].count("move_declined") == 1


async def test_a_move_is_under_way_until_it_is_finished_and_told_of_once(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    led = await lead(bench, "a")
    details = {"policy": "stage_time", "rollout_s": 0.1234567890123456789, "before": {}}
    for _ in range(2):
        epoch = await gangs.set_desired(
            bench.state, led, "g0", "training", "job", False, "", "op", details=details
        )
    [move] = await gangs.moves_under_way(bench.state)
    assert (move.gang, move.epoch, move.details) == ("g0", epoch, details)
    await bench.pass_ms(20)
    with pytest.raises(Fenced):
        await gangs.finish_move(bench.state, led + 1, move, move.details)
    for _ in range(2):
        await gangs.finish_move(bench.state, led, move, move.details | {"others": {}})
    assert await gangs.moves_under_way(bench.state) == []
    [told] = [e.fields for e in await events.read_all(bench.state) if e.kind == "move"]
    assert told["finished_ms"] - told["started_ms"] >= 20
    assert told == details | {
        "others": {},
        "gang": "g0",
        "epoch": epoch,
        "started_ms": move.started_ms,
        "finished_ms": told["finished_ms"],
    }


async def test_the_next_decision_about_a_gang_replaces_its_move(bench: Bench) -> None:
    token = await bench.seat("worker/g0")
    await gangs.join_gang(bench.state, "g0", "worker/g0", token, "cpu")
    led = await lead(bench, "a")
    for role in ("training", "rollout"):
        await gangs.set_desired(
            bench.state, led, "g0", role, "job", False, "", role, details={"to": role}
        )
        if role == "training":
            [first] = await gangs.moves_under_way(bench.state)
    await gangs.finish_move(bench.state, led, first, first.details)
    [second] = await gangs.moves_under_way(bench.state)
    assert second.details == {"to": "rollout"}
    await gangs.set_desired(bench.state, led, "g0", "idle", "", False, "release", "last")
    assert await gangs.moves_under_way(bench.state) == []
    assert "move" not in {e.kind for e in await events.read_all(bench.state)}


async def test_a_worker_reads_as_little_however_many_gangs_there_are(bench: Bench) -> None:
    async def read() -> int:
        told = Telling(bench.state.client)
        state = State("told", told, redis.Redis())  # type: ignore[arg-type]
        found = await gangs.gang(state, "g0")
        assert found is not None and found.id == "g0" and await gangs.gang(state, "g1000") is None
        return told.characters

    for number in range(200):
        token = await bench.seat(f"worker/g{number}")
        await gangs.join_gang(bench.state, f"g{number}", f"worker/g{number}", token, "cpu")
        if number == 0:
            alone = await read()
    assert await read() == alone


class Telling:
    """A client of Redis that counts what it was answered."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self.characters = 0

    async def execute_command(self, *words: Any) -> Any:
        reply = await self._client.execute_command(*words)
        self.characters += len(repr(reply))
        return reply


async def test_a_gang_does_what_its_worker_does_that_is_furthest_from_done(bench: Bench) -> None:
    tokens = {}
    for worker in ("worker/a", "worker/b"):
        tokens[worker] = await bench.seat(worker)
        joined = await gangs.join_gang(bench.state, "g0", worker, tokens[worker], "gpu", size=2)
        assert joined.whole == (worker == "worker/b")
    led = await lead(bench)
    await gangs.set_desired(bench.state, led, "g0", "training", "job", True, "", "op1")

    async def report(worker: str, status: str, detail: str = "") -> gangs.Gang:
        token = tokens[worker]
        assert await gangs.report_actual(bench.state, "g0", token, 1, "training", status, detail)
        found = await gangs.gang(bench.state, "g0")
        assert found is not None
        return found

    assert (await report("worker/a", "ready")).actual_state == "starting"
    assert (await report("worker/b", "starting")).actual_state == "starting"
    assert (await report("worker/b", "ready")).settled
    failed = await report("worker/a", "failed", "out of memory")
    assert (failed.actual_state, failed.detail) == ("failed", "out of memory")
    assert (await report("worker/b", "ready")).detail == "out of memory"
    assert (await report("worker/a", "ready")).settled


async def test_a_lost_gang_is_lost_until_all_its_workers_are_back(bench: Bench) -> None:
    tokens = {worker: await bench.seat(worker) for worker in ("worker/a", "worker/b")}
    for worker, token in tokens.items():
        await gangs.join_gang(bench.state, "g0", worker, token, "gpu", size=2)
    led = await lead(bench)
    await gangs.set_desired(bench.state, led, "g0", "training", "job", True, "", "op1")
    await registry.evict(bench.state, "worker/b", (await incarnation(bench, "worker/b")))
    await gangs.lose_gang(bench.state, led, "g0", "its worker is gone")
    await gangs.report_actual(bench.state, "g0", tokens["worker/a"], 1, "training", "ready")
    found = await gangs.gang(bench.state, "g0")
    assert found and (found.actual_state, found.detail) == ("lost", "its worker is gone")
    back = await bench.seat("worker/b")
    await gangs.join_gang(bench.state, "g0", "worker/b", back, "gpu", size=2)
    await gangs.report_actual(bench.state, "g0", tokens["worker/a"], 1, "training", "ready")
    await gangs.report_actual(bench.state, "g0", back, 1, "training", "ready")
    found = await gangs.gang(bench.state, "g0")
    assert found and found.settled


@pytest.mark.parametrize(("was", "now"), [(2, 1), (3, 2), (1, 2)])
async def test_a_gang_that_comes_back_in_another_size_is_of_its_new_workers(
    bench: Bench, was: int, now: int
) -> None:
    def names(size: int) -> list[str]:
        return ["worker/g0", *(f"worker/g0.{rank}" for rank in range(1, size))]

    for worker in names(was):
        token = await bench.seat(worker)
        await gangs.join_gang(bench.state, "g0", worker, token, "cpu", size=was)
    tokens = {worker: await bench.seat(worker) for worker in reversed(names(now))}
    for worker, token in tokens.items():  # the first one last: they start in any order
        joined = await gangs.join_gang(bench.state, "g0", worker, token, "cpu", size=now)
    assert (joined.workers, joined.size, joined.whole) == (names(now), now, True)
    led = await lead(bench)
    await gangs.set_desired(bench.state, led, "g0", "training", "job", True, "", "op1")
    for token in tokens.values():
        await gangs.report_actual(bench.state, "g0", token, 1, "training", "ready")
    found = await gangs.gang(bench.state, "g0")
    assert found and found.settled


async def incarnation(bench: Bench, name: str) -> str:
    entry = await registry.lookup(bench.state, name)
    assert entry is not None
    return entry.incarnation
