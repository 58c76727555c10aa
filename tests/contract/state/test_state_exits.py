"""Process exits: reported once, stored by name and charged to their jobs."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from meshrl.common.base.errors import ConfigError, PeerLost
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.supervision.exit_reports import (
    ExitReport,
    read_last_exits,
    report_exit,
)
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.keys import job_prefix
from meshrl.common.state.registry import RegistryEntry, register
from tests.contract.state.state_bench import JOB, TRAINER, Bench

ODD_FAILURE = Failure.from_error(ValueError("odd"))


def exit_report(failure: Failure | None, **more: object) -> ExitReport:
    template = ExitReport("engine/g0", 1, "exit status 1", failure, JOB, log="/logs/engine-g0.log")
    return replace(template, **more)  # type: ignore[arg-type]


async def read_phase(bench: Bench) -> tuple[str, str]:
    row = await jobs.read_job(bench.state, JOB)
    return row.phase, row.error


async def test_permanent_error_fails_the_job_at_once(bench: Bench) -> None:
    await bench.training_job()
    failure = Failure.from_error(
        ConfigError("too long", where="rollout.max_tokens", fix="lower it")
    )
    assert await report_exit(bench.state, exit_report(failure, final=True))
    job_phase, error = await read_phase(bench)
    assert job_phase == "failed"
    assert error == (
        "engine/g0 exited: ConfigError: too long (at rollout.max_tokens). lower it. "
        "Its log: /logs/engine-g0.log"
    )
    exit_events = [e for e in await events.read_all(bench.state) if e.kind == "process_ended"]
    assert (
        exit_events[0].fields["error"]["text"] == "too long" and exit_events[0].fields["job"] == JOB
    )


async def test_same_error_three_times_without_a_step_fails_the_job(simulated: Bench) -> None:
    bench = simulated
    seats = await bench.training_job(groups_per_step=1)
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE))
    assert not await report_exit(bench.state, exit_report(Failure.from_error(KeyError("another"))))
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE))
    assert (await read_phase(bench))[0] == "training"
    opened = await seats.admit()
    await seats.finish(opened[0])
    await seats.commit(1, await seats.leased(1))
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE)), "there was a step since"
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE))
    assert not await report_exit(bench.state, exit_report(Failure.from_error(KeyError("another"))))
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE)), (
        "a predecessor may hold what it needs"
    )
    await advance_s(bench, 10.0)
    assert await report_exit(bench.state, exit_report(ODD_FAILURE)), (
        "each error is counted for itself"
    )
    assert "ValueError: odd" in (await read_phase(bench))[1]


CRASHED = {"code": -11, "why": "signal 11"}


async def test_kills_and_lost_peers_do_not_fail_the_job_soon(bench: Bench) -> None:
    await bench.training_job()
    for failure in (None, Failure.from_error(PeerLost("gone"))):
        for _ in range(5):
            assert not await report_exit(bench.state, exit_report(failure, code=-9, why="signal 9"))
    assert (await read_phase(bench))[0] == "training"
    (end,) = await read_last_exits(bench.state)
    assert (end.name, end.times, end.why) == ("engine/g0", 10, "signal 9")


async def test_restart_budget_exhausted_by_a_jobs_errors_fails_that_job(bench: Bench) -> None:
    await bench.training_job()
    job_failure = replace(ODD_FAILURE, job=JOB)
    assert await report_exit(
        bench.state, exit_report(job_failure, job="", is_budget_exhausted=True, emit_event=False)
    )
    assert (await read_phase(bench))[0] == "failed"
    assert "process_ended" not in {e.kind for e in await events.read_all(bench.state)}


async def test_resent_exit_report_counts_once(bench: Bench) -> None:
    await bench.training_job()
    once = exit_report(ODD_FAILURE)
    for _ in range(4):
        await report_exit(bench.state, once)
    assert (await read_last_exits(bench.state))[0].times == 1
    exit_events = [e for e in await events.read_all(bench.state) if e.kind == "process_ended"]
    assert len(exit_events) == 1


async def test_reopened_job_has_fresh_error_counts(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(3):
        await report_exit(bench.state, exit_report(ODD_FAILURE))
        await advance_s(bench, 5.0)
    assert (await read_phase(bench))[0] == "failed"
    await jobs.reopen(bench.state, JOB, "again")
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE))
    token = await bench.seat(TRAINER)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.STOPPED, token, TRAINER)
    failure = Failure.from_error(ConfigError("late"))
    assert not await report_exit(bench.state, exit_report(failure)), "it has ended already"


async def test_follow_up_report_is_not_counted_as_another_exit(bench: Bench) -> None:
    await bench.training_job()
    for _ in range(2):
        assert not await report_exit(bench.state, exit_report(ODD_FAILURE))
    assert not await report_exit(bench.state, exit_report(ODD_FAILURE, emit_event=False))
    assert (await read_last_exits(bench.state))[0].times == 2
    assert (await read_phase(bench))[0] == "training"


async def test_restart_budget_exhausted_by_external_faults_fails_no_job(bench: Bench) -> None:
    await bench.training_job()
    for error in (PeerLost("gone"), OSError(errno.EDQUOT, "no room")):
        lost = replace(Failure.from_error(error), job=JOB)
        assert not await report_exit(
            bench.state, exit_report(lost, job="", is_budget_exhausted=True, emit_event=False)
        )
    assert (await read_phase(bench))[0] == "training"


async def advance_s(bench: Bench, seconds: float) -> None:
    await bench.pass_ms(int(seconds * 1000))


async def test_crash_at_each_start_fails_the_job_with_the_signals_name(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(7):
        assert not await report_exit(bench.state, exit_report(None, **CRASHED))
        await advance_s(bench, 4.0)
    await advance_s(bench, 2.0)
    assert await report_exit(bench.state, exit_report(None, **CRASHED))
    job_phase, error = await read_phase(bench)
    assert job_phase == "failed"
    assert error.startswith("engine/g0 exited: signal 11 (SIGSEGV) (8 ends in 30 s, without")
    assert "Native code has crashed" in error and "/logs/engine-g0.log" in error


KILLED = {"code": -9, "why": "signal 9"}


async def test_repeatedly_preempted_engines_fail_no_job(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(9):
        await advance_s(bench, 180.0)
        assert not await report_exit(bench.state, exit_report(None, **KILLED, run_time_s=170.0))
        assert not await report_exit(bench.state, exit_report(None, **KILLED, run_time_s=2.0))
    assert (await read_phase(bench))[0] == "training"


async def test_crashes_long_after_each_start_eventually_fail_the_job(
    simulated: Bench,
) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(18):
        assert not await report_exit(bench.state, exit_report(None, **CRASHED, run_time_s=90.0))
        await advance_s(bench, 100.0)
    assert await report_exit(bench.state, exit_report(None, **CRASHED, run_time_s=90.0))
    assert "(19 ends in 1800 s, without a group" in (await read_phase(bench))[1]


@pytest.mark.parametrize(("failure", "every_s"), [(None, 50.0), (PeerLost("gone"), 100.0)])
async def test_job_with_slow_steps_gets_a_longer_limit(
    simulated: Bench, failure: PeerLost | None, every_s: float
) -> None:
    bench = simulated
    seats = await bench.training_job(groups_per_step=1)
    opened = await seats.admit()
    await advance_s(bench, 500.0)
    await seats.finish(opened[0])
    error = None if failure is None else Failure.from_error(failure)
    for _ in range(12):
        assert not await report_exit(bench.state, exit_report(error, **CRASHED, run_time_s=5.0))
        await advance_s(bench, every_s)
    assert (await read_phase(bench))[0] == "training"


async def test_crashes_fail_no_job_that_makes_progress(simulated: Bench) -> None:
    bench = simulated
    seats = await bench.training_job(groups_per_step=10)
    for group in (await seats.admit())[:8]:
        for _ in range(5):
            assert not await report_exit(bench.state, exit_report(None, **CRASHED))
            await advance_s(bench, 10.0)
        await seats.finish(group)
    assert (await read_phase(bench))[0] == "training"


async def test_permanently_lost_peer_eventually_fails_the_job(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    failure = Failure.from_error(PeerLost("gone", where="weights"))
    for _ in range(20):
        assert not await report_exit(bench.state, exit_report(failure))
        await advance_s(bench, 29.0)
    await advance_s(bench, 29.0)
    assert await report_exit(bench.state, exit_report(failure))
    error = (await read_phase(bench))[1]
    assert "PeerLost: gone (at weights) (21 ends in 609 s, without a group" in error


async def test_exits_by_ever_different_errors_are_bounded(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    fails = False
    for number in range(30):
        failure = Failure.from_error(PeerLost("gone", where=f"engine/g{number}"))
        fails = await report_exit(bench.state, exit_report(failure)) or fails
        await advance_s(bench, 29.0)
    assert fails


async def test_reported_outage_does_not_fail_the_job(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for error in [OSError(errno.ENOSPC, "no room"), PeerLost("gone")] * 10:
        assert not await report_exit(bench.state, exit_report(Failure.from_error(error)))
        await advance_s(bench, 300.0)
    assert (await read_phase(bench))[0] == "training"


async def test_no_job_fails_while_a_process_waits_for_disk_space(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    wait = {"on": "disk", "what": "room for the ledger", "since_ms": 0, "count": 1}
    failure = Failure.from_error(PeerLost("gone"))
    for _ in range(30):
        entry = RegistryEntry("rollout/1", "rollout", incarnation="full", waits=[wait])
        await register(bench.state, entry)
        assert not await report_exit(bench.state, exit_report(failure))
        await advance_s(bench, 29.0)
    assert (await read_phase(bench))[0] == "training"


async def set_block_reason(bench: Bench, reason: str) -> None:
    """Write the block reason with which the planner pauses a job, or clear it."""
    await bench.state.run_command("HSET", f"{job_prefix(JOB)}:job", "block_reason", reason)
    if not reason:
        await bench.state.run_command("HINCRBY", f"{job_prefix(JOB)}:job", "resumed", 1)


async def test_paused_time_does_not_count_as_time_without_progress(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    failure = Failure.from_error(PeerLost("gone", where="engine/g0.0"))
    for _ in range(3):
        assert not await report_exit(bench.state, exit_report(failure))
        await advance_s(bench, 10.0)
    await set_block_reason(bench, "paused: preempted")
    for _ in range(9):
        assert not await report_exit(bench.state, exit_report(failure)), (
            "while it sleeps nothing can succeed"
        )
        await advance_s(bench, 800.0)
    await set_block_reason(bench, "")
    for _ in range(9):
        assert not await report_exit(bench.state, exit_report(failure))
        await advance_s(bench, 60.0)
    assert (await read_phase(bench))[0] == "training"


async def test_uncharged_exits_are_recorded_and_never_fail_the_job(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(9):
        assert not await report_exit(
            bench.state, exit_report(None, **CRASHED, charge_job=False, exit_count=3)
        )
        await advance_s(bench, 60.0)
    assert (await read_last_exits(bench.state))[0].times == 27
