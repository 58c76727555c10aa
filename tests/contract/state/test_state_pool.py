"""Workers, their gangs and what resides on them, the same on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshrl.common.base.errors import Fenced, Refused
from meshrl.common.mesh.process.supervision import exit_reports
from meshrl.common.state import events, jobs, leader, registry
from meshrl.common.state.pool.demand import measurements
from meshrl.common.state.pool.demand.measurements import (
    QUANTILES,
    DecodeCurve,
    LengthQuantiles,
    MeasuredWork,
)
from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    DissolveGang,
    FailJob,
    FinishMove,
    FormGang,
    MarkWorkerLost,
    PlaceInstance,
    Rationale,
    RejectRequest,
    RemoveInstance,
    SetBlockReason,
)
from meshrl.common.state.pool.scheduling.snapshot import Move, PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.planner_reports import JobPrediction
from meshrl.common.state.pool.store.submission_check import check_job_is_feasible, read_host_offers
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    TierBytes,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import StateClient
from tests.contract.state.state_bench import JOB, Bench, document
from tests.load import scaled

WHY = Rationale("default", JOB, {"figure": 0.1234567890123456789})


async def lead(bench: Bench, owner: str = "planner/0", ttl_ms: int = 600_000) -> int:
    return await leader.campaign(bench.state, "planner", owner, ttl_ms)


async def worker(bench: Bench, id: str = "w0", host: str = "here") -> WorkerRow:
    token = await bench.seat(f"worker/{id}")
    budget = TierBytes(accelerator=8, memory=16)
    row = WorkerRow(id, host, "cpu:0", token, budget=budget, network="fast")
    return await pool.join_worker(bench.state, row)


async def gang_of(bench: Bench, size: int = 1) -> tuple[int, list[WorkerRow]]:
    """Return a leader and the workers of g0, whose engine of the job spans all of them."""
    members = [await worker(bench, f"w{n}") for n in range(size)]
    led = await lead(bench)
    ids = tuple(member.id for member in members)
    await write(bench, led, FormGang("g0", ids, WHY), place(ranks=tuple(range(size))))
    return led, members


def place(op: str = "", move: Move | None = None, **fields: Any) -> PlaceInstance:
    resident = replace(Instance("g0.0", JOB, Role.ROLLOUT), **fields)
    return PlaceInstance("g0", resident, WHY, move, op)


async def write(bench: Bench, led: int, *decisions: Any, op: str = "") -> list[str]:
    op = op or f"op{await bench.state.run_command('INCR', 'ops')}"
    return [r.reason for r in await pool.write_decisions(bench.state, led, op, decisions, None)]


def said(
    member: WorkerRow, doing: InstancePhase = InstancePhase.READY, **fields: Any
) -> InstanceReport:
    report = InstanceReport(
        0, 1, 1, member.token, doing, Tier.ACCELERATOR, usage=TierBytes(accelerator=3)
    )
    return replace(report, **fields)


async def row(state: StateClient) -> Gang:
    found = await pool.read_gang(state, "g0")
    assert found is not None
    return found


async def told(state: StateClient, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in await events.read_all(state) if event.kind == kind]


async def test_a_worker_that_joins_is_idle_and_takes_up_its_record_again(bench: Bench) -> None:
    joined = await worker(bench)
    assert (joined.gang, joined.membership, joined.budget.memory) == ("", 0, 16)
    assert joined.network == "fast"
    assert await pool.join_worker(bench.state, joined) == joined
    assert await pool.read_workers(bench.state) == [joined]
    assert await pool.read_worker(bench.state, "w0") == joined
    assert await pool.read_worker(bench.state, "w1") is None
    assert len(await told(bench.state, "joined")) == 1
    with pytest.raises(Fenced):
        await pool.join_worker(bench.state, replace(joined, token=joined.token + 1))


async def test_idle_workers_become_a_gang_and_are_told_so_by_their_own_records(
    bench: Bench,
) -> None:
    before = [await worker(bench, f"w{n}") for n in range(3)]
    led = await lead(bench)
    assert await write(bench, led, FormGang("g0", ("w1", "w0"), WHY)) == []
    found = await row(bench.state)
    assert (found.workers, found.instances) == (("w1", "w0"), ())
    after = await pool.read_workers(bench.state)
    assert [one.gang for one in after] == ["g0", "g0", ""]
    assert [one.membership for one in after] == [found.membership, found.membership, 0]
    assert after[0].revision > before[0].revision and after[2].revision == before[2].revision
    refused = await write(
        bench, led, FormGang("g1", ("w2", "w1"), WHY), FormGang("g0", ("w2",), WHY)
    )
    assert refused == ["w1 is in g0", "g0 is no gang that is yet to come"]
    assert (await pool.read_gang(bench.state, "g1")) is None
    assert await write(bench, led, FormGang("g1", ("w9",), WHY)) == ["there is no worker w9"]
    [formed] = await told(bench.state, "gang")
    assert formed["workers"] == ["w1", "w0"] and formed["formed"] and formed["rule"] == "default"
    assert formed["figure"] == WHY.inputs["figure"]


async def test_a_gang_that_is_dissolved_leaves_idle_workers_and_its_id_is_not_used_again(
    bench: Bench,
) -> None:
    led, [member] = await gang_of(bench)
    was = await pool.read_worker(bench.state, "w0")
    assert await write(bench, led, DissolveGang("g0", WHY)) == []
    assert await pool.read_gangs(bench.state) == []
    now = await pool.read_worker(bench.state, "w0")
    assert was and now and (now.gang, now.membership) == ("", was.membership + 1)
    assert now.revision > was.revision
    assert not await pool.report_instance(bench.state, "w0", "g0", "g0.0", said(member))
    assert await write(bench, led, DissolveGang("g0", WHY)) == ["there is no gang g0"]
    assert await write(bench, led, FormGang("g0", ("w0",), WHY)) != []
    assert await write(bench, led, FormGang("g1", ("w0",), WHY)) == []
    assert [one["role"] for one in await told(bench.state, "desired")] == ["rollout", "idle"]


async def test_a_resident_is_placed_and_wished_otherwise_and_removed(bench: Bench) -> None:
    led, [_] = await gang_of(bench)
    [engine] = (await row(bench.state)).instances
    assert (engine.job, engine.role, engine.tier) == (JOB, "rollout", "accelerator")
    assert engine.desired_since_ms > 0 and not engine.is_reconciled
    before = await pool.read_worker(bench.state, "w0")
    assert await write(bench, led, place(epoch=2, tier=Tier.MEMORY)) == []
    assert await write(bench, led, place(epoch=1)) == [
        "g0.0 is at generation 1 and epoch 2 already"
    ]
    [engine] = (await row(bench.state)).instances
    after = await pool.read_worker(bench.state, "w0")
    assert (engine.epoch, engine.tier) == (2, "memory")
    assert before and after and after.revision == before.revision + 1
    elsewhere = replace(engine, id="g7.0")
    assert await write(bench, led, PlaceInstance("g7", elsewhere, WHY)) == ["there is no gang g7"]
    assert await write(bench, led, place(epoch=3, ranks=(1,))) == ["g0 has no rank 1"]
    assert await write(bench, led, RemoveInstance("g0", "g0.0", WHY)) == []
    assert await write(bench, led, RemoveInstance("g0", "g0.0", WHY)) == ["g0 has no resident g0.0"]
    assert (await row(bench.state)).instances == ()
    assert (await row(bench.state)).next_instance == 1
    assert await write(bench, led, place()) == ["g0.0 is no resident that is yet to come to g0"]
    assert await write(bench, led, place(id="g0.1")) == []
    first, second, removed, _ = await told(bench.state, "desired")
    assert (first["from_role"], second["from_role"]) == ("idle", "rollout")
    assert (removed["role"], removed["from_role"], removed["workers"]) == (
        "idle",
        "rollout",
        ["w0"],
    )
    assert first["reason"] == "default" and first["figure"] == WHY.inputs["figure"]
    assert first["core"] is False and first["pinned"] is False


async def test_a_report_counts_for_the_wish_that_it_was_made_under(bench: Bench) -> None:
    led, [member] = await gang_of(bench)
    state = bench.state
    assert await pool.report_instance(state, "w0", "g0", "g0.0", said(member))
    assert await pool.report_instance(state, "w0", "g0", "g0.0", said(member))
    assert (await row(state)).is_reconciled
    await write(bench, led, place(epoch=2))
    assert not (await row(state)).is_reconciled
    assert not await pool.report_instance(
        state, "w0", "g0", "g0.0", said(member, InstancePhase.MOVING)
    )
    assert not await pool.report_instance(state, "w0", "g0", "g0.9", said(member))
    assert not await pool.report_instance(state, "w0", "g0", "g0.0", said(member, epoch=2, rank=1))
    assert await pool.report_instance(state, "w0", "g0", "g0.0", said(member, epoch=2))
    [engine] = (await row(state)).instances
    assert engine.is_reconciled and engine.reports[0].usage.accelerator == 3
    actual = await told(state, "actual")
    assert [one["epoch"] for one in actual] == [1, 2]
    assert actual[0]["status"] == "ready" and actual[0]["tier"] == "accelerator"


async def test_a_resident_does_what_its_rank_does_that_is_furthest_from_done(
    bench: Bench,
) -> None:
    _, members = await gang_of(bench, size=2)

    async def report(rank: int, doing: InstancePhase, detail: str = "") -> Instance:
        saying = said(members[rank], doing, rank=rank, detail=detail)
        assert await pool.report_instance(bench.state, f"w{rank}", "g0", "g0.0", saying)
        [found] = (await row(bench.state)).instances
        return found

    assert (await report(0, InstancePhase.READY)).phase == InstancePhase.STARTING
    assert (await report(1, InstancePhase.READY)).is_reconciled
    failed = await report(0, InstancePhase.FAILED, "out of memory")
    assert (failed.phase, failed.detail) == ("failed", "out of memory")
    assert (await report(1, InstancePhase.DRAINING)).phase == InstancePhase.FAILED
    statuses = [one["status"] for one in await told(bench.state, "actual")]
    assert statuses == ["starting", "ready", "failed"]


async def test_a_new_start_of_a_worker_voids_what_it_said_and_stays_in_its_gang(
    bench: Bench,
) -> None:
    _, members = await gang_of(bench, size=2)
    for rank, member in enumerate(members):
        assert await pool.report_instance(
            bench.state, f"w{rank}", "g0", "g0.0", said(member, rank=rank)
        )
    assert (await row(bench.state)).is_reconciled
    again = await worker(bench, "w1")
    assert again.gang == "g0" and again.token != members[1].token
    [engine] = (await row(bench.state)).instances
    assert set(engine.reports) == {0}
    with pytest.raises(Fenced):
        await pool.report_instance(bench.state, "w1", "g0", "g0.0", said(members[1], rank=1))
    assert await pool.report_instance(bench.state, "w1", "g0", "g0.0", said(again, rank=1))
    assert (await row(bench.state)).is_reconciled


async def test_a_worker_is_lost_once_and_only_while_it_is_gone(bench: Bench) -> None:
    led, [member] = await gang_of(bench)
    await pool.report_instance(bench.state, "w0", "g0", "g0.0", said(member))
    assert await write(bench, led, MarkWorkerLost("w0", WHY)) == ["w0 is there"]
    assert await registry.release_lease(bench.state, "worker/w0", member.token)
    for _ in range(2):
        assert await write(bench, led, MarkWorkerLost("w0", WHY)) == []
    assert len(await told(bench.state, "lost")) == 1
    assert (await row(bench.state)).instances[0].reports == {}
    [seen] = (await pool.read_snapshot(bench.state, led)).snapshot.workers
    assert not seen.alive and seen.gang == "g0"
    back = await worker(bench)
    assert back.gang == "g0"
    await registry.release_lease(bench.state, "worker/w0", back.token)
    await write(bench, led, MarkWorkerLost("w0", WHY))
    assert len(await told(bench.state, "lost")) == 2


async def test_only_the_leader_looks_and_writes(bench: Bench) -> None:
    await worker(bench)
    old = await lead(bench, "a", ttl_ms=20)
    await bench.pass_ms(50)
    new = await lead(bench, "b")
    with pytest.raises(Fenced):
        await pool.read_snapshot(bench.state, old)
    with pytest.raises(Fenced):
        await write(bench, old, FormGang("g0", ("w0",), WHY))
    assert await write(bench, new, FormGang("g0", ("w0",), WHY)) == []


async def test_decisions_that_are_written_twice_count_once(bench: Bench) -> None:
    await worker(bench)
    led = await lead(bench)
    decisions: list[Any] = [
        FormGang("g0", ("w0",), WHY),
        place(),
        AssignServices("here", ("rollout/job/0",), WHY),
    ]
    for _ in range(2):
        assert await pool.write_decisions(bench.state, led, "op", decisions, {"seen": [1.5]}) == []
    assert len(await told(bench.state, "gang")) == len(await told(bench.state, "desired")) == 1
    found = await pool.read_snapshot(bench.state, led)
    assert (found.memory, found.revision) == ({"seen": [1.5]}, 1)


async def test_a_write_that_was_long_on_its_way_comes_too_late(bench: Bench) -> None:
    await worker(bench)
    led = await lead(bench)
    seen = await pool.read_snapshot(bench.state, led)
    assert await pool.write_decisions(bench.state, led, "a", [], {"term": 1}, seen.revision) == []
    with pytest.raises(Fenced):
        await pool.write_decisions(
            bench.state, led, "b", [FormGang("g0", ("w0",), WHY)], {"term": 0}, seen.revision
        )
    found = await pool.read_snapshot(bench.state, led)
    assert found.memory == {"term": 1} and found.snapshot.gangs == ()


async def test_people_are_shown_how_the_workers_were_divided_last(bench: Bench) -> None:
    assert await pool.read_entitlements(bench.state) == {}
    led = await lead(bench)
    for op, memory in (("a", {"entitled": {JOB: 2}}), ("b", None)):
        assert await pool.write_decisions(bench.state, led, op, [], memory) == []
        assert await pool.read_entitlements(bench.state) == {JOB: 2}
    assert await pool.read_predictions(bench.state) == {}, (
        "a leader that predicts nothing says nothing"
    )
    told = {"step_s": 0.8, "rollout_s": 0.8, "binds": "latency", "verdict": "no split is better"}
    assert await pool.write_decisions(bench.state, led, "c", [], {"explained": {JOB: told}}) == []
    found = await pool.read_predictions(bench.state)
    assert found == {JOB: JobPrediction(0.8, 0.8, 0.0, 0.0, "latency", "no split is better", None)}


async def test_a_leader_that_resumes_after_another_has_led_grants_nothing_again(
    bench: Bench,
) -> None:
    await worker(bench)
    await pool.submit_request(bench.state, PoolRequest("m0", "move", "w0", "rollout", JOB))
    ttl_ms = round(1000 * min(5.0, scaled(1.0)))
    old = await lead(bench, "a", ttl_ms=ttl_ms)
    seen = await pool.read_snapshot(bench.state, old)
    granted: list[Any] = [FormGang("g0", ("w0",), WHY), place(op="m0")]
    await bench.pass_ms(ttl_ms + 100)
    new = await lead(bench, "b")
    there = await pool.read_snapshot(bench.state, new)
    assert there.snapshot.requests == seen.snapshot.requests != ()
    assert await pool.write_decisions(bench.state, new, "b1", granted, None, there.revision) == []
    with pytest.raises(Fenced):
        await pool.write_decisions(bench.state, old, "a1", granted, None, seen.revision)
    assert [one["op"] for one in await told(bench.state, "desired")] == ["m0"]
    assert (await pool.read_snapshot(bench.state, new)).snapshot.requests == ()


async def test_many_decisions_are_written_in_chunks_and_the_memory_with_the_last(
    bench: Bench,
) -> None:
    count = pool.DECISIONS_PER_SCRIPT // 2 + 8
    for n in range(count):
        await worker(bench, f"w{n}")
    led = await lead(bench)
    decisions: list[Any] = [FormGang(f"g{n}", (f"w{n}",), WHY) for n in range(count)]
    for n in range(count):
        decisions.append(PlaceInstance(f"g{n}", Instance(f"g{n}.0", JOB, Role.ROLLOUT), WHY))
    for _ in range(2):
        assert await pool.write_decisions(bench.state, led, "op", decisions, {"n": 1}, 0) == []
    found = await pool.read_snapshot(bench.state, led)
    assert found.revision == 2 and found.memory == {"n": 1}
    assert found.snapshot.gangs_formed == len(found.snapshot.gangs) == count
    assert [gang.id for gang in found.snapshot.gangs] == [f"g{n}" for n in range(count)]
    assert all(len(gang.instances) == 1 for gang in found.snapshot.gangs)


async def test_a_look_has_all_that_is_decided_from(bench: Bench) -> None:
    led, [member] = await gang_of(bench)
    state = bench.state
    await pool.report_instance(state, "w0", "g0", "g0.0", said(member))
    assert await pool.read_settings(state) == PoolSettings()
    up_ms = await pool.write_settings(state, PoolSettings(worker_lost_s=3.0))
    assert await pool.read_settings(state) == PoolSettings(worker_lost_s=3.0)
    about = document(groups_per_step=3)
    about["pool"] |= {"priority": 2, "workers": {"least": 2, "most": 0}}
    await jobs.submit(state, JOB, about, "/runs/job", "op")
    await jobs.submit(state, "ended", about, "/runs/ended", "op")
    await jobs.cancel(state, "ended", "op")
    stats = {"job": JOB, "resident": "g0.0", "tokens": 7}
    engine = registry.RegistryEntry("engine/g0.0", "engine", incarnation="i", stats=stats)
    await registry.register(state, engine, 600_000)
    await registry.register(
        state, registry.RegistryEntry("node/here", "node", incarnation="n"), 600_000
    )
    await write(bench, led, AssignServices("here", ("rollout/job/0", "sandbox/job/0"), WHY))
    found = (await pool.read_snapshot(state, led)).snapshot
    assert found.workers[0] == await pool.read_worker(state, "w0") and found.workers[0].alive
    assert found.gangs == (await row(state),)
    [job] = found.jobs
    assert (job.id, job.phase, job.groups_per_step) == (JOB, "queued", 3)
    assert (
        job.requirements.priority,
        job.requirements.min_workers,
        job.requirements.max_workers,
    ) == (2, 2, 0)
    assert job.instance_progress == {"g0.0": 7}
    [host] = found.hosts
    assert (host.name, host.alive, host.drain_reason) == ("here", True, "")
    assert host.services == await pool.read_host_services(state, "here") != ()
    assert (found.settings.worker_lost_s, found.up_since_ms, found.gangs_formed) == (3.0, up_ms, 1)
    assert found.now_ms >= up_ms


async def test_a_look_has_what_processes_have_measured_each_for_itself(bench: Bench) -> None:
    led, [_] = await gang_of(bench)
    state = bench.state
    await jobs.submit(state, JOB, document(groups_per_step=3), "/runs/job", "op")
    curve = DecodeCurve("cpu", 2, 0.02, 0.0005, prefill_tokens_per_s=6000.0, fitted_steps=80)
    shard, core = (
        MeasuredWork(groups=3, sampled=40, flight_s=7.5),
        MeasuredWork(steps=2, busy_s=1.25),
    )
    lengths = LengthQuantiles(40, tuple(10.0 * n for n in range(len(QUANTILES))), 7.5)
    said: dict[str, dict[str, Any]] = {
        "rollout/job/0": {
            **{"work": measurements.encode_work(shard), "histogram": [1] * 100},
            "lengths": lengths.encode(),
        },
        "trainer/g1.0": {"work": measurements.encode_work(core), "resident": "g1.0"},
        "engine/g0.0": {"gang": "g0", "resident": "g0.0", "curve": curve.encode()},
        "engine/g2.0": {"gang": "g2", "resident": "g2.0"},
    }
    for name, stats in said.items():
        entry = registry.RegistryEntry(name, name.partition("/")[0], stats=stats | {"job": JOB})
        entry.incarnation = "i"
        await registry.register(state, entry, 600_000)
    about = {"cores": 2.0, "busy_cores": 1.5}
    agent = registry.RegistryEntry("node/here", "node", host="here", incarnation="n", stats=about)
    await registry.register(state, agent, 600_000)
    found = (await pool.read_snapshot(state, led)).snapshot
    [job], [host] = found.jobs, found.hosts
    assert job.measurements.work_by_process == {"rollout/job/0i": shard, "trainer/g1.0i": core}
    assert job.measurements.curves == (curve,)
    assert job.measurements.lengths == lengths
    assert (host.cores, host.busy_cores) == (2.0, 1.5)
    text = await state.run_command("HGET", "{mesh}:look:counted", "rollout/job/0")
    assert "histogram" not in text and "queue_s" not in text


async def test_a_look_has_what_each_host_takes_also_of_those_that_are_away(bench: Bench) -> None:
    led, state = await lead(bench), bench.state
    said: dict[str, dict[str, Any]] = {
        "one": {"takes": ["shards"], "tiers": []},
        "two": {"takes": []},
        "three": {},
    }
    for host, stats in said.items():
        agent = registry.RegistryEntry(
            f"node/{host}", "node", host=host, incarnation="n", stats=stats | {"trip_ms": 1.0}
        )
        await registry.register(state, agent, 600_000)
        await write(bench, led, AssignServices(host, (f"rollout/{host}/0",), WHY))
    for alive in (True, False):
        hosts = {host.name: host for host in (await pool.read_snapshot(state, led)).snapshot.hosts}
        assert {host.alive for host in hosts.values()} == {alive}
        assert (hosts["one"].accepted_services, hosts["one"].isolation_tiers) == (("shards",), ())
        assert (hosts["two"].accepted_services, hosts["two"].isolation_tiers) == ((), None)
        assert (hosts["three"].accepted_services, hosts["three"].isolation_tiers) == (
            ("shards", "sandboxes"),
            None,
        )
        assert {
            h.name: (h.accepted_services, h.isolation_tiers, h.alive)
            for h in await read_host_offers(state)
        } == {
            name: (host.accepted_services, host.isolation_tiers, alive)
            for name, host in hosts.items()
        }
        for host in said:
            await registry.evict(state, f"node/{host}", "n")
    assert dict(await pool.read_all_services(state)) == {host: f"rollout/{host}/0" for host in said}


async def test_a_job_is_refused_whose_isolation_no_host_has_that_takes_sandboxes(
    bench: Bench,
) -> None:
    state, job = bench.state, JobRequirements(sandboxes=1, isolation_tier="bwrap")

    async def says(host: str, takes: list[str], tiers: list[str]) -> None:
        about = {"takes": takes, "tiers": tiers}
        agent = registry.RegistryEntry(
            f"node/{host}", "node", host=host, incarnation=host, stats=about
        )
        await registry.evict(state, f"node/{host}", host)
        await registry.register(state, agent, 600_000)

    await check_job_is_feasible(state, job)  # no host has joined yet
    await says("head", ["shards"], [])
    await check_job_is_feasible(state, job)  # it waits for a host that takes sandboxes
    await says("s1", ["sandboxes"], ["trying"])
    await check_job_is_feasible(state, job)
    await says("s1", ["sandboxes"], ["landlock"])
    await says("s2", ["shards", "sandboxes"], [])
    with pytest.raises(Refused, match="s1 has landlock; s2 has no isolation") as caught:
        await check_job_is_feasible(state, job)
    assert "head" not in str(caught.value) and "meshrl doctor" in caught.value.fix
    await check_job_is_feasible(state, JobRequirements(sandboxes=1))
    await says("s2", ["shards", "sandboxes"], ["cgroup"])
    await check_job_is_feasible(state, job)
    with pytest.raises(Refused, match="a container for each call"):
        await check_job_is_feasible(state, JobRequirements(sandboxes=1, isolation_tier="runner"))


async def test_documents_of_jobs_are_sent_once(bench: Bench) -> None:
    led = await lead(bench)
    await jobs.submit(bench.state, JOB, document() | {"long": "x" * 4096}, "/runs/job", "op")
    args: dict[str, Any] = {"election": "planner", "token": led, "known": []}
    [sent] = (await bench.state.run_script("snapshot", ["{mesh}"], args))["jobs"]
    assert sent["document"]["long"]
    args["known"] = [sent["digest"]]
    [again] = (await bench.state.run_script("snapshot", ["{mesh}"], args))["jobs"]
    assert again["document"] is None
    for _ in range(2):
        [job] = (await pool.read_snapshot(bench.state, led)).snapshot.jobs
        assert job.id == JOB
    changed = document(steps=60)
    changed["pool"]["share"] = 3.0
    await jobs.change_document(bench.state, JOB, changed, {}, "change")
    [job] = (await pool.read_snapshot(bench.state, led)).snapshot.jobs
    assert job.requirements.share == 3.0


async def test_a_move_is_under_way_until_it_is_finished_and_told_of_once(bench: Bench) -> None:
    await worker(bench)
    led = await lead(bench)
    move = Move("g0.0", "g0", 100, 200, {"back": [1]}, {"policy": "stage_time"})
    await write(bench, led, FormGang("g0", ("w0",), WHY), place(move=move))
    assert (await pool.read_snapshot(bench.state, led)).snapshot.moves == (move,)
    assert await pool.read_moves_in_progress(bench.state) == [move]
    later = replace(move, started_ms=300, deadline_ms=400)
    done = FinishMove(move, True, {"policy": "stage_time", "others": {}}, WHY)
    assert await write(bench, led, place(epoch=2, move=later), done) == []
    assert (await pool.read_snapshot(bench.state, led)).snapshot.moves == (later,)
    [finished] = await told(bench.state, "move")
    assert finished["undone"] is True and finished["others"] == {}
    assert (finished["resident"], finished["started_ms"]) == ("g0.0", 100)
    await write(bench, led, RemoveInstance("g0", "g0.0", WHY))
    await write(bench, led, replace(done, move=later))
    assert (await pool.read_snapshot(bench.state, led)).snapshot.moves == ()
    assert await pool.read_moves_in_progress(bench.state) == []
    assert len(await told(bench.state, "move")) == 1


async def test_what_people_ask_for_is_on_record_until_it_is_granted_or_declined(
    bench: Bench,
) -> None:
    led, _ = await gang_of(bench)
    asked = [PoolRequest(f"m{n}", "move", "w0", "training", JOB) for n in (1, 0)]
    for one in asked:
        for _ in range(2):
            await pool.submit_request(bench.state, one)
        await bench.pass_ms(5)

    async def on_record() -> list[str]:
        return [one.op for one in (await pool.read_snapshot(bench.state, led)).snapshot.requests]

    assert await on_record() == ["m1", "m0"]
    await write(bench, led, place(epoch=2, op="m1", pinned=True))
    assert await on_record() == ["m0"]
    for _ in range(2):
        await write(bench, led, RejectRequest("m0", "it is the core", WHY))
    assert await on_record() == []
    [declined] = await told(bench.state, "move_declined")
    assert (declined["op"], declined["reason"]) == ("m0", "it is the core")
    assert (await told(bench.state, "desired"))[-1]["op"] == "m1"


async def test_a_host_drains_from_the_moment_that_it_is_asked_for(bench: Bench) -> None:
    await worker(bench)
    led = await lead(bench)

    async def draining() -> str:
        return (await pool.read_snapshot(bench.state, led)).snapshot.hosts[0].drain_reason

    assert await draining() == ""
    await pool.submit_request(bench.state, PoolRequest("d", "drain", host="here"))
    assert await draining() != ""
    await write(bench, led, RejectRequest("d", "", WHY))
    assert await draining() != "" and len(await told(bench.state, "drain_settled")) == 1
    await pool.submit_request(bench.state, PoolRequest("e", "drain", host="here"))
    await write(bench, led, RejectRequest("e", "it has the only engine", WHY))
    assert await draining() == ""


async def test_a_job_that_goes_on_is_waited_for_anew(bench: Bench) -> None:
    led = await lead(bench)
    await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    for _ in range(2):
        await write(bench, led, SetBlockReason(JOB, "waiting: no worker is free", WHY))
    held = await jobs.read_job(bench.state, JOB)
    assert (
        held.block_reason == "waiting: no worker is free"
        and held.blocked_since_ms >= held.progress_ms
    )
    [seen] = (await pool.read_snapshot(bench.state, led)).snapshot.jobs
    assert seen.block_reason == held.block_reason
    await bench.pass_ms(20)
    await write(bench, led, SetBlockReason(JOB, "", WHY))
    runs = await jobs.read_job(bench.state, JOB)
    assert (
        runs.block_reason == ""
        and runs.progress_ms == runs.blocked_since_ms > held.blocked_since_ms
    )
    assert [one["held"] for one in await told(bench.state, "admission")] == [held.block_reason, ""]
    assert await write(bench, led, SetBlockReason("none", "", WHY)) == ["there is no job none"]


async def test_a_job_that_cannot_run_here_fails_once_and_is_looked_at_no_more(
    bench: Bench,
) -> None:
    led = await lead(bench)
    await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    assert await write(bench, led, FailJob(JOB, "it needs three workers", WHY)) == []
    assert await write(bench, led, FailJob(JOB, "again", WHY)) == ["job has ended"]
    failed = await jobs.read_job(bench.state, JOB)
    assert (failed.phase, failed.error) == ("failed", "it needs three workers")
    assert (await pool.read_snapshot(bench.state, led)).snapshot.jobs == ()
    await jobs.reopen(bench.state, JOB, "again")
    assert len((await pool.read_snapshot(bench.state, led)).snapshot.jobs) == 1


async def test_services_of_a_host_are_told_of_when_they_change(bench: Bench) -> None:
    led = await lead(bench)
    assert await pool.read_host_services(bench.state, "here") == ()
    for _ in range(2):
        await write(bench, led, AssignServices("here", ("rollout/job/0",), WHY))
    assert await pool.read_host_services(bench.state, "here") == ("rollout/job/0",)
    await write(bench, led, AssignServices("here", (), WHY))
    assert await pool.read_host_services(bench.state, "here") == ()
    assert [e["services"] for e in await told(bench.state, "services")] == [["rollout/job/0"], []]


async def test_a_look_shows_each_row_as_it_stands_after_every_change(bench: Bench) -> None:
    led, members = await gang_of(bench, size=2)
    state = bench.state

    async def shows_what_stands() -> None:
        seen = (await pool.read_snapshot(state, led)).snapshot
        assert list(seen.workers) == await pool.read_workers(state)
        assert list(seen.gangs) == await pool.read_gangs(state)

    await shows_what_stands()
    await pool.report_instance(state, "w1", "g0", "g0.0", said(members[1], rank=1))
    await shows_what_stands()
    await worker(bench, "w1")
    await shows_what_stands()
    gone = members[0].token
    assert await registry.release_lease(state, "worker/w0", gone)
    for decision in (
        place(epoch=2, ranks=(1,)),
        place(id="g0.1"),
        MarkWorkerLost("w0", WHY),
        RemoveInstance("g0", "g0.0", WHY),
        DissolveGang("g0", WHY),
        FormGang("g1", ("w1",), WHY),
    ):
        assert await write(bench, led, decision) == []
        await shows_what_stands()
    await bench.pass_ms(20)
    assert await pool.remove_gone(state, led, 0.01) == 1
    await shows_what_stands()


async def test_ends_of_residents_that_are_gone_are_forgotten_and_no_others(bench: Bench) -> None:
    led, _ = await gang_of(bench)
    state, names = bench.state, ("engine/g0.0", "engine/g0.7", "hybrid/g9.1", "trainer/job")
    for name in names:
        await exit_reports.report_exit(state, exit_reports.ExitReport(name, -9, "signal 9"))
    await bench.pass_ms(20)
    await pool.remove_gone(state, led, 300.0)
    assert len(await exit_reports.read_last_exits(state)) == 4
    await pool.remove_gone(state, led, 300.0, exit_retention_s=0.01)
    assert {end.name for end in await exit_reports.read_last_exits(state)} == {
        "engine/g0.0",
        "trainer/job",
    }


async def test_names_that_would_break_a_row_are_refused(bench: Bench) -> None:
    token = await bench.seat('worker/"w')
    with pytest.raises(Refused):
        await pool.join_worker(bench.state, WorkerRow('"w', "here", "cpu:0", token))
    assert await pool.read_workers(bench.state) == []
