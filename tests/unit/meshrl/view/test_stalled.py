"""Stall diagnosis: from a waiting process to the process that blocks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshrl.common.job.config import BudgetConfig, JobConfig
from meshrl.common.mesh.process.supervision.exit_reports import LastExit
from meshrl.common.state.jobs import COUNT_FIELDS, JobRow, Phase
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.registry import LEASE_MS, RegistryEntry
from meshrl.view.mesh.job_progress import describe_activity, list_working_processes
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.stalls import Stall, make_redis_stall
from meshrl.view.mesh.stalls import diagnose_stalls as diagnosed

NOW = 1_000_000


def entry(
    name: str, *waits: tuple[str, float], renewed_s: float = 1.0, left: bool = False
) -> RegistryEntry:
    """Make a process that renewed `renewed_s` ago and waits for each (name, seconds)."""
    renewed_ms = NOW - int(renewed_s * 1000)
    expires_ms = renewed_ms + (100 if left else LEASE_MS)
    listed: list[dict[str, Any]] = [
        {"on": on, "what": "ask", "since_ms": NOW - int(s * 1000)} for on, s in waits
    ]
    return RegistryEntry(
        name=name,
        kind=name.partition("/")[0],
        waits=listed,
        renewed_ms=renewed_ms,
        expires_ms=expires_ms,
        alive=expires_ms > NOW,
    )


NOTHING = MeshSnapshot()


def diagnose(
    entries: Sequence[RegistryEntry],
    mesh: MeshSnapshot,
    now_ms: float,
    ended: Sequence[LastExit] = (),
    jobs: Sequence[JobRow] = (),
    full: str = "",
    stopped: Sequence[str] = (),
) -> list[Stall]:
    """List the stalls of a mesh with these rows."""
    rows = replace(mesh, entries=entries, now_ms=now_ms, last_exits=ended, jobs=jobs)
    return diagnosed(rows, full, stopped)


def make_instance(
    id: str = "g1.0",
    job: str = "job",
    doing: InstancePhase | None = InstancePhase.STARTING,
    age_s: float = 5.0,
    role: Role = Role.ROLLOUT,
    detail: str = "",
    tier: Tier = Tier.ACCELERATOR,
) -> Instance:
    """Make an instance with a desired state of age `age_s` and an optional report of phase
    `doing`.
    """
    report = doing and InstanceReport(0, 3, 3, 7, doing, Tier.ACCELERATOR, detail)
    reports = {0: report} if report else {}
    changed_ms = NOW - int(age_s * 1000)
    return Instance(
        id,
        job,
        role,
        tier=tier,
        generation=3,
        epoch=3,
        desired_since_ms=changed_ms,
        reports=reports,
    )


def pool(*instances: Instance, services: tuple[tuple[str, str], ...] = ()) -> MeshSnapshot:
    """Make a pool with gang g1 on worker w1 and these instances."""
    gang = Gang("g1", ("w1",), 1, instances)
    return MeshSnapshot((WorkerRow("w1", "h0", "cpu:1", 7, gang="g1"),), (gang,), services=services)


def pairs(stalls: list[Stall]) -> set[tuple[str, str]]:
    return {(stall.waiter, stall.culprit) for stall in stalls}


def test_mesh_with_renewals_and_short_waits_has_no_stall() -> None:
    entries = [entry("trainer/job", ("rollout/0", 2.0)), entry("rollout/0")]
    assert diagnose(entries, pool(make_instance(doing=InstancePhase.READY, age_s=500)), NOW) == []


def test_overdue_process_is_named_with_its_waiter() -> None:
    entries = [entry("rollout/0", ("engine/g1", 4.2)), entry("engine/g1", renewed_s=4.0)]
    (stall,) = diagnose(entries, NOTHING, NOW)
    assert (stall.waiter, stall.culprit, stall.what) == ("rollout/0", "engine/g1", "ask")
    assert stall.since_s == 4.2
    assert "has not renewed its lease for 4.0 s" in stall.reason


def test_chain_of_waits_is_followed_to_its_end() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 6.0)),
        entry("rollout/0", ("engine/g0", 1.0), ("engine/g1", 5.0)),
        entry("engine/g0"),
        entry("engine/g1", renewed_s=5.0),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("trainer/job", "engine/g1"), ("rollout/0", "engine/g1")}
    through = next(s for s in stalls if s.waiter == "trainer/job")
    assert "through rollout/0" in through.reason


def test_process_with_a_lapsed_lease_stays_the_culprit() -> None:
    entries = [entry("rollout/0", ("weights", 9.0)), entry("weights", renewed_s=8.0)]
    (stall,) = diagnose(entries, NOTHING, NOW)
    assert stall.culprit == "weights"
    assert "lost its lease" in stall.reason


def test_overdue_process_without_waiters_is_listed_last() -> None:
    entries = [
        entry("planner/1", renewed_s=5.0),
        entry("rollout/0", ("engine/g1", 4.0)),
        entry("engine/g1", renewed_s=4.0),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("rollout/0", "engine/g1"), ("", "planner/1")}
    assert stalls[-1].culprit == "planner/1"
    assert "overdue, but no process waits for it" in stalls[-1].reason


def test_stopped_environment_process_is_named_with_and_without_waiters() -> None:
    name = "environment-rollout-job-0-0"
    shard = entry("rollout/job/0")
    shard.stats = {"environments": {name: 7}, "environments_stopped": {name: NOW - 800}}
    (stall,) = diagnose([shard], NOTHING, NOW)
    assert (stall.waiter, stall.culprit, stall.job, stall.since_s) == ("", name, "job", 0.8)
    assert stall.reason.endswith("stopped by a signal for 0.8 s; no process waits for it")
    shard.waits = entry("rollout/job/0", (name, 0.5)).waits
    (stall,) = diagnose([entry("trainer/job", ("rollout/job/0", 0.4)), shard], NOTHING, NOW)[:1]
    assert (stall.waiter, stall.culprit) == ("rollout/job/0", name)
    assert diagnose([replace(shard, stats={}, waits=[])], NOTHING, NOW) == []


def test_process_stopped_by_a_signal_is_named_at_once() -> None:
    entries = [entry("rollout/0", ("engine/g1.0", 0.3)), entry("engine/g1.0", renewed_s=0.9)]
    assert diagnose(entries, NOTHING, NOW) == []
    (stall,) = diagnose(entries, NOTHING, NOW, stopped=["engine/g1.0"])
    assert (stall.waiter, stall.culprit) == ("rollout/0", "engine/g1.0")
    assert "stopped by a signal" in stall.reason
    lost = entry("engine/g1.0", renewed_s=10.0)
    (stall,) = diagnose([lost], NOTHING, NOW, stopped=["engine/g1.0"])
    assert (stall.waiter, stall.culprit) == ("", "engine/g1.0")


def test_stall_ends_when_the_waiter_is_gone_or_the_lost_process_is_unneeded() -> None:
    waiter = entry("trainer/job", ("engine/g1.0", 30.0), renewed_s=10.0)
    lost = entry("engine/g1.0", renewed_s=10.0)
    wanted = pool(make_instance(doing=InstancePhase.READY))
    (stall,) = diagnose([lost], wanted, NOW)
    assert (stall.waiter, stall.culprit) == ("", "engine/g1.0"), "it is to be there"
    assert diagnose([lost, waiter], NOTHING, NOW) == [], "others do the work of both"
    shard = entry("rollout/job/0", renewed_s=10.0)
    assert pairs(diagnose([shard], pool(services=(("h0", "rollout/job/0"),)), NOW)) == {
        ("", "rollout/job/0")
    }
    assert diagnose([shard], NOTHING, NOW) == []


def test_culprit_is_named_with_its_host_on_several_hosts() -> None:
    waiter = replace(entry("rollout/job/0", ("engine/g1.0", 4.0)), host="head-1")
    culprit = replace(entry("engine/g1.0", renewed_s=4.0), host="gpu2-1")
    (stall,) = diagnose([waiter, culprit], NOTHING, NOW)
    assert (stall.culprit, stall.host) == ("engine/g1.0", "gpu2-1")
    assert "engine/g1.0 on gpu2-1 has not renewed" in stall.reason
    (alone,) = diagnose([waiter, replace(culprit, host="head-1")], NOTHING, NOW)
    assert "engine/g1.0 has not renewed" in alone.reason


def test_every_partitioned_process_is_named_within_seconds() -> None:
    """Check names of processes whose last renewal was up to one period of 1.5 s before the cut."""
    for passed_s in (3.1, 5.0, 29.0):
        cut = [entry("worker/w1", renewed_s=passed_s), entry("node/h1", renewed_s=passed_s + 1.5)]
        named = {stall.culprit for stall in diagnose(cut, NOTHING, NOW)}
        assert named == {"worker/w1", "node/h1"}


def test_released_process_is_a_stall_only_with_a_waiter() -> None:
    released = entry("engine/g1", renewed_s=20.0, left=True)
    assert diagnose([released], NOTHING, NOW) == []
    (stall,) = diagnose([released, entry("rollout/0", ("engine/g1", 3.0))], NOTHING, NOW)
    assert "exited" in stall.reason


def test_long_wait_for_a_live_process_is_followed_to_its_end() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 15.0)),
        entry("rollout/0", ("sandbox/0", 14.0)),
        entry("sandbox/0"),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("trainer/job", "sandbox/0"), ("rollout/0", "sandbox/0")}
    assert all("renews its lease but does not answer" in stall.reason for stall in stalls)


def test_long_wait_for_another_resource_names_it() -> None:
    (stall,) = diagnose([entry("rollout/0", ("environment:0", 12.0))], NOTHING, NOW)
    assert stall.culprit == "environment:0"
    assert "has not started" in stall.reason


def test_cycle_of_waits_is_reported_as_a_deadlock() -> None:
    entries = [entry("a", ("b", 12.0)), entry("b", ("c", 12.0)), entry("c", ("b", 12.0))]
    stalls = diagnose(entries, NOTHING, NOW)
    assert all("deadlock" in stall.reason for stall in stalls)


def test_unreconciled_instance_is_a_stall_of_the_planner() -> None:
    (stall,) = diagnose([], pool(make_instance(age_s=45)), NOW)
    assert (stall.waiter, stall.culprit, stall.job) == ("planner", "worker/w1", "job")
    assert stall.what == "to bring the rollout instance of job to accelerator on w1"
    assert "g1.0 is starting at accelerator" in stall.reason
    assert diagnose([], pool(make_instance(age_s=10)), NOW) == []
    (silent,) = diagnose([], pool(make_instance(doing=None, age_s=45)), NOW)
    assert "it has not reported g1.0 yet" in silent.reason


def test_instance_that_does_not_sleep_is_a_stall_alone() -> None:
    awake = make_instance("g1.1", "other", InstancePhase.READY, age_s=500)
    sleepy = make_instance("g1.0", "job", InstancePhase.MOVING, age_s=45, tier=Tier.MEMORY)
    (stall,) = diagnose([], pool(awake, sleepy), NOW)
    assert stall.what == "to bring the rollout instance of job to memory on w1"
    assert (stall.culprit, stall.job) == ("worker/w1", "job")


def test_instance_that_cannot_sleep_gives_the_reason() -> None:
    stuck = make_instance(
        doing=InstancePhase.MOVING, age_s=70, detail="OSError: no room", tier=Tier.DISK
    )
    (stall,) = diagnose([entry("engine/g1.0")], pool(stuck), NOW)
    assert stall.reason == "g1.0 is moving at accelerator: OSError: no room"


def test_loading_process_has_more_time() -> None:
    loads = [entry("engine/g1.0")]
    assert diagnose(loads, pool(make_instance(age_s=120)), NOW) == []
    assert pairs(diagnose(loads, pool(make_instance(age_s=400)), NOW)) == {("planner", "worker/w1")}


def test_instance_on_a_dead_worker_names_the_lost_lease() -> None:
    lapsed = entry("worker/w1", renewed_s=40.0)
    (stall,) = diagnose([lapsed], pool(make_instance(age_s=45)), NOW)
    assert "worker/w1 lost its lease" in stall.reason


def test_silent_redis_blocks_everyone() -> None:
    (stall,) = make_redis_stall(3.0)
    assert (stall.waiter, stall.culprit) == ("all processes", "redis")


def make_exit(name: str, times: int, text: str = "odd", age_s: float = 2.0) -> LastExit:
    error = {"type": "ValueError", "text": text, "where": "calc.py:3", "fix": ""} if text else {}
    at_ms = NOW - int(age_s * 1000)
    return LastExit(name, "job", 1, "exit status 1", at_ms, times, final=False, error=error)


def test_repeatedly_failing_process_is_a_stall() -> None:
    (stall,) = diagnose([entry("rollout/0")], NOTHING, NOW, [make_exit("rollout/0", 3)])
    assert (stall.waiter, stall.culprit) == ("", "rollout/0")
    assert "has exited 3 times, the last time with ValueError: odd (at calc.py:3)" in stall.reason
    assert diagnose([entry("rollout/0")], NOTHING, NOW, [make_exit("rollout/0", 1)]) == [], (
        "it is back"
    )
    assert diagnose([entry("rollout/0")], NOTHING, NOW, [make_exit("rollout/0", 9, text="")]) == []


def test_wait_for_any_engine_names_the_failing_engine() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 12.0)),
        entry("rollout/0", ("an engine", 12.0)),
        entry("engine/g1.0", renewed_s=5.0, left=True),
    ]
    stalls = diagnose(entries, pool(make_instance()), NOW, [make_exit("engine/g1.0", 2)])
    assert {stall.culprit for stall in stalls} == {"engine/g1.0"}
    assert all("ValueError: odd" in stall.reason for stall in stalls)


def test_engine_that_exits_before_registration_is_the_culprit() -> None:
    entries = [entry("rollout/0", ("an engine", 4.0))]
    failing = pool(make_instance(detail="engine/g1.0 ended: ValueError: odd"))
    stalls = diagnose(entries, failing, NOW, [make_exit("engine/g1.0", 2)])
    assert {stall.culprit for stall in stalls} == {"engine/g1.0"}


def test_sleeping_reward_is_named_instead_of_its_sandbox() -> None:
    reward = "a reward of job (process 4711)"
    entries = [
        entry("rollout/0", ("sandbox/0", 11.0)),
        entry("sandbox/0", (reward, 4.0)),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("rollout/0", reward), ("sandbox/0", reward)}
    assert all("it has not finished yet" in stall.reason for stall in stalls)


def make_job(quiet_s: float, slowest_s: float = 0.0, phase: Phase = Phase.TRAINING) -> JobRow:
    """Make a job whose last progress was `quiet_s` ago."""
    counts: dict[str, Any] = dict.fromkeys(COUNT_FIELDS, 0)
    return JobRow(
        id="calc",
        phase=phase,
        document=JobConfig(budget=BudgetConfig(steps=48)).to_document(),
        run_dir="",
        lineage=0,
        version=3,
        manifest="",
        checkpoint="",
        steps_done=3,
        cursor=0,
        admitted=0,
        error="",
        progress_ms=NOW - int(quiet_s * 1000),
        slowest_progress_ms=int(slowest_s * 1000),
        **counts,
    )


def test_job_without_progress_is_a_stall_without_waiters() -> None:
    (stall,) = diagnose([entry("rollout/0")], NOTHING, NOW, jobs=[make_job(400.0)])
    assert (stall.waiter, stall.culprit, stall.since_s) == ("", "job calc", 400.0)
    assert "in phase training, at step 3 of 48" in stall.reason
    assert diagnose([], NOTHING, NOW, jobs=[make_job(100.0)]) == []
    assert diagnose([], NOTHING, NOW, jobs=[make_job(400.0, slowest_s=300.0)]) == [], (
        "it is a slow one"
    )
    assert diagnose([], NOTHING, NOW, jobs=[make_job(400.0, phase=Phase.FAILED)]) == []


def test_blocked_job_is_not_without_progress() -> None:
    for held in ("waiting: it needs 2 workers, and 1 is idle", "paused: job big has priority 1"):
        assert diagnose([], NOTHING, NOW, jobs=[replace(make_job(900.0), block_reason=held)]) == []
    assert diagnose([], NOTHING, NOW, jobs=[make_job(900.0)]), "it was let go on"


# two jobs on one mesh


def make_paused_waits() -> list[RegistryEntry]:
    """Make waits of job calc, which is paused while it waits, and of job big, which runs."""
    return [
        entry("trainer/calc", ("rollout/calc/0", 600.0)),
        entry("rollout/calc/0", ("engine/g1.0", 600.0)),
        entry("engine/g1.0"),
        entry("trainer/big", ("rollout/big/0", 2.0)),
        entry("rollout/big/0"),
    ]


def test_waits_of_a_paused_job_alone_are_ignored() -> None:
    paused = replace(make_job(600.0), block_reason="paused: job big has priority 1")
    assert diagnose(make_paused_waits(), NOTHING, NOW, jobs=[paused]) == []
    runs = replace(paused, block_reason="", progress_ms=NOW)
    assert {s.job for s in diagnose(make_paused_waits(), NOTHING, NOW, jobs=[runs])} == {"calc"}


def test_stall_names_only_engines_of_its_own_job() -> None:
    entries = [
        entry("rollout/calc/0", ("an engine", 12.0)),
        entry("rollout/big/0", ("engine/g1.1", 2.0)),
        entry("engine/g1.1"),
        entry("sandbox/big/0", renewed_s=5.0),
    ]
    wanted = pool(make_instance("g1.0", "calc"), make_instance("g1.1", "big"))
    stalls = diagnose(entries, wanted, NOW)
    assert [(s.waiter, s.culprit, s.job) for s in stalls] == [
        ("rollout/calc/0", "engine/g1.0", "calc"),
        ("", "sandbox/big/0", "big"),
    ]


def test_wait_for_a_time_slice_names_the_holder() -> None:
    scheduler = replace(entry("worker/w1"), stats={"slice_holders": ["g1.1"]})
    wait = {"on": "worker/w1", "what": "acquire_slice", "since_ms": NOW - 40_000}
    waiter = replace(entry("engine/g1.0"), waits=[wait])
    turns = pool(
        make_instance(doing=InstancePhase.READY), make_instance("g1.1", "big", InstancePhase.READY)
    )
    (stall,) = diagnose([scheduler, waiter, entry("engine/g1.1")], turns, NOW)
    assert (stall.waiter, stall.culprit, stall.job) == ("engine/g1.0", "engine/g1.1", "job")
    assert "engine/g1.1 holds the time slice and has not released it" in stall.reason
    (stopped,) = diagnose([scheduler, waiter, entry("engine/g1.1", renewed_s=5.0)], turns, NOW)
    assert "engine/g1.1 has not renewed its lease" in stopped.reason
    short = [wait | {"since_ms": NOW - 20_000}]
    assert (
        diagnose([scheduler, replace(waiter, waits=short), entry("engine/g1.1")], turns, NOW) == []
    )


def test_missing_shard_is_attributed_to_its_agent() -> None:
    planned = pool(services=(("h0", "rollout/calc/0"), ("h0", "sandbox/calc/0")))
    there, job = [entry("sandbox/calc/0")], make_job(60.0)
    (stall,) = diagnose(there, planned, NOW, jobs=[job])
    assert (stall.waiter, stall.culprit, stall.job) == ("planner", "node/h0", "calc")
    assert stall.what == "to start rollout/calc/0"
    (ends,) = diagnose(there, planned, NOW, [make_exit("rollout/calc/0", 1, age_s=50.0)], [job])
    assert ends.culprit == "rollout/calc/0" and "ValueError: odd" in ends.reason
    (away,) = diagnose([*there, entry("node/h0", renewed_s=30.0)], planned, NOW, jobs=[job])
    assert "node/h0 lost its lease" in away.reason
    assert diagnose(there, planned, NOW, jobs=[replace(job, block_reason="waiting: workers")]) == []
    assert diagnose(there, planned, NOW, jobs=[make_job(10.0)]) == [], "it may still come"
    further = replace(make_job(0.0), blocked_since_ms=NOW - 60_000)  # other shards make progress
    (stall,) = diagnose(there, planned, NOW, jobs=[further])
    assert stall.culprit == "node/h0"


def make_agent(name: str, takes: list[str], renewed_s: float = 1.0) -> RegistryEntry:
    """Make an agent with the services that its host accepts."""
    agent = entry(f"node/{name}", renewed_s=renewed_s)
    return replace(agent, host=name, stats={"accepted_services": takes})


def test_only_host_for_a_service_is_named_while_it_is_away() -> None:
    there = [
        entry("sandbox/calc/0"),
        make_agent("h0", ["sandboxes"]),
        make_agent("h1", ["shards"], renewed_s=30.0),
    ]
    served = (("h0", "sandbox/calc/0"), ("h1", "rollout/calc/0"))
    said = "no host accepts its shards now: h0 accepts sandboxes; h1 accepts them, but is away"
    for services in (served, served[:1]):  # assigned to the host, or unassigned since
        (stall,) = diagnose(there, pool(services=services), NOW, jobs=[make_job(60.0)])
        assert (stall.waiter, stall.culprit, stall.job) == ("planner", "node/h1", "calc")
        assert stall.what == "to start rollout/calc/0" and said in stall.reason
        assert "lost its lease" in stall.reason
        (soon,) = diagnose(there, pool(services=services), NOW, jobs=[make_job(10.0)])
        assert (soon.waiter, soon.what) == ("", "its lease"), "nobody waits yet"
    (other,) = diagnose(
        [*there, make_agent("h2", ["shards"])], pool(services=served), NOW, jobs=[make_job(60.0)]
    )
    assert said not in other.reason, "the planner moves it there"


def test_activity_shows_loop_lag_and_longest_wait() -> None:
    engine = replace(entry("engine/g1"), pid=7, stats={"loop_lag_ms": 4200.0, "running": 3})
    trainer = entry("trainer/calc", ("rollout/0", 3.0), ("weights", 40.0))
    assert [e.name for e in list_working_processes([engine, entry("weights"), trainer])] == [
        "trainer/calc",
        "engine/g1",
    ]
    assert describe_activity(engine, NOW) == (
        "engine/g1 (7): ready, its event loop is 4.2 s late, running 3, waits for no process"
    )
    assert "waits for weights (ask) for 40 s" in describe_activity(trainer, NOW)


def test_wait_for_disk_space_leads_to_the_full_disk() -> None:
    entries = [entry("trainer/job", ("rollout/0", 5.0)), entry("rollout/0", ("disk", 4.0))]
    stalls = diagnose(entries, NOTHING, NOW, full="the disk of /runs is full (0 KiB are free)")
    assert pairs(stalls) == {("trainer/job", "disk"), ("rollout/0", "disk")}
    assert all("the disk of /runs is full" in stall.reason for stall in stalls)


def test_blocked_event_loop_is_the_cause_despite_renewals() -> None:
    still = replace(entry("engine/g1"), stats={"loop_lag_ms": 5000.0})
    entries = [entry("trainer/job", ("rollout/0", 6.0)), entry("rollout/0", ("engine/g1", 5.0))]
    stalls = diagnose([*entries, still], NOTHING, NOW)
    assert {stall.culprit for stall in stalls} == {"engine/g1"}
    assert all("its event loop has been blocked for 5.0 s" in stall.reason for stall in stalls)
