"""Workers, their gangs and the instances on them, the same on every backend."""

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
from meshrl.common.state.pool.store import host_notices
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.host_notices import UNKNOWN_TIME, HostNotice
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


async def elect_leader(bench: Bench, owner: str = "planner/0", ttl_ms: int = 600_000) -> int:
    return await leader.campaign(bench.state, "planner", owner, ttl_ms)


async def worker(bench: Bench, id: str = "w0", host: str = "here") -> WorkerRow:
    token = await bench.seat(f"worker/{id}")
    budget = TierBytes(accelerator=8, memory=16)
    row = WorkerRow(id, host, "cpu:0", token, budget=budget, network="fast")
    return await pool.join_worker(bench.state, row)


async def form_gang(bench: Bench, size: int = 1) -> tuple[int, list[WorkerRow]]:
    """Return a leader and the workers of g0, whose engine of the job spans all of them."""
    members = [await worker(bench, f"w{n}") for n in range(size)]
    leader_token = await elect_leader(bench)
    ids = tuple(member.id for member in members)
    await write_decisions(
        bench, leader_token, FormGang("g0", ids, WHY), place_instance(ranks=tuple(range(size)))
    )
    return leader_token, members


def place_instance(op: str = "", move: Move | None = None, **fields: Any) -> PlaceInstance:
    instance = replace(Instance("g0.0", JOB, Role.ROLLOUT), **fields)
    return PlaceInstance("g0", instance, WHY, move, op)


async def write_decisions(
    bench: Bench, leader_token: int, *decisions: Any, op: str = ""
) -> list[str]:
    op = op or f"op{await bench.state.run_command('INCR', 'ops')}"
    return [
        r.reason for r in await pool.write_decisions(bench.state, leader_token, op, decisions, None)
    ]


def instance_report(
    member: WorkerRow, phase: InstancePhase = InstancePhase.READY, **fields: Any
) -> InstanceReport:
    report = InstanceReport(
        0, 1, 1, member.token, phase, Tier.ACCELERATOR, usage=TierBytes(accelerator=3)
    )
    return replace(report, **fields)


async def read_gang(state: StateClient) -> Gang:
    gang = await pool.read_gang(state, "g0")
    assert gang is not None
    return gang


async def read_events(state: StateClient, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in await events.read_all(state) if event.kind == kind]


async def test_joining_worker_is_idle_and_rejoining_finds_its_record(bench: Bench) -> None:
    joined = await worker(bench)
    assert (joined.gang, joined.membership, joined.budget.memory) == ("", 0, 16)
    assert joined.network == "fast"
    assert await pool.join_worker(bench.state, joined) == joined
    assert await pool.read_workers(bench.state) == [joined]
    assert await pool.read_worker(bench.state, "w0") == joined
    assert await pool.read_worker(bench.state, "w1") is None
    assert len(await read_events(bench.state, "joined")) == 1
    with pytest.raises(Fenced):
        await pool.join_worker(bench.state, replace(joined, token=joined.token + 1))


async def test_idle_workers_form_a_gang_recorded_in_their_rows(
    bench: Bench,
) -> None:
    before = [await worker(bench, f"w{n}") for n in range(3)]
    leader_token = await elect_leader(bench)
    assert await write_decisions(bench, leader_token, FormGang("g0", ("w1", "w0"), WHY)) == []
    found = await read_gang(bench.state)
    assert (found.workers, found.instances) == (("w1", "w0"), ())
    after = await pool.read_workers(bench.state)
    assert [one.gang for one in after] == ["g0", "g0", ""]
    assert [one.membership for one in after] == [found.membership, found.membership, 0]
    assert after[0].revision > before[0].revision and after[2].revision == before[2].revision
    refused = await write_decisions(
        bench, leader_token, FormGang("g1", ("w2", "w1"), WHY), FormGang("g0", ("w2",), WHY)
    )
    assert refused == ["w1 is in g0", "g0 is not an unused gang id"]
    assert (await pool.read_gang(bench.state, "g1")) is None
    assert await write_decisions(bench, leader_token, FormGang("g1", ("w9",), WHY)) == [
        "there is no worker w9"
    ]
    [formed] = await read_events(bench.state, "gang")
    assert formed["workers"] == ["w1", "w0"] and formed["formed"] and formed["rule"] == "default"
    assert formed["figure"] == WHY.inputs["figure"]


async def test_dissolved_gang_frees_its_workers_and_its_id_is_not_reused(
    bench: Bench,
) -> None:
    leader_token, [member] = await form_gang(bench)
    before = await pool.read_worker(bench.state, "w0")
    assert await write_decisions(bench, leader_token, DissolveGang("g0", WHY)) == []
    assert await pool.read_gangs(bench.state) == []
    now = await pool.read_worker(bench.state, "w0")
    assert before and now and (now.gang, now.membership) == ("", before.membership + 1)
    assert now.revision > before.revision
    assert not await pool.report_instance(bench.state, "w0", "g0", "g0.0", instance_report(member))
    assert await write_decisions(bench, leader_token, DissolveGang("g0", WHY)) == [
        "there is no gang g0"
    ]
    assert await write_decisions(bench, leader_token, FormGang("g0", ("w0",), WHY)) != []
    assert await write_decisions(bench, leader_token, FormGang("g1", ("w0",), WHY)) == []
    assert [one["role"] for one in await read_events(bench.state, "desired")] == ["rollout", "idle"]


async def test_instance_is_placed_updated_and_removed(bench: Bench) -> None:
    leader_token, [_] = await form_gang(bench)
    [engine] = (await read_gang(bench.state)).instances
    assert (engine.job, engine.role, engine.tier) == (JOB, "rollout", "accelerator")
    assert engine.desired_since_ms > 0 and not engine.is_reconciled
    before = await pool.read_worker(bench.state, "w0")
    assert (
        await write_decisions(bench, leader_token, place_instance(epoch=2, tier=Tier.MEMORY)) == []
    )
    assert await write_decisions(bench, leader_token, place_instance(epoch=1)) == [
        "g0.0 is at generation 1 and epoch 2 already"
    ]
    [engine] = (await read_gang(bench.state)).instances
    after = await pool.read_worker(bench.state, "w0")
    assert (engine.epoch, engine.tier) == (2, "memory")
    assert before and after and after.revision == before.revision + 1
    elsewhere = replace(engine, id="g7.0")
    assert await write_decisions(bench, leader_token, PlaceInstance("g7", elsewhere, WHY)) == [
        "there is no gang g7"
    ]
    assert await write_decisions(bench, leader_token, place_instance(epoch=3, ranks=(1,))) == [
        "g0 has no rank 1"
    ]
    assert await write_decisions(bench, leader_token, RemoveInstance("g0", "g0.0", WHY)) == []
    assert await write_decisions(bench, leader_token, RemoveInstance("g0", "g0.0", WHY)) == [
        "g0 has no instance g0.0"
    ]
    assert (await read_gang(bench.state)).instances == ()
    assert (await read_gang(bench.state)).next_instance == 1
    assert await write_decisions(bench, leader_token, place_instance()) == [
        "g0.0 is not an unused instance id of g0"
    ]
    assert await write_decisions(bench, leader_token, place_instance(id="g0.1")) == []
    first, second, removed, _ = await read_events(bench.state, "desired")
    assert (first["from_role"], second["from_role"]) == ("idle", "rollout")
    assert (removed["role"], removed["from_role"], removed["workers"]) == (
        "idle",
        "rollout",
        ["w0"],
    )
    assert first["reason"] == "default" and first["figure"] == WHY.inputs["figure"]
    assert first["core"] is False and first["pinned"] is False


async def test_report_counts_only_for_the_epoch_it_was_made_under(bench: Bench) -> None:
    leader_token, [member] = await form_gang(bench)
    state = bench.state
    assert await pool.report_instance(state, "w0", "g0", "g0.0", instance_report(member))
    assert await pool.report_instance(state, "w0", "g0", "g0.0", instance_report(member))
    assert (await read_gang(state)).is_reconciled
    await write_decisions(bench, leader_token, place_instance(epoch=2))
    assert not (await read_gang(state)).is_reconciled
    assert not await pool.report_instance(
        state, "w0", "g0", "g0.0", instance_report(member, InstancePhase.MOVING)
    )
    assert not await pool.report_instance(state, "w0", "g0", "g0.9", instance_report(member))
    assert not await pool.report_instance(
        state, "w0", "g0", "g0.0", instance_report(member, epoch=2, rank=1)
    )
    assert await pool.report_instance(state, "w0", "g0", "g0.0", instance_report(member, epoch=2))
    [engine] = (await read_gang(state)).instances
    assert engine.is_reconciled and engine.reports[0].usage.accelerator == 3
    actual = await read_events(state, "actual")
    assert [one["epoch"] for one in actual] == [1, 2]
    assert actual[0]["status"] == "ready" and actual[0]["tier"] == "accelerator"


async def test_instance_phase_is_that_of_its_least_advanced_rank(
    bench: Bench,
) -> None:
    _, members = await form_gang(bench, size=2)

    async def report(rank: int, phase: InstancePhase, detail: str = "") -> Instance:
        sent_report = instance_report(members[rank], phase, rank=rank, detail=detail)
        assert await pool.report_instance(bench.state, f"w{rank}", "g0", "g0.0", sent_report)
        [found] = (await read_gang(bench.state)).instances
        return found

    assert (await report(0, InstancePhase.READY)).phase == InstancePhase.STARTING
    assert (await report(1, InstancePhase.READY)).is_reconciled
    failed = await report(0, InstancePhase.FAILED, "out of memory")
    assert (failed.phase, failed.detail) == ("failed", "out of memory")
    assert (await report(1, InstancePhase.DRAINING)).phase == InstancePhase.FAILED
    statuses = [one["status"] for one in await read_events(bench.state, "actual")]
    assert statuses == ["starting", "ready", "failed"]


async def test_restarted_worker_stays_in_its_gang_and_its_reports_are_void(
    bench: Bench,
) -> None:
    _, members = await form_gang(bench, size=2)
    for rank, member in enumerate(members):
        assert await pool.report_instance(
            bench.state, f"w{rank}", "g0", "g0.0", instance_report(member, rank=rank)
        )
    assert (await read_gang(bench.state)).is_reconciled
    again = await worker(bench, "w1")
    assert again.gang == "g0" and again.token != members[1].token
    [engine] = (await read_gang(bench.state)).instances
    assert set(engine.reports) == {0}
    with pytest.raises(Fenced):
        await pool.report_instance(
            bench.state, "w1", "g0", "g0.0", instance_report(members[1], rank=1)
        )
    assert await pool.report_instance(
        bench.state, "w1", "g0", "g0.0", instance_report(again, rank=1)
    )
    assert (await read_gang(bench.state)).is_reconciled


async def test_worker_is_marked_lost_once_and_only_while_absent(bench: Bench) -> None:
    leader_token, [member] = await form_gang(bench)
    await pool.report_instance(bench.state, "w0", "g0", "g0.0", instance_report(member))
    assert await write_decisions(bench, leader_token, MarkWorkerLost("w0", WHY)) == ["w0 is alive"]
    assert await registry.release_lease(bench.state, "worker/w0", member.token)
    for _ in range(2):
        assert await write_decisions(bench, leader_token, MarkWorkerLost("w0", WHY)) == []
    assert len(await read_events(bench.state, "lost")) == 1
    assert (await read_gang(bench.state)).instances[0].reports == {}
    [snapshot_worker] = (await pool.read_snapshot(bench.state, leader_token)).snapshot.workers
    assert not snapshot_worker.alive and snapshot_worker.gang == "g0"
    back = await worker(bench)
    assert back.gang == "g0"
    await registry.release_lease(bench.state, "worker/w0", back.token)
    await write_decisions(bench, leader_token, MarkWorkerLost("w0", WHY))
    assert len(await read_events(bench.state, "lost")) == 2


async def test_only_the_leader_reads_snapshots_and_writes_decisions(bench: Bench) -> None:
    await worker(bench)
    old = await elect_leader(bench, "a", ttl_ms=20)
    await bench.pass_ms(50)
    new = await elect_leader(bench, "b")
    with pytest.raises(Fenced):
        await pool.read_snapshot(bench.state, old)
    with pytest.raises(Fenced):
        await write_decisions(bench, old, FormGang("g0", ("w0",), WHY))
    assert await write_decisions(bench, new, FormGang("g0", ("w0",), WHY)) == []


async def test_resent_decisions_count_once(bench: Bench) -> None:
    await worker(bench)
    leader_token = await elect_leader(bench)
    decisions: list[Any] = [
        FormGang("g0", ("w0",), WHY),
        place_instance(),
        AssignServices("here", ("rollout/job/0",), WHY),
    ]
    for _ in range(2):
        assert (
            await pool.write_decisions(bench.state, leader_token, "op", decisions, {"seen": [1.5]})
            == []
        )
    assert (
        len(await read_events(bench.state, "gang"))
        == len(await read_events(bench.state, "desired"))
        == 1
    )
    found = await pool.read_snapshot(bench.state, leader_token)
    assert (found.memory, found.revision) == ({"seen": [1.5]}, 1)


async def test_delayed_write_with_an_old_revision_is_fenced(bench: Bench) -> None:
    await worker(bench)
    leader_token = await elect_leader(bench)
    snapshot = await pool.read_snapshot(bench.state, leader_token)
    assert (
        await pool.write_decisions(
            bench.state, leader_token, "a", [], {"term": 1}, snapshot.revision
        )
        == []
    )
    with pytest.raises(Fenced):
        await pool.write_decisions(
            bench.state,
            leader_token,
            "b",
            [FormGang("g0", ("w0",), WHY)],
            {"term": 0},
            snapshot.revision,
        )
    found = await pool.read_snapshot(bench.state, leader_token)
    assert found.memory == {"term": 1} and found.snapshot.gangs == ()


async def test_entitlements_and_predictions_of_the_last_write_are_readable(bench: Bench) -> None:
    assert await pool.read_entitlements(bench.state) == {}
    leader_token = await elect_leader(bench)
    for op, memory in (("a", {"entitled": {JOB: 2}}), ("b", None)):
        assert await pool.write_decisions(bench.state, leader_token, op, [], memory) == []
        assert await pool.read_entitlements(bench.state) == {JOB: 2}
    assert await pool.read_predictions(bench.state) == {}, (
        "a leader that predicts nothing says nothing"
    )
    prediction = {
        "step_s": 0.8,
        "rollout_s": 0.8,
        "bottleneck": "latency",
        "verdict": "no split is better",
    }
    assert (
        await pool.write_decisions(
            bench.state, leader_token, "c", [], {"explained": {JOB: prediction}}
        )
        == []
    )
    found = await pool.read_predictions(bench.state)
    assert found == {JOB: JobPrediction(0.8, 0.8, 0.0, 0.0, "latency", "no split is better", None)}


async def test_resumed_former_leader_grants_no_request_again(
    bench: Bench,
) -> None:
    await worker(bench)
    await pool.submit_request(bench.state, PoolRequest("m0", "move", "w0", "rollout", JOB))
    ttl_ms = round(1000 * min(5.0, scaled(1.0)))
    old = await elect_leader(bench, "a", ttl_ms=ttl_ms)
    snapshot = await pool.read_snapshot(bench.state, old)
    granted: list[Any] = [FormGang("g0", ("w0",), WHY), place_instance(op="m0")]
    await bench.pass_ms(ttl_ms + 100)
    new = await elect_leader(bench, "b")
    current = await pool.read_snapshot(bench.state, new)
    assert current.snapshot.requests == snapshot.snapshot.requests != ()
    assert await pool.write_decisions(bench.state, new, "b1", granted, None, current.revision) == []
    with pytest.raises(Fenced):
        await pool.write_decisions(bench.state, old, "a1", granted, None, snapshot.revision)
    assert [one["op"] for one in await read_events(bench.state, "desired")] == ["m0"]
    assert (await pool.read_snapshot(bench.state, new)).snapshot.requests == ()


async def test_many_decisions_are_written_in_chunks_and_memory_with_the_last(
    bench: Bench,
) -> None:
    count = pool.DECISIONS_PER_SCRIPT // 2 + 8
    for n in range(count):
        await worker(bench, f"w{n}")
    leader_token = await elect_leader(bench)
    decisions: list[Any] = [FormGang(f"g{n}", (f"w{n}",), WHY) for n in range(count)]
    for n in range(count):
        decisions.append(PlaceInstance(f"g{n}", Instance(f"g{n}.0", JOB, Role.ROLLOUT), WHY))
    for _ in range(2):
        assert (
            await pool.write_decisions(bench.state, leader_token, "op", decisions, {"n": 1}, 0)
            == []
        )
    found = await pool.read_snapshot(bench.state, leader_token)
    assert found.revision == 2 and found.memory == {"n": 1}
    assert found.snapshot.gangs_formed == len(found.snapshot.gangs) == count
    assert [gang.id for gang in found.snapshot.gangs] == [f"g{n}" for n in range(count)]
    assert all(len(gang.instances) == 1 for gang in found.snapshot.gangs)


async def test_snapshot_contains_all_planner_inputs(bench: Bench) -> None:
    leader_token, [member] = await form_gang(bench)
    state = bench.state
    await pool.report_instance(state, "w0", "g0", "g0.0", instance_report(member))
    assert await pool.read_settings(state) == PoolSettings()
    up_ms = await pool.write_settings(state, PoolSettings(worker_lost_s=3.0))
    assert await pool.read_settings(state) == PoolSettings(worker_lost_s=3.0)
    pool_document = document(groups_per_step=3)
    pool_document["pool"] |= {"priority": 2, "workers": {"least": 2, "most": 0}}
    await jobs.submit(state, JOB, pool_document, "/runs/job", "op")
    await jobs.submit(state, "ended", pool_document, "/runs/ended", "op")
    await jobs.cancel(state, "ended", "op")
    stats = {"job": JOB, "instance": "g0.0", "tokens": 7}
    engine = registry.RegistryEntry("engine/g0.0", "engine", incarnation="i", stats=stats)
    await registry.register(state, engine, 600_000)
    await registry.register(
        state, registry.RegistryEntry("node/here", "node", incarnation="n"), 600_000
    )
    await write_decisions(
        bench, leader_token, AssignServices("here", ("rollout/job/0", "sandbox/job/0"), WHY)
    )
    found = (await pool.read_snapshot(state, leader_token)).snapshot
    assert found.workers[0] == await pool.read_worker(state, "w0") and found.workers[0].alive
    assert found.gangs == (await read_gang(state),)
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


async def test_snapshot_contains_the_measurements_of_each_process(bench: Bench) -> None:
    leader_token, [_] = await form_gang(bench)
    state = bench.state
    await jobs.submit(state, JOB, document(groups_per_step=3), "/runs/job", "op")
    curve = DecodeCurve("cpu", 2, 0.02, 0.0005, prefill_tokens_per_s=6000.0, fitted_steps=80)
    shard, core = (
        MeasuredWork(groups=3, sampled=40, flight_s=7.5),
        MeasuredWork(steps=2, busy_s=1.25),
    )
    lengths = LengthQuantiles(40, tuple(10.0 * n for n in range(len(QUANTILES))), 7.5)
    stats_by_name: dict[str, dict[str, Any]] = {
        "rollout/job/0": {
            **{"work": measurements.encode_work(shard), "histogram": [1] * 100},
            "lengths": lengths.encode(),
        },
        "trainer/g1.0": {"work": measurements.encode_work(core), "instance": "g1.0"},
        "engine/g0.0": {"gang": "g0", "instance": "g0.0", "decode_curve": curve.encode()},
        "engine/g2.0": {"gang": "g2", "instance": "g2.0"},
    }
    for name, stats in stats_by_name.items():
        entry = registry.RegistryEntry(name, name.partition("/")[0], stats=stats | {"job": JOB})
        entry.incarnation = "i"
        await registry.register(state, entry, 600_000)
    stats = {"cores": 2.0, "busy_cores": 1.5}
    agent = registry.RegistryEntry("node/here", "node", host="here", incarnation="n", stats=stats)
    await registry.register(state, agent, 600_000)
    found = (await pool.read_snapshot(state, leader_token)).snapshot
    [job], [host] = found.jobs, found.hosts
    assert job.measurements.work_by_process == {"rollout/job/0i": shard, "trainer/g1.0i": core}
    assert job.measurements.curves == (curve,)
    assert job.measurements.lengths == lengths
    assert (host.cores, host.busy_cores) == (2.0, 1.5)
    text = await state.run_command("HGET", "{mesh}:snapshot:stats", "rollout/job/0")
    assert "histogram" not in text and "queue_s" not in text


async def test_snapshot_contains_accepted_services_of_absent_hosts_too(bench: Bench) -> None:
    leader_token, state = await elect_leader(bench), bench.state
    stats_by_host: dict[str, dict[str, Any]] = {
        "one": {"accepted_services": ["shards"], "isolation_tiers": []},
        "two": {"accepted_services": []},
        "three": {},
    }
    for host, stats in stats_by_host.items():
        agent = registry.RegistryEntry(
            f"node/{host}", "node", host=host, incarnation="n", stats=stats | {"trip_ms": 1.0}
        )
        await registry.register(state, agent, 600_000)
        await write_decisions(
            bench, leader_token, AssignServices(host, (f"rollout/{host}/0",), WHY)
        )
    for alive in (True, False):
        hosts = {
            host.name: host
            for host in (await pool.read_snapshot(state, leader_token)).snapshot.hosts
        }
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
        for host in stats_by_host:
            await registry.evict(state, f"node/{host}", "n")
    assert dict(await pool.read_all_services(state)) == {
        host: f"rollout/{host}/0" for host in stats_by_host
    }


async def test_job_is_rejected_if_no_sandbox_host_has_its_isolation_tier(
    bench: Bench,
) -> None:
    state, job = bench.state, JobRequirements(sandboxes=1, isolation_tier="bwrap")

    async def register_host(host: str, takes: list[str], tiers: list[str]) -> None:
        offers = {"accepted_services": takes, "isolation_tiers": tiers}
        agent = registry.RegistryEntry(
            f"node/{host}", "node", host=host, incarnation=host, stats=offers
        )
        await registry.evict(state, f"node/{host}", host)
        await registry.register(state, agent, 600_000)

    await check_job_is_feasible(state, job)  # no host has joined yet
    await register_host("head", ["shards"], [])
    await check_job_is_feasible(state, job)  # it waits for a host that accepts sandboxes
    await register_host("s1", ["sandboxes"], ["trying"])
    await check_job_is_feasible(state, job)
    await register_host("s1", ["sandboxes"], ["landlock"])
    await register_host("s2", ["shards", "sandboxes"], [])
    with pytest.raises(Refused, match="s1 has landlock; s2 has no isolation") as caught:
        await check_job_is_feasible(state, job)
    assert "head" not in str(caught.value) and "meshrl doctor" in caught.value.fix
    await check_job_is_feasible(state, JobRequirements(sandboxes=1))
    await register_host("s2", ["shards", "sandboxes"], ["cgroup"])
    await check_job_is_feasible(state, job)
    with pytest.raises(Refused, match="a container for each call"):
        await check_job_is_feasible(state, JobRequirements(sandboxes=1, isolation_tier="runner"))


async def test_job_documents_are_sent_once(bench: Bench) -> None:
    leader_token = await elect_leader(bench)
    await jobs.submit(bench.state, JOB, document() | {"long": "x" * 4096}, "/runs/job", "op")
    args: dict[str, Any] = {"election": "planner", "token": leader_token, "known": []}
    [sent] = (await bench.state.run_script("snapshot", ["{mesh}"], args))["jobs"]
    assert sent["document"]["long"]
    args["known"] = [sent["digest"]]
    [again] = (await bench.state.run_script("snapshot", ["{mesh}"], args))["jobs"]
    assert again["document"] is None
    for _ in range(2):
        [job] = (await pool.read_snapshot(bench.state, leader_token)).snapshot.jobs
        assert job.id == JOB
    changed = document(steps=60)
    changed["pool"]["share"] = 3.0
    await jobs.change_document(bench.state, JOB, changed, {}, "change")
    [job] = (await pool.read_snapshot(bench.state, leader_token)).snapshot.jobs
    assert job.requirements.share == 3.0


async def test_move_is_in_progress_until_finished_and_published_once(bench: Bench) -> None:
    await worker(bench)
    leader_token = await elect_leader(bench)
    move = Move("g0.0", "g0", 100, 200, {"restore": [1]}, {"policy": "stage_time"})
    await write_decisions(
        bench, leader_token, FormGang("g0", ("w0",), WHY), place_instance(move=move)
    )
    assert (await pool.read_snapshot(bench.state, leader_token)).snapshot.moves == (move,)
    assert await pool.read_moves_in_progress(bench.state) == [move]
    later = replace(move, started_ms=300, deadline_ms=400)
    done = FinishMove(move, True, {"policy": "stage_time", "others": {}}, WHY)
    assert (
        await write_decisions(bench, leader_token, place_instance(epoch=2, move=later), done) == []
    )
    assert (await pool.read_snapshot(bench.state, leader_token)).snapshot.moves == (later,)
    [finished] = await read_events(bench.state, "move")
    assert finished["undone"] is True and finished["others"] == {}
    assert (finished["resident"], finished["started_ms"]) == ("g0.0", 100)
    await write_decisions(bench, leader_token, RemoveInstance("g0", "g0.0", WHY))
    await write_decisions(bench, leader_token, replace(done, move=later))
    assert (await pool.read_snapshot(bench.state, leader_token)).snapshot.moves == ()
    assert await pool.read_moves_in_progress(bench.state) == []
    assert len(await read_events(bench.state, "move")) == 1


async def test_requests_are_stored_until_granted_or_rejected(
    bench: Bench,
) -> None:
    leader_token, _ = await form_gang(bench)
    requests = [PoolRequest(f"m{n}", "move", "w0", "training", JOB) for n in (1, 0)]
    for one in requests:
        for _ in range(2):
            await pool.submit_request(bench.state, one)
        await bench.pass_ms(5)

    async def list_requests() -> list[str]:
        return [
            one.op
            for one in (await pool.read_snapshot(bench.state, leader_token)).snapshot.requests
        ]

    assert await list_requests() == ["m1", "m0"]
    await write_decisions(bench, leader_token, place_instance(epoch=2, op="m1", pinned=True))
    assert await list_requests() == ["m0"]
    for _ in range(2):
        await write_decisions(bench, leader_token, RejectRequest("m0", "it is the core", WHY))
    assert await list_requests() == []
    [rejection] = await read_events(bench.state, "move_declined")
    assert (rejection["op"], rejection["reason"]) == ("m0", "it is the core")
    assert (await read_events(bench.state, "desired"))[-1]["op"] == "m1"


async def test_request_for_a_place_with_another_job_is_stored_and_answered(bench: Bench) -> None:
    leader_token, _ = await form_gang(bench)
    request = PoolRequest("p0", "place", job=JOB, partner="other")
    await pool.submit_request(bench.state, request)
    [stored] = (await pool.read_snapshot(bench.state, leader_token)).snapshot.requests
    assert replace(stored, requested_ms=0) == request
    granted = Rationale("user", JOB, {"partner": "other"})
    await write_decisions(bench, leader_token, RejectRequest("p0", "", granted))
    [settled] = await read_events(bench.state, "place_settled")
    assert (settled["job"], settled["partner"]) == (JOB, "other")
    assert (await pool.read_snapshot(bench.state, leader_token)).snapshot.requests == ()


async def test_host_drains_from_the_moment_of_the_request(bench: Bench) -> None:
    await worker(bench)
    leader_token = await elect_leader(bench)

    async def read_drain_reason() -> str:
        return (await pool.read_snapshot(bench.state, leader_token)).snapshot.hosts[0].drain_reason

    assert await read_drain_reason() == ""
    await pool.submit_request(bench.state, PoolRequest("d", "drain", host="here"))
    assert await read_drain_reason() != ""
    await write_decisions(bench, leader_token, RejectRequest("d", "", WHY))
    assert (
        await read_drain_reason() != ""
        and len(await read_events(bench.state, "drain_settled")) == 1
    )
    await pool.submit_request(bench.state, PoolRequest("e", "drain", host="here"))
    await write_decisions(bench, leader_token, RejectRequest("e", "it has the only engine", WHY))
    assert await read_drain_reason() == ""


async def test_workers_have_the_announced_end_of_their_host(bench: Bench) -> None:
    await worker(bench)
    leader_token = await elect_leader(bench)

    async def read_end() -> float | None:
        return (
            (await pool.read_snapshot(bench.state, leader_token)).snapshot.workers[0].preempt_at_s
        )

    for notice in (
        HostNotice("EC2 (stop)", 1_800_000_000.5),
        HostNotice("Azure", UNKNOWN_TIME),
        HostNotice(failure="it does not answer"),
        HostNotice(),
    ):
        await host_notices.write_notice(bench.state, "elsewhere", HostNotice("other", 7.0))
        await host_notices.write_notice(bench.state, "here", notice)
        assert await read_end() == notice.preempt_at_s
        assert await host_notices.read_notice(bench.state, "here") == notice


async def test_unblocked_job_gets_a_fresh_progress_time(bench: Bench) -> None:
    leader_token = await elect_leader(bench)
    await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    for _ in range(2):
        await write_decisions(
            bench, leader_token, SetBlockReason(JOB, "waiting: no worker is free", WHY)
        )
    blocked = await jobs.read_job(bench.state, JOB)
    assert (
        blocked.block_reason == "waiting: no worker is free"
        and blocked.blocked_since_ms >= blocked.progress_ms
    )
    [snapshot_job] = (await pool.read_snapshot(bench.state, leader_token)).snapshot.jobs
    assert snapshot_job.block_reason == blocked.block_reason
    await bench.pass_ms(20)
    await write_decisions(bench, leader_token, SetBlockReason(JOB, "", WHY))
    unblocked = await jobs.read_job(bench.state, JOB)
    assert (
        unblocked.block_reason == ""
        and unblocked.progress_ms == unblocked.blocked_since_ms > blocked.blocked_since_ms
    )
    assert [one["held"] for one in await read_events(bench.state, "admission")] == [
        blocked.block_reason,
        "",
    ]
    assert await write_decisions(bench, leader_token, SetBlockReason("none", "", WHY)) == [
        "there is no job none"
    ]


async def test_infeasible_job_fails_once_and_leaves_the_snapshot(
    bench: Bench,
) -> None:
    leader_token = await elect_leader(bench)
    await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    assert (
        await write_decisions(bench, leader_token, FailJob(JOB, "it needs three workers", WHY))
        == []
    )
    assert await write_decisions(bench, leader_token, FailJob(JOB, "again", WHY)) == [
        "job has ended"
    ]
    failed = await jobs.read_job(bench.state, JOB)
    assert (failed.phase, failed.error) == ("failed", "it needs three workers")
    assert (await pool.read_snapshot(bench.state, leader_token)).snapshot.jobs == ()
    await jobs.reopen(bench.state, JOB, "again")
    assert len((await pool.read_snapshot(bench.state, leader_token)).snapshot.jobs) == 1


async def test_changed_host_services_are_published(bench: Bench) -> None:
    leader_token = await elect_leader(bench)
    assert await pool.read_host_services(bench.state, "here") == ()
    for _ in range(2):
        await write_decisions(bench, leader_token, AssignServices("here", ("rollout/job/0",), WHY))
    assert await pool.read_host_services(bench.state, "here") == ("rollout/job/0",)
    await write_decisions(bench, leader_token, AssignServices("here", (), WHY))
    assert await pool.read_host_services(bench.state, "here") == ()
    assert [e["services"] for e in await read_events(bench.state, "services")] == [
        ["rollout/job/0"],
        [],
    ]


async def test_snapshot_matches_the_rows_after_every_change(bench: Bench) -> None:
    leader_token, members = await form_gang(bench, size=2)
    state = bench.state

    async def check_snapshot_matches_rows() -> None:
        snapshot = (await pool.read_snapshot(state, leader_token)).snapshot
        assert list(snapshot.workers) == await pool.read_workers(state)
        assert list(snapshot.gangs) == await pool.read_gangs(state)

    await check_snapshot_matches_rows()
    await pool.report_instance(state, "w1", "g0", "g0.0", instance_report(members[1], rank=1))
    await check_snapshot_matches_rows()
    await worker(bench, "w1")
    await check_snapshot_matches_rows()
    lost_token = members[0].token
    assert await registry.release_lease(state, "worker/w0", lost_token)
    for decision in (
        place_instance(epoch=2, ranks=(1,)),
        place_instance(id="g0.1"),
        MarkWorkerLost("w0", WHY),
        RemoveInstance("g0", "g0.0", WHY),
        DissolveGang("g0", WHY),
        FormGang("g1", ("w1",), WHY),
    ):
        assert await write_decisions(bench, leader_token, decision) == []
        await check_snapshot_matches_rows()
    await bench.pass_ms(20)
    assert await pool.remove_gone(state, leader_token, 0.01) == 1
    await check_snapshot_matches_rows()


async def test_only_exits_of_removed_instances_are_deleted(bench: Bench) -> None:
    leader_token, _ = await form_gang(bench)
    state, names = bench.state, ("engine/g0.0", "engine/g0.7", "hybrid/g9.1", "trainer/job")
    for name in names:
        await exit_reports.report_exit(state, exit_reports.ExitReport(name, -9, "signal 9"))
    await bench.pass_ms(20)
    await pool.remove_gone(state, leader_token, 300.0)
    assert len(await exit_reports.read_last_exits(state)) == 4
    await pool.remove_gone(state, leader_token, 300.0, exit_retention_s=0.01)
    assert {end.name for end in await exit_reports.read_last_exits(state)} == {
        "engine/g0.0",
        "trainer/job",
    }


async def test_names_with_special_characters_are_rejected(bench: Bench) -> None:
    token = await bench.seat('worker/"w')
    with pytest.raises(Refused):
        await pool.join_worker(bench.state, WorkerRow('"w', "here", "cpu:0", token))
    assert await pool.read_workers(bench.state) == []
