"""Ends of processes: told once, kept by name, and charged to their jobs."""

from __future__ import annotations

import errno
from dataclasses import replace

from common.errors import ConfigError, PeerLost
from common.process.failure import Failure
from common.state import events, jobs
from common.state.ended import Report, ended, tell
from tests.contract.state.state_bench import JOB, TRAINER, Bench

ODD = Failure.of(ValueError("odd"))


def report(failure: Failure | None, **more: object) -> Report:
    found = Report("engine/g0", 1, "exit status 1", failure, JOB, log="/logs/engine-g0.log")
    return replace(found, **more)  # type: ignore[arg-type]


async def phase(bench: Bench) -> tuple[str, str]:
    row = await jobs.job(bench.state, JOB)
    return row.phase, row.error


async def test_a_job_fails_at_once_by_an_error_that_no_restart_mends(bench: Bench) -> None:
    await bench.training_job()
    failure = Failure.of(ConfigError("too long", where="rollout.max_tokens", fix="lower it"))
    assert await tell(bench.state, report(failure, final=True))
    found, error = await phase(bench)
    assert found == "failed"
    assert error == (
        "engine/g0 ended by ConfigError: too long (at rollout.max_tokens). lower it. "
        "Its log: /logs/engine-g0.log"
    )
    told = [e for e in await events.read_all(bench.state) if e.kind == "process_ended"]
    assert told[0].fields["error"]["text"] == "too long" and told[0].fields["job"] == JOB


async def test_the_same_error_three_times_without_a_step_fails_the_job(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=1)
    assert not await tell(bench.state, report(ODD))
    assert not await tell(bench.state, report(Failure.of(KeyError("another"))))
    assert not await tell(bench.state, report(ODD))
    assert not await tell(bench.state, report(ODD))
    assert (await phase(bench))[0] == "training"
    opened = await seats.admit()
    await seats.finish(opened[0])
    await seats.commit(1, await seats.leased(1))
    assert not await tell(bench.state, report(ODD)), "there was a step since"
    assert not await tell(bench.state, report(ODD))
    assert await tell(bench.state, report(ODD))
    assert "ValueError: odd" in (await phase(bench))[1]


async def test_what_is_not_the_jobs_fault_never_fails_it(bench: Bench) -> None:
    await bench.training_job()
    for failure in (None, Failure.of(PeerLost("gone"))):
        for _ in range(5):
            assert not await tell(bench.state, report(failure, code=-9, why="signal 9"))
    assert (await phase(bench))[0] == "training"
    (end,) = await ended(bench.state)
    assert (end.name, end.times, end.why) == ("engine/g0", 10, "signal 9")


async def test_a_budget_that_a_jobs_errors_have_spent_fails_that_job(bench: Bench) -> None:
    await bench.training_job()
    of_job = replace(ODD, job=JOB)
    assert await tell(bench.state, report(of_job, job="", spent=True, event=False))
    assert (await phase(bench))[0] == "failed"
    assert "process_ended" not in {e.kind for e in await events.read_all(bench.state)}


async def test_a_report_that_is_sent_again_counts_once(bench: Bench) -> None:
    await bench.training_job()
    once = report(ODD)
    for _ in range(4):
        await tell(bench.state, once)
    assert (await ended(bench.state))[0].times == 1
    told = [e for e in await events.read_all(bench.state) if e.kind == "process_ended"]
    assert len(told) == 1


async def test_a_job_that_goes_on_after_such_an_end_has_its_tries_again(bench: Bench) -> None:
    await bench.training_job()
    for _ in range(3):
        await tell(bench.state, report(ODD))
    await jobs.reopen(bench.state, JOB, "again")
    assert not await tell(bench.state, report(ODD))
    token = await bench.seat(TRAINER)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.STOPPED, token, TRAINER)
    failure = Failure.of(ConfigError("late"))
    assert not await tell(bench.state, report(failure)), "it has ended already"


async def test_what_became_of_an_end_is_not_another_end(bench: Bench) -> None:
    await bench.training_job()
    for _ in range(2):
        assert not await tell(bench.state, report(ODD))
    assert not await tell(bench.state, report(ODD, event=False))
    assert (await ended(bench.state))[0].times == 2
    assert (await phase(bench))[0] == "training"


async def test_a_budget_that_others_faults_have_spent_fails_no_job(bench: Bench) -> None:
    await bench.training_job()
    for error in (PeerLost("gone"), OSError(errno.EDQUOT, "no room")):
        lost = replace(Failure.of(error), job=JOB)
        assert not await tell(bench.state, report(lost, job="", spent=True, event=False))
    assert (await phase(bench))[0] == "training"
