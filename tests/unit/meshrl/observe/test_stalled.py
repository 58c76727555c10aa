"""A stall is traced from who waits to the process that does not move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.state.ended import Ended
from common.state.gangs import Gang
from common.state.jobs import COUNTS, JobRow, Phase
from common.state.registry import LEASE_MS, Entry
from meshrl.observe.quiet import doing, working
from meshrl.observe.stalled import Stall, diagnose, redis_silent

NOW = 1_000_000


def entry(
    name: str, *waits: tuple[str, float], renewed_s: float = 1.0, left: bool = False
) -> Entry:
    """A process that renewed `renewed_s` ago and waits for (name, seconds)."""
    renewed_ms = NOW - int(renewed_s * 1000)
    expires_ms = renewed_ms + (100 if left else LEASE_MS)
    listed: list[dict[str, Any]] = [
        {"on": on, "what": "ask", "since_ms": NOW - int(s * 1000)} for on, s in waits
    ]
    return Entry(
        name=name,
        kind=name.partition("/")[0],
        waits=listed,
        renewed_ms=renewed_ms,
        expires_ms=expires_ms,
        alive=expires_ms > NOW,
    )


def gang(state: str, epoch: int, actual_epoch: int, age_s: float) -> Gang:
    return Gang(
        id="g1",
        workers=["worker/g1"],
        accelerator="cpu:1",
        desired_role="rollout",
        desired_job="job",
        desired_core=False,
        epoch=epoch,
        actual_role="rollout",
        actual_state=state,
        actual_epoch=actual_epoch,
        changed_ms=NOW - int(age_s * 1000),
        pinned=False,
    )


def pairs(stalls: list[Stall]) -> set[tuple[str, str]]:
    return {(stall.waiter, stall.culprit) for stall in stalls}


def test_a_mesh_in_which_all_renew_and_nobody_waits_long_is_not_stalled() -> None:
    entries = [entry("trainer/job", ("rollout/0", 2.0)), entry("rollout/0")]
    assert diagnose(entries, [gang("ready", 3, 3, 500)], NOW) == []


def test_a_process_that_stopped_renewing_is_named_with_who_waits_for_it() -> None:
    entries = [entry("rollout/0", ("engine/g1", 4.2)), entry("engine/g1", renewed_s=4.0)]
    (stall,) = diagnose(entries, [], NOW)
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
    stalls = diagnose(entries, [], NOW)
    assert pairs(stalls) == {("trainer/job", "engine/g1"), ("rollout/0", "engine/g1")}
    through = next(s for s in stalls if s.waiter == "trainer/job")
    assert "through rollout/0" in through.reason


def test_a_process_whose_lease_has_lapsed_stays_the_culprit() -> None:
    entries = [entry("rollout/0", ("weights", 9.0)), entry("weights", renewed_s=8.0)]
    (stall,) = diagnose(entries, [], NOW)
    assert stall.culprit == "weights"
    assert "lost its lease" in stall.reason


def test_an_overdue_process_that_nobody_waits_for_is_listed_last() -> None:
    entries = [
        entry("planner/1", renewed_s=5.0),
        entry("rollout/0", ("engine/g1", 4.0)),
        entry("engine/g1", renewed_s=4.0),
    ]
    stalls = diagnose(entries, [], NOW)
    assert pairs(stalls) == {("rollout/0", "engine/g1"), ("", "planner/1")}
    assert stalls[-1].culprit == "planner/1"
    assert "overdue, nobody waits" in stalls[-1].reason


def test_a_process_that_left_is_no_news_unless_someone_waits_for_it() -> None:
    gone = entry("engine/g1", renewed_s=20.0, left=True)
    assert diagnose([gone], [], NOW) == []
    (stall,) = diagnose([gone, entry("rollout/0", ("engine/g1", 3.0))], [], NOW)
    assert "ended" in stall.reason


def test_a_long_wait_on_a_live_process_is_followed_to_its_end() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 15.0)),
        entry("rollout/0", ("sandbox/0", 14.0)),
        entry("sandbox/0"),
    ]
    stalls = diagnose(entries, [], NOW)
    assert pairs(stalls) == {("trainer/job", "sandbox/0"), ("rollout/0", "sandbox/0")}
    assert all("renews but does not answer" in stall.reason for stall in stalls)


def test_a_long_wait_for_something_that_is_no_process_names_it() -> None:
    (stall,) = diagnose([entry("rollout/0", ("environment:0", 12.0))], [], NOW)
    assert stall.culprit == "environment:0"
    assert "has not come" in stall.reason


def test_a_circle_of_waits_is_called_one() -> None:
    entries = [entry("a", ("b", 12.0)), entry("b", ("c", 12.0)), entry("c", ("b", 12.0))]
    stalls = diagnose(entries, [], NOW)
    assert all("circle" in stall.reason for stall in stalls)


def test_a_gang_that_does_not_reach_its_role_is_a_stall_of_the_planner() -> None:
    (stall,) = diagnose([], [gang("starting", 3, 3, 45)], NOW)
    assert (stall.waiter, stall.culprit) == ("planner", "worker/g1")
    assert diagnose([], [gang("starting", 3, 3, 10)], NOW) == []


def test_a_silent_redis_holds_up_everyone() -> None:
    (stall,) = redis_silent(3.0)
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")


def gone(name: str, times: int, text: str = "odd", age_s: float = 2.0) -> Ended:
    error = {"type": "ValueError", "text": text, "where": "calc.py:3", "fix": ""} if text else {}
    at_ms = NOW - int(age_s * 1000)
    return Ended(name, "job", 1, "exit status 1", at_ms, times, final=False, error=error)


def test_a_process_that_errors_end_again_and_again_is_never_nothing() -> None:
    (stall,) = diagnose([entry("rollout/0")], [], NOW, [gone("rollout/0", 3)])
    assert (stall.waiter, stall.culprit) == ("", "rollout/0")
    assert "has ended 3 times, the last time by ValueError: odd (at calc.py:3)" in stall.reason
    assert diagnose([entry("rollout/0")], [], NOW, [gone("rollout/0", 1)]) == [], "it is back"
    assert diagnose([entry("rollout/0")], [], NOW, [gone("rollout/0", 9, text="")]) == []


def test_who_waits_for_any_engine_is_told_which_one_does_not_come_and_why() -> None:
    entries = [
        entry("trainer/job", ("rollout/0", 12.0)),
        entry("rollout/0", ("an engine", 12.0)),
        entry("engine/g1", renewed_s=5.0, left=True),
    ]
    gangs = [replace(gang("starting", 3, 3, 5), detail="")]
    stalls = diagnose(entries, gangs, NOW, [gone("engine/g1", 2)])
    assert {stall.culprit for stall in stalls} == {"engine/g1"}
    assert all("ValueError: odd" in stall.reason for stall in stalls)


def test_an_engine_that_ends_before_it_has_a_name_is_the_cause_too() -> None:
    entries = [entry("rollout/0", ("an engine", 4.0))]
    failing = replace(gang("starting", 3, 3, 5), detail="engine/g1 ended: ValueError: odd")
    stalls = diagnose(entries, [failing], NOW, [gone("engine/g1", 2)])
    assert {stall.culprit for stall in stalls} == {"engine/g1"}


def test_a_reward_that_sleeps_is_named_and_not_the_sandbox_that_waits_for_it() -> None:
    reward = "a reward of job (process 4711)"
    entries = [
        entry("rollout/0", ("sandbox/0", 11.0)),
        entry("sandbox/0", (reward, 4.0)),
    ]
    stalls = diagnose(entries, [], NOW)
    assert pairs(stalls) == {("rollout/0", reward), ("sandbox/0", reward)}
    assert all("it has not ended yet" in stall.reason for stall in stalls)


def at_work(quiet_s: float, slowest_s: float = 0.0, phase: Phase = Phase.TRAINING) -> JobRow:
    """A job that came further `quiet_s` ago."""
    counts = dict.fromkeys(COUNTS, 0)
    return JobRow(
        id="calc",
        phase=phase,
        document={"budget": {"steps": 48}},
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
        slowest_ms=int(slowest_s * 1000),
        **counts,
    )


def test_a_job_without_progress_is_never_nothing_though_nobody_waits() -> None:
    (stall,) = diagnose([entry("rollout/0")], [], NOW, jobs=[at_work(400.0)])
    assert (stall.waiter, stall.culprit, stall.since_s) == ("", "job calc", 400.0)
    assert "in phase training, at step 3 of 48" in stall.reason
    assert diagnose([], [], NOW, jobs=[at_work(100.0)]) == []
    assert diagnose([], [], NOW, jobs=[at_work(400.0, slowest_s=300.0)]) == [], "it is a slow one"
    assert diagnose([], [], NOW, jobs=[at_work(400.0, phase=Phase.FAILED)]) == []


def test_a_job_that_waits_for_its_turn_is_not_without_progress() -> None:
    behind = replace(at_work(900.0, phase=Phase.QUEUED), id="next")
    assert diagnose([], [], NOW, jobs=[at_work(1.0), behind]) == []
    (stall,) = diagnose([], [], NOW, jobs=[behind])
    assert stall.culprit == "job next"


def test_what_a_process_does_is_said_with_its_lag_and_its_longest_wait() -> None:
    engine = replace(entry("engine/g1"), pid=7, stats={"loop_lag_ms": 4200.0, "running": 3})
    trainer = entry("trainer/calc", ("rollout/0", 3.0), ("weights", 40.0))
    assert [e.name for e in working([engine, entry("weights"), trainer])] == [
        "trainer/calc",
        "engine/g1",
    ]
    assert doing(engine, NOW) == (
        "engine/g1 (7): ready, its event loop is 4.2 s late, running 3, waits for nobody"
    )
    assert "waits for weights (ask) since 40 s" in doing(trainer, NOW)


def test_a_wait_for_room_leads_to_the_disk_that_is_full() -> None:
    entries = [entry("trainer/job", ("rollout/0", 5.0)), entry("rollout/0", ("disk", 4.0))]
    stalls = diagnose(entries, [], NOW, full="the disk of /runs is full (0 KiB are free)")
    assert pairs(stalls) == {("trainer/job", "disk"), ("rollout/0", "disk")}
    assert all("the disk of /runs is full" in stall.reason for stall in stalls)


def test_a_loop_that_stands_still_is_the_cause_though_its_lease_is_renewed() -> None:
    still = replace(entry("engine/g1"), stats={"loop_lag_ms": 5000.0})
    entries = [entry("trainer/job", ("rollout/0", 6.0)), entry("rollout/0", ("engine/g1", 5.0))]
    stalls = diagnose([*entries, still], [], NOW)
    assert {stall.culprit for stall in stalls} == {"engine/g1"}
    assert all("its event loop has stood still for 5.0 s" in stall.reason for stall in stalls)
