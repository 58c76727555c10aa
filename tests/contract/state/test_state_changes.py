"""A job's document changes while nothing works on it, the same on every backend."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.job.changing import changed
from meshrl.common.state import events, jobs
from tests.contract.state.state_bench import JOB, TRAINER, Bench, Seats, document
from tests.contract.state.test_state_evaluations import EVALUATOR, trained_to


async def change(bench: Bench, op: str, **budget_or_staleness: int) -> bool:
    row = await jobs.job(bench.state, JOB)
    keys = {"steps": "budget.steps", "staleness": "algorithm.max_staleness"}
    values = {keys[name]: value for name, value in budget_or_staleness.items()}
    told = {key: (None, value) for key, value in values.items()}
    return await jobs.change(bench.state, JOB, changed(row.document, values), told, op)


async def finished(bench: Bench, steps: int) -> tuple[Seats, int]:
    """A job that has done its two steps, and was evaluated after them."""
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await change(bench, "two steps", steps=steps)
    await trained_to(bench, seats, steps)
    result = {"sampled": 0.5}
    state = bench.state
    await jobs.record_evaluation(
        state, JOB, jobs.RecordedResult("after", 0, steps, result), EVALUATOR, token
    )
    await jobs.set_phase(state, JOB, jobs.Phase.FINISHED, seats.trainer, TRAINER)
    return seats, token


async def test_a_finished_job_with_more_steps_to_do_trains_again(bench: Bench) -> None:
    seats, token = await finished(bench, 2)
    for _ in range(2):  # a resend changes nothing
        assert await change(bench, "more", steps=3)
    row = await jobs.job(bench.state, JOB)
    assert (row.phase, row.version, row.document["budget"]["steps"]) == ("training", 2, 3)
    [before] = await jobs.evaluations(bench.state, JOB)
    assert (before["tag"], before["step"], before["result"]) == ("step-2", 2, {"sampled": 0.5})
    await trained_to(bench, seats, 3)
    assert (await jobs.job(bench.state, JOB)).phase == "evaluation", "the new number ends it"
    assert await jobs.record_evaluation(
        bench.state, JOB, jobs.RecordedResult("after", 0, 3, {}), EVALUATOR, token
    )
    [told] = [e.fields for e in await events.read_all(bench.state) if e.kind == "changed"][1:]
    assert (told["version"], told["lineage"], told["extended"]) == (2, 0, True)
    assert told["changes"] == {"budget.steps": [None, 3]}


async def test_a_change_that_adds_no_steps_leaves_a_finished_job_so(bench: Bench) -> None:
    await finished(bench, 2)
    assert not await change(bench, "staleness", staleness=1)
    assert (await jobs.job(bench.state, JOB)).phase == "finished"


async def test_a_job_that_has_done_as_many_steps_as_it_is_to_is_evaluated(bench: Bench) -> None:
    seats = await bench.training_job()
    await trained_to(bench, seats, 2)
    assert not await change(bench, "fewer", steps=2)
    assert (await jobs.job(bench.state, JOB)).phase == "evaluation"


async def test_the_gate_goes_by_the_new_staleness(bench: Bench) -> None:
    seats = await bench.training_job(max_staleness=0)
    first = await seats.admit()
    assert first and await seats.admit() == []
    await change(bench, "wider", staleness=1)
    assert len(await seats.admit()) == len(first)


async def test_only_a_job_that_is_there_changes(bench: Bench) -> None:
    with pytest.raises(NotFound):
        await jobs.change(bench.state, "other", document(), {}, "op")
