"""Exits of processes: reported once, kept by name, and charged to their jobs."""

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

ODD = Failure.from_error(ValueError("odd"))


def report(failure: Failure | None, **more: object) -> ExitReport:
    found = ExitReport("engine/g0", 1, "exit status 1", failure, JOB, log="/logs/engine-g0.log")
    return replace(found, **more)  # type: ignore[arg-type]


async def phase(bench: Bench) -> tuple[str, str]:
    row = await jobs.read_job(bench.state, JOB)
    return row.phase, row.error


async def test_a_job_fails_at_once_by_an_error_that_no_restart_mends(bench: Bench) -> None:
    await bench.training_job()
    failure = Failure.from_error(
        ConfigError("too long", where="rollout.max_tokens", fix="lower it")
    )
    assert await report_exit(bench.state, report(failure, final=True))
    found, error = await phase(bench)
    assert found == "failed"
    assert error == (
        "engine/g0 ended by ConfigError: too long (at rollout.max_tokens). lower it. "
        "Its log: /logs/engine-g0.log"
    )
    told = [e for e in await events.read_all(bench.state) if e.kind == "process_ended"]
    assert told[0].fields["error"]["text"] == "too long" and told[0].fields["job"] == JOB


async def test_the_same_error_three_times_without_a_step_fails_the_job(simulated: Bench) -> None:
    bench = simulated
    seats = await bench.training_job(groups_per_step=1)
    assert not await report_exit(bench.state, report(ODD))
    assert not await report_exit(bench.state, report(Failure.from_error(KeyError("another"))))
    assert not await report_exit(bench.state, report(ODD))
    assert (await phase(bench))[0] == "training"
    opened = await seats.admit()
    await seats.finish(opened[0])
    await seats.commit(1, await seats.leased(1))
    assert not await report_exit(bench.state, report(ODD)), "there was a step since"
    assert not await report_exit(bench.state, report(ODD))
    assert not await report_exit(bench.state, report(Failure.from_error(KeyError("another"))))
    assert not await report_exit(bench.state, report(ODD)), "a predecessor may hold what it needs"
    await passes(bench, 10.0)
    assert await report_exit(bench.state, report(ODD)), "each error is counted for itself"
    assert "ValueError: odd" in (await phase(bench))[1]


CRASHED = {"code": -11, "why": "signal 11"}


async def test_what_is_not_the_jobs_fault_never_fails_it_soon(bench: Bench) -> None:
    await bench.training_job()
    for failure in (None, Failure.from_error(PeerLost("gone"))):
        for _ in range(5):
            assert not await report_exit(bench.state, report(failure, code=-9, why="signal 9"))
    assert (await phase(bench))[0] == "training"
    (end,) = await read_last_exits(bench.state)
    assert (end.name, end.times, end.why) == ("engine/g0", 10, "signal 9")


async def test_a_budget_that_a_jobs_errors_have_spent_fails_that_job(bench: Bench) -> None:
    await bench.training_job()
    of_job = replace(ODD, job=JOB)
    assert await report_exit(bench.state, report(of_job, job="", spent=True, event=False))
    assert (await phase(bench))[0] == "failed"
    assert "process_ended" not in {e.kind for e in await events.read_all(bench.state)}


async def test_a_report_that_is_sent_again_counts_once(bench: Bench) -> None:
    await bench.training_job()
    once = report(ODD)
    for _ in range(4):
        await report_exit(bench.state, once)
    assert (await read_last_exits(bench.state))[0].times == 1
    told = [e for e in await events.read_all(bench.state) if e.kind == "process_ended"]
    assert len(told) == 1


async def test_a_job_that_goes_on_after_such_an_end_has_its_tries_again(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(3):
        await report_exit(bench.state, report(ODD))
        await passes(bench, 5.0)
    assert (await phase(bench))[0] == "failed"
    await jobs.reopen(bench.state, JOB, "again")
    assert not await report_exit(bench.state, report(ODD))
    token = await bench.seat(TRAINER)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.STOPPED, token, TRAINER)
    failure = Failure.from_error(ConfigError("late"))
    assert not await report_exit(bench.state, report(failure)), "it has ended already"


async def test_what_became_of_an_end_is_not_another_end(bench: Bench) -> None:
    await bench.training_job()
    for _ in range(2):
        assert not await report_exit(bench.state, report(ODD))
    assert not await report_exit(bench.state, report(ODD, event=False))
    assert (await read_last_exits(bench.state))[0].times == 2
    assert (await phase(bench))[0] == "training"


async def test_a_budget_that_others_faults_have_spent_fails_no_job(bench: Bench) -> None:
    await bench.training_job()
    for error in (PeerLost("gone"), OSError(errno.EDQUOT, "no room")):
        lost = replace(Failure.from_error(error), job=JOB)
        assert not await report_exit(bench.state, report(lost, job="", spent=True, event=False))
    assert (await phase(bench))[0] == "training"


async def passes(bench: Bench, seconds: float) -> None:
    await bench.pass_ms(int(seconds * 1000))


async def test_a_signal_at_each_start_fails_the_job_by_its_name(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(7):
        assert not await report_exit(bench.state, report(None, **CRASHED))
        await passes(bench, 4.0)
    await passes(bench, 2.0)
    assert await report_exit(bench.state, report(None, **CRASHED))
    found, error = await phase(bench)
    assert found == "failed"
    assert error.startswith("engine/g0 ended by signal 11 (SIGSEGV) (8 ends in 30 s, without")
    assert "Native code has crashed" in error and "/logs/engine-g0.log" in error


KILLED = {"code": -9, "why": "signal 9"}


async def test_engines_that_are_taken_away_again_and_again_fail_no_job(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(9):
        await passes(bench, 180.0)
        assert not await report_exit(bench.state, report(None, **KILLED, ran_s=170.0))
        assert not await report_exit(bench.state, report(None, **KILLED, ran_s=2.0))
    assert (await phase(bench))[0] == "training"


async def test_what_crashes_long_after_each_start_fails_the_job_in_the_end(
    simulated: Bench,
) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(18):
        assert not await report_exit(bench.state, report(None, **CRASHED, ran_s=90.0))
        await passes(bench, 100.0)
    assert await report_exit(bench.state, report(None, **CRASHED, ran_s=90.0))
    assert "(19 ends in 1800 s, without a group" in (await phase(bench))[1]


@pytest.mark.parametrize(("failure", "every_s"), [(None, 50.0), (PeerLost("gone"), 100.0)])
async def test_a_job_whose_steps_are_slow_is_given_longer(
    simulated: Bench, failure: PeerLost | None, every_s: float
) -> None:
    bench = simulated
    seats = await bench.training_job(groups_per_step=1)
    opened = await seats.admit()
    await passes(bench, 500.0)
    await seats.finish(opened[0])
    error = None if failure is None else Failure.from_error(failure)
    for _ in range(12):
        assert not await report_exit(bench.state, report(error, **CRASHED, ran_s=5.0))
        await passes(bench, every_s)
    assert (await phase(bench))[0] == "training"


async def test_signals_fail_no_job_that_comes_further(simulated: Bench) -> None:
    bench = simulated
    seats = await bench.training_job(groups_per_step=10)
    for group in (await seats.admit())[:8]:
        for _ in range(5):
            assert not await report_exit(bench.state, report(None, **CRASHED))
            await passes(bench, 10.0)
        await seats.finish(group)
    assert (await phase(bench))[0] == "training"


async def test_a_peer_that_does_not_come_back_fails_the_job_in_the_end(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    failure = Failure.from_error(PeerLost("gone", where="weights"))
    for _ in range(20):
        assert not await report_exit(bench.state, report(failure))
        await passes(bench, 29.0)
    await passes(bench, 29.0)
    assert await report_exit(bench.state, report(failure))
    error = (await phase(bench))[1]
    assert "PeerLost: gone (at weights) (21 ends in 609 s, without a group" in error


async def test_ends_by_ever_other_errors_are_bounded_too(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    fails = False
    for number in range(30):
        failure = Failure.from_error(PeerLost("gone", where=f"engine/g{number}"))
        fails = await report_exit(bench.state, report(failure)) or fails
        await passes(bench, 29.0)
    assert fails


async def test_an_outage_that_is_shown_is_waited_out(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for error in [OSError(errno.ENOSPC, "no room"), PeerLost("gone")] * 10:
        assert not await report_exit(bench.state, report(Failure.from_error(error)))
        await passes(bench, 300.0)
    assert (await phase(bench))[0] == "training"


async def test_nothing_fails_while_a_process_waits_for_room_on_a_disk(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    wait = {"on": "disk", "what": "room for the ledger", "since_ms": 0, "count": 1}
    failure = Failure.from_error(PeerLost("gone"))
    for _ in range(30):
        entry = RegistryEntry("rollout/1", "rollout", incarnation="full", waits=[wait])
        await register(bench.state, entry)
        assert not await report_exit(bench.state, report(failure))
        await passes(bench, 29.0)
    assert (await phase(bench))[0] == "training"


async def hold(bench: Bench, held: str) -> None:
    """Write the block reason with which the planner pauses a job, or clear it."""
    await bench.state.run_command("HSET", f"{job_prefix(JOB)}:job", "held", held)
    if not held:
        await bench.state.run_command("HINCRBY", f"{job_prefix(JOB)}:job", "resumed", 1)


async def test_a_pause_is_no_time_without_progress(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    failure = Failure.from_error(PeerLost("gone", where="engine/g0.0"))
    for _ in range(3):
        assert not await report_exit(bench.state, report(failure))
        await passes(bench, 10.0)
    await hold(bench, "paused: preempted")
    for _ in range(9):
        assert not await report_exit(bench.state, report(failure)), (
            "while it sleeps nothing can succeed"
        )
        await passes(bench, 800.0)
    await hold(bench, "")
    for _ in range(9):
        assert not await report_exit(bench.state, report(failure))
        await passes(bench, 60.0)
    assert (await phase(bench))[0] == "training"


async def test_what_has_another_bound_is_told_and_never_charged(simulated: Bench) -> None:
    bench = simulated
    await bench.training_job()
    for _ in range(9):
        assert not await report_exit(bench.state, report(None, **CRASHED, charged=False, count=3))
        await passes(bench, 60.0)
    assert (await read_last_exits(bench.state))[0].times == 27
