"""A stall is traced from who waits to the process that does not move."""

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
    """A process that renewed `renewed_s` ago and waits for (name, seconds)."""
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
    """The stalls of a mesh with these rows besides."""
    rows = replace(mesh, entries=entries, now_ms=now_ms, last_exits=ended, jobs=jobs)
    return diagnosed(rows, full, stopped)


def resident(
    id: str = "g1.0",
    job: str = "job",
    doing: InstancePhase | None = InstancePhase.STARTING,
    age_s: float = 5.0,
    role: Role = Role.ROLLOUT,
    detail: str = "",
    tier: Tier = Tier.ACCELERATOR,
) -> Instance:
    """A resident whose wish was written so long ago; its worker reports `doing`, or nothing."""
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


def pool(*residents: Instance, services: tuple[tuple[str, str], ...] = ()) -> MeshSnapshot:
    """A gang of one worker, g1 of w1, with these."""
    gang = Gang("g1", ("w1",), 1, residents)
    return MeshSnapshot((WorkerRow("w1", "h0", "cpu:1", 7, gang="g1"),), (gang,), services=services)


def pairs(stalls: list[Stall]) -> set[tuple[str, str]]:
    return {(stall.waiter, stall.culprit) for stall in stalls}


def test_a_mesh_in_which_all_renew_and_nobody_waits_long_is_not_stalled() -> None:
    entries = [entry("trainer/job", ("rollout/0", 2.0)), entry("rollout/0")]
    assert diagnose(entries, pool(resident(doing=InstancePhase.READY, age_s=500)), NOW) == []


def test_a_process_that_stopped_renewing_is_named_with_who_waits_for_it() -> None:
    entries = [entry("rollout/0", ("engine/g1", 4.2)), entry("engine/g1", renewed_s=4.0)]
    (stall,) = diagnose(entries, NOTHING, NOW)
    assert (stall.waiter, stall.culprit, stall.what) == ("rollout/0", "engine/g1", "ask")
    assert stall.since_s == 4.2
    assert "has not renewed its lease for 4.0 s" in stall.reason


def test_a_chain_of_waits_leads_to_its_end() -> None:
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


def test_a_process_whose_lease_has_lapsed_stays_the_culprit() -> None:
    entries = [entry("rollout/0", ("weights", 9.0)), entry("weights", renewed_s=8.0)]
    (stall,) = diagnose(entries, NOTHING, NOW)
    assert stall.culprit == "weights"
    assert "lost its lease" in stall.reason


def test_an_overdue_process_that_nobody_waits_for_is_listed_last() -> None:
    entries = [
        entry("planner/1", renewed_s=5.0),
        entry("rollout/0", ("engine/g1", 4.0)),
        entry("engine/g1", renewed_s=4.0),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("rollout/0", "engine/g1"), ("", "planner/1")}
    assert stalls[-1].culprit == "planner/1"
    assert "overdue, nobody waits" in stalls[-1].reason


def test_a_stopped_environment_process_is_named_whether_or_not_anyone_waits_for_it() -> None:
    name = "environment-rollout-job-0-0"
    shard = entry("rollout/job/0")
    shard.stats = {"environments": {name: 7}, "environments_stopped": {name: NOW - 800}}
    (stall,) = diagnose([shard], NOTHING, NOW)
    assert (stall.waiter, stall.culprit, stall.job, stall.since_s) == ("", name, "job", 0.8)
    assert stall.reason.endswith("stopped by a signal for 0.8 s; nobody waits")
    shard.waits = entry("rollout/job/0", (name, 0.5)).waits
    (stall,) = diagnose([entry("trainer/job", ("rollout/job/0", 0.4)), shard], NOTHING, NOW)[:1]
    assert (stall.waiter, stall.culprit) == ("rollout/job/0", name)
    assert diagnose([replace(shard, stats={}, waits=[])], NOTHING, NOW) == []


def test_a_process_that_a_signal_has_stopped_is_named_at_once_also_if_replaced() -> None:
    entries = [entry("rollout/0", ("engine/g1.0", 0.3)), entry("engine/g1.0", renewed_s=0.9)]
    assert diagnose(entries, NOTHING, NOW) == []
    (stall,) = diagnose(entries, NOTHING, NOW, stopped=["engine/g1.0"])
    assert (stall.waiter, stall.culprit) == ("rollout/0", "engine/g1.0")
    assert "stopped by a signal" in stall.reason
    lost = entry("engine/g1.0", renewed_s=10.0)
    (stall,) = diagnose([lost], NOTHING, NOW, stopped=["engine/g1.0"])
    assert (stall.waiter, stall.culprit) == ("", "engine/g1.0")


def test_a_stall_is_over_at_once_when_who_waited_is_gone_or_nobody_wants_what_is_lost() -> None:
    waiter = entry("trainer/job", ("engine/g1.0", 30.0), renewed_s=10.0)
    lost = entry("engine/g1.0", renewed_s=10.0)
    wanted = pool(resident(doing=InstancePhase.READY))
    (stall,) = diagnose([lost], wanted, NOW)
    assert (stall.waiter, stall.culprit) == ("", "engine/g1.0"), "it is to be there"
    assert diagnose([lost, waiter], NOTHING, NOW) == [], "others do the work of both"
    shard = entry("rollout/job/0", renewed_s=10.0)
    assert pairs(diagnose([shard], pool(services=(("h0", "rollout/job/0"),)), NOW)) == {
        ("", "rollout/job/0")
    }
    assert diagnose([shard], NOTHING, NOW) == []


def test_a_culprit_is_told_with_its_host_where_there_are_several() -> None:
    waiter = replace(entry("rollout/job/0", ("engine/g1.0", 4.0)), host="head-1")
    culprit = replace(entry("engine/g1.0", renewed_s=4.0), host="gpu2-1")
    (stall,) = diagnose([waiter, culprit], NOTHING, NOW)
    assert (stall.culprit, stall.host) == ("engine/g1.0", "gpu2-1")
    assert "engine/g1.0 on gpu2-1 has not renewed" in stall.reason
    (alone,) = diagnose([waiter, replace(culprit, host="head-1")], NOTHING, NOW)
    assert "engine/g1.0 has not renewed" in alone.reason


def test_every_process_behind_a_cut_is_named_within_seconds() -> None:
    """A lease is renewed each 1.5 s: whoever is cut off has done so at most that long before."""
    for passed_s in (3.1, 5.0, 29.0):
        cut = [entry("worker/w1", renewed_s=passed_s), entry("node/h1", renewed_s=passed_s + 1.5)]
        named = {stall.culprit for stall in diagnose(cut, NOTHING, NOW)}
        assert named == {"worker/w1", "node/h1"}


def test_a_process_that_left_is_no_news_unless_someone_waits_for_it() -> None:
    gone = entry("engine/g1", renewed_s=20.0, left=True)
    assert diagnose([gone], NOTHING, NOW) == []
    (stall,) = diagnose([gone, entry("rollout/0", ("engine/g1", 3.0))], NOTHING, NOW)
    assert "ended" in stall.reason


def test_a_long_wait_on_a_live_process_is_followed_to_its_end() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 15.0)),
        entry("rollout/0", ("sandbox/0", 14.0)),
        entry("sandbox/0"),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("trainer/job", "sandbox/0"), ("rollout/0", "sandbox/0")}
    assert all("renews but does not answer" in stall.reason for stall in stalls)


def test_a_long_wait_for_something_that_is_no_process_names_it() -> None:
    (stall,) = diagnose([entry("rollout/0", ("environment:0", 12.0))], NOTHING, NOW)
    assert stall.culprit == "environment:0"
    assert "has not come" in stall.reason


def test_a_circle_of_waits_is_called_one() -> None:
    entries = [entry("a", ("b", 12.0)), entry("b", ("c", 12.0)), entry("c", ("b", 12.0))]
    stalls = diagnose(entries, NOTHING, NOW)
    assert all("circle" in stall.reason for stall in stalls)


def test_a_resident_that_does_not_come_to_its_wish_is_a_stall_of_the_planner() -> None:
    (stall,) = diagnose([], pool(resident(age_s=45)), NOW)
    assert (stall.waiter, stall.culprit, stall.job) == ("planner", "worker/w1", "job")
    assert stall.what == "rollout of job to be at accelerator on w1"
    assert "g1.0 is starting at accelerator" in stall.reason
    assert diagnose([], pool(resident(age_s=10)), NOW) == []
    (silent,) = diagnose([], pool(resident(doing=None, age_s=45)), NOW)
    assert "it has said nothing of g1.0 yet" in silent.reason


def test_one_that_does_not_go_to_sleep_is_a_stall_and_the_one_beside_it_is_not() -> None:
    awake = resident("g1.1", "other", InstancePhase.READY, age_s=500)
    sleepy = resident("g1.0", "job", InstancePhase.MOVING, age_s=45, tier=Tier.MEMORY)
    (stall,) = diagnose([], pool(awake, sleepy), NOW)
    assert stall.what == "rollout of job to be at memory on w1"
    assert (stall.culprit, stall.job) == ("worker/w1", "job")


def test_one_that_cannot_go_to_sleep_says_why() -> None:
    stuck = resident(
        doing=InstancePhase.MOVING, age_s=70, detail="OSError: no room", tier=Tier.DISK
    )
    (stall,) = diagnose([entry("engine/g1.0")], pool(stuck), NOW)
    assert stall.reason == "g1.0 is moving at accelerator: OSError: no room"


def test_a_process_that_is_there_and_loads_has_more_time() -> None:
    loads = [entry("engine/g1.0")]
    assert diagnose(loads, pool(resident(age_s=120)), NOW) == []
    assert pairs(diagnose(loads, pool(resident(age_s=400)), NOW)) == {("planner", "worker/w1")}


def test_a_resident_that_waits_for_a_dead_worker_says_so() -> None:
    gone = entry("worker/w1", renewed_s=40.0)
    (stall,) = diagnose([gone], pool(resident(age_s=45)), NOW)
    assert "worker/w1 lost its lease" in stall.reason


def test_a_silent_redis_holds_up_everyone() -> None:
    (stall,) = make_redis_stall(3.0)
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")


def gone(name: str, times: int, text: str = "odd", age_s: float = 2.0) -> LastExit:
    error = {"type": "ValueError", "text": text, "where": "calc.py:3", "fix": ""} if text else {}
    at_ms = NOW - int(age_s * 1000)
    return LastExit(name, "job", 1, "exit status 1", at_ms, times, final=False, error=error)


def test_a_process_that_errors_end_again_and_again_is_never_nothing() -> None:
    (stall,) = diagnose([entry("rollout/0")], NOTHING, NOW, [gone("rollout/0", 3)])
    assert (stall.waiter, stall.culprit) == ("", "rollout/0")
    assert "has ended 3 times, the last time by ValueError: odd (at calc.py:3)" in stall.reason
    assert diagnose([entry("rollout/0")], NOTHING, NOW, [gone("rollout/0", 1)]) == [], "it is back"
    assert diagnose([entry("rollout/0")], NOTHING, NOW, [gone("rollout/0", 9, text="")]) == []


def test_who_waits_for_any_engine_is_told_which_one_does_not_come_and_why() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 12.0)),
        entry("rollout/0", ("an engine", 12.0)),
        entry("engine/g1.0", renewed_s=5.0, left=True),
    ]
    stalls = diagnose(entries, pool(resident()), NOW, [gone("engine/g1.0", 2)])
    assert {stall.culprit for stall in stalls} == {"engine/g1.0"}
    assert all("ValueError: odd" in stall.reason for stall in stalls)


def test_an_engine_that_ends_before_it_has_a_name_is_the_cause_too() -> None:
    entries = [entry("rollout/0", ("an engine", 4.0))]
    failing = pool(resident(detail="engine/g1.0 ended: ValueError: odd"))
    stalls = diagnose(entries, failing, NOW, [gone("engine/g1.0", 2)])
    assert {stall.culprit for stall in stalls} == {"engine/g1.0"}


def test_a_reward_that_sleeps_is_named_and_not_the_sandbox_that_waits_for_it() -> None:
    reward = "a reward of job (process 4711)"
    entries = [
        entry("rollout/0", ("sandbox/0", 11.0)),
        entry("sandbox/0", (reward, 4.0)),
    ]
    stalls = diagnose(entries, NOTHING, NOW)
    assert pairs(stalls) == {("rollout/0", reward), ("sandbox/0", reward)}
    assert all("it has not ended yet" in stall.reason for stall in stalls)


def at_work(quiet_s: float, slowest_s: float = 0.0, phase: Phase = Phase.TRAINING) -> JobRow:
    """A job that came further `quiet_s` ago."""
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


def test_a_job_without_progress_is_never_nothing_though_nobody_waits() -> None:
    (stall,) = diagnose([entry("rollout/0")], NOTHING, NOW, jobs=[at_work(400.0)])
    assert (stall.waiter, stall.culprit, stall.since_s) == ("", "job calc", 400.0)
    assert "in phase training, at step 3 of 48" in stall.reason
    assert diagnose([], NOTHING, NOW, jobs=[at_work(100.0)]) == []
    assert diagnose([], NOTHING, NOW, jobs=[at_work(400.0, slowest_s=300.0)]) == [], (
        "it is a slow one"
    )
    assert diagnose([], NOTHING, NOW, jobs=[at_work(400.0, phase=Phase.FAILED)]) == []


def test_a_job_that_waits_or_is_paused_is_not_without_progress() -> None:
    for held in ("waiting: it needs 2 workers, and 1 is idle", "paused: job big has priority 1"):
        assert diagnose([], NOTHING, NOW, jobs=[replace(at_work(900.0), block_reason=held)]) == []
    assert diagnose([], NOTHING, NOW, jobs=[at_work(900.0)]), "it was let go on"


# Two jobs on one mesh


def asleep() -> list[RegistryEntry]:
    """Job calc is paused in the middle of its waits; job big goes on."""
    return [
        entry("trainer/calc", ("rollout/calc/0", 600.0)),
        entry("rollout/calc/0", ("engine/g1.0", 600.0)),
        entry("engine/g1.0"),
        entry("trainer/big", ("rollout/big/0", 2.0)),
        entry("rollout/big/0"),
    ]


def test_the_waits_of_a_paused_job_stand_still_and_those_of_others_do_not() -> None:
    paused = replace(at_work(600.0), block_reason="paused: job big has priority 1")
    assert diagnose(asleep(), NOTHING, NOW, jobs=[paused]) == []
    runs = replace(paused, block_reason="", progress_ms=NOW)
    assert {s.job for s in diagnose(asleep(), NOTHING, NOW, jobs=[runs])} == {"calc"}


def test_a_stall_is_its_own_job_s_and_names_none_that_serves_another() -> None:
    entries = [
        entry("rollout/calc/0", ("an engine", 12.0)),
        entry("rollout/big/0", ("engine/g1.1", 2.0)),
        entry("engine/g1.1"),
        entry("sandbox/big/0", renewed_s=5.0),
    ]
    wanted = pool(resident("g1.0", "calc"), resident("g1.1", "big"))
    stalls = diagnose(entries, wanted, NOW)
    assert [(s.waiter, s.culprit, s.job) for s in stalls] == [
        ("rollout/calc/0", "engine/g1.0", "calc"),
        ("", "sandbox/big/0", "big"),
    ]


def test_who_waits_for_a_turn_is_told_who_has_it() -> None:
    keeper = replace(entry("worker/w1"), stats={"turn_of": ["g1.1"]})
    wait = {"on": "worker/w1", "what": "acquire_slice", "since_ms": NOW - 40_000}
    waiter = replace(entry("engine/g1.0"), waits=[wait])
    turns = pool(resident(doing=InstancePhase.READY), resident("g1.1", "big", InstancePhase.READY))
    (stall,) = diagnose([keeper, waiter, entry("engine/g1.1")], turns, NOW)
    assert (stall.waiter, stall.culprit, stall.job) == ("engine/g1.0", "engine/g1.1", "job")
    assert "engine/g1.1 has the turn and has not given it back" in stall.reason
    (stopped,) = diagnose([keeper, waiter, entry("engine/g1.1", renewed_s=5.0)], turns, NOW)
    assert "engine/g1.1 has not renewed its lease" in stopped.reason
    short = [wait | {"since_ms": NOW - 20_000}]
    assert diagnose([keeper, replace(waiter, waits=short), entry("engine/g1.1")], turns, NOW) == []


def test_a_shard_that_is_planned_and_not_there_is_its_agent_s() -> None:
    planned = pool(services=(("h0", "rollout/calc/0"), ("h0", "sandbox/calc/0")))
    there, job = [entry("sandbox/calc/0")], at_work(60.0)
    (stall,) = diagnose(there, planned, NOW, jobs=[job])
    assert (stall.waiter, stall.culprit, stall.job) == ("planner", "node/h0", "calc")
    assert stall.what == "to start rollout/calc/0"
    (ends,) = diagnose(there, planned, NOW, [gone("rollout/calc/0", 1, age_s=50.0)], [job])
    assert ends.culprit == "rollout/calc/0" and "ValueError: odd" in ends.reason
    (away,) = diagnose([*there, entry("node/h0", renewed_s=30.0)], planned, NOW, jobs=[job])
    assert "node/h0 lost its lease" in away.reason
    assert diagnose(there, planned, NOW, jobs=[replace(job, block_reason="waiting: workers")]) == []
    assert diagnose(there, planned, NOW, jobs=[at_work(10.0)]) == [], "it may still come"
    further = replace(at_work(0.0), blocked_since_ms=NOW - 60_000)  # other shards bring it on
    (stall,) = diagnose(there, planned, NOW, jobs=[further])
    assert stall.culprit == "node/h0"


def of_host(name: str, takes: list[str], renewed_s: float = 1.0) -> RegistryEntry:
    """An agent, which says what its host takes."""
    agent = entry(f"node/{name}", renewed_s=renewed_s)
    return replace(agent, host=name, stats={"takes": takes})


def test_the_only_host_that_takes_a_service_is_named_while_it_is_away() -> None:
    there = [
        entry("sandbox/calc/0"),
        of_host("h0", ["sandboxes"]),
        of_host("h1", ["shards"], renewed_s=30.0),
    ]
    served = (("h0", "sandbox/calc/0"), ("h1", "rollout/calc/0"))
    said = "no host takes its shards now: h0 takes sandboxes; h1 takes them and is away"
    for services in (served, served[:1]):  # left to it, or placed nowhere since
        (stall,) = diagnose(there, pool(services=services), NOW, jobs=[at_work(60.0)])
        assert (stall.waiter, stall.culprit, stall.job) == ("planner", "node/h1", "calc")
        assert stall.what == "to start rollout/calc/0" and said in stall.reason
        assert "lost its lease" in stall.reason
        (soon,) = diagnose(there, pool(services=services), NOW, jobs=[at_work(10.0)])
        assert (soon.waiter, soon.what) == ("", "its lease"), "nobody waits yet"
    (other,) = diagnose(
        [*there, of_host("h2", ["shards"])], pool(services=served), NOW, jobs=[at_work(60.0)]
    )
    assert said not in other.reason, "the planner moves it there"


def test_what_a_process_does_is_said_with_its_lag_and_its_longest_wait() -> None:
    engine = replace(entry("engine/g1"), pid=7, stats={"loop_lag_ms": 4200.0, "running": 3})
    trainer = entry("trainer/calc", ("rollout/0", 3.0), ("weights", 40.0))
    assert [e.name for e in list_working_processes([engine, entry("weights"), trainer])] == [
        "trainer/calc",
        "engine/g1",
    ]
    assert describe_activity(engine, NOW) == (
        "engine/g1 (7): ready, its event loop is 4.2 s late, running 3, waits for nobody"
    )
    assert "waits for weights (ask) since 40 s" in describe_activity(trainer, NOW)


def test_a_wait_for_room_leads_to_the_disk_that_is_full() -> None:
    entries = [entry("trainer/job", ("rollout/0", 5.0)), entry("rollout/0", ("disk", 4.0))]
    stalls = diagnose(entries, NOTHING, NOW, full="the disk of /runs is full (0 KiB are free)")
    assert pairs(stalls) == {("trainer/job", "disk"), ("rollout/0", "disk")}
    assert all("the disk of /runs is full" in stall.reason for stall in stalls)


def test_a_loop_that_stands_still_is_the_cause_though_its_lease_is_renewed() -> None:
    still = replace(entry("engine/g1"), stats={"loop_lag_ms": 5000.0})
    entries = [entry("trainer/job", ("rollout/0", 6.0)), entry("rollout/0", ("engine/g1", 5.0))]
    stalls = diagnose([*entries, still], NOTHING, NOW)
    assert {stall.culprit for stall in stalls} == {"engine/g1"}
    assert all("its event loop has stood still for 5.0 s" in stall.reason for stall in stalls)
