"""Which version is the best so far, the same on every backend."""

from __future__ import annotations

from meshrl.common.state import events, jobs, steps
from tests.contract.state.state_bench import JOB, TRAINER, Bench, Seats, document

EVALUATOR = "evaluator"


async def trained_to(bench: Bench, seats: Seats, version: int) -> None:
    while (await jobs.job(bench.state, JOB)).version < version:
        for group in await seats.admit():
            await seats.finish(group)
        step = (await jobs.job(bench.state, JOB)).version + 1
        await seats.commit(step, await seats.leased(step))


async def judged(
    bench: Bench, token: int, step: int, value: float | None, lineage: int = 0
) -> bool:
    return await jobs.record_evaluation(
        bench.state,
        JOB,
        jobs.RecordedResult(f"step-{step}", lineage, step, {"x": value}, value),
        EVALUATOR,
        token,
    )


async def test_the_highest_value_makes_the_current_version_the_best_one(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    for version, value in ((0, 0.25), (1, 0.5), (2, 0.5), (3, 0.125)):
        await trained_to(bench, seats, version)
        assert await judged(bench, token, version, value)
    row = await jobs.job(bench.state, JOB)
    assert (row.version, row.best_version, row.best_manifest) == (3, 1, "m0.1")
    told = [e.fields for e in await events.read_all(bench.state) if e.kind == "evaluation"]
    assert [e["value"] for e in told] == [0.25, 0.5, 0.5, 0.125]
    assert [(e["step"], e["best"], e["manifest"]) for e in told] == [
        (0, True, "m0"),
        (1, True, "m0.1"),
        (2, False, "m0.2"),
        (3, False, "m0.3"),
    ]


async def test_a_value_of_a_version_that_is_no_longer_current_judges_nothing(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 1)
    assert await judged(bench, token, 0, 0.9)
    assert (await jobs.job(bench.state, JOB)).best_version == -1
    assert not await judged(bench, token, 0, 0.9), "one result per tag"


async def test_an_evaluation_without_the_figure_judges_nothing(bench: Bench) -> None:
    await bench.training_job()
    token = await bench.seat(EVALUATOR)
    assert await judged(bench, token, 0, None)
    assert (await jobs.job(bench.state, JOB)).best_manifest == ""


async def test_what_was_evaluated_above_a_new_lineages_beginning_is_forgotten(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    for version, value in ((1, 0.25), (2, 0.5)):
        await trained_to(bench, seats, version)
        assert await judged(bench, token, version, value)
    back = (bench.state, JOB, TRAINER, seats.trainer)
    await steps.open_lineage(*back, 1, steps.VersionNames("m0.1", "c1"), "op")
    row = await jobs.job(bench.state, JOB)
    assert (row.version, row.best_version, row.best_manifest) == (1, -1, "")
    assert [e["tag"] for e in await jobs.evaluations(bench.state, JOB)] == ["step-1"]

    assert not await judged(bench, token, 2, 0.9, lineage=0), "of the abandoned version 2"
    await seats.commit(2, await seats.leased(2), lineage=1)
    assert await judged(bench, token, 2, 0.375, lineage=1)
    row = await jobs.job(bench.state, JOB)
    assert (row.best_version, row.best_manifest) == (2, "m1.2")


async def test_a_best_version_that_the_new_lineage_has_stays(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 1)
    await judged(bench, token, 1, 0.5)
    await trained_to(bench, seats, 2)
    back = (bench.state, JOB, TRAINER, seats.trainer)
    await steps.open_lineage(*back, 1, steps.VersionNames("m0.1", "c1"), "op")
    row = await jobs.job(bench.state, JOB)
    assert (row.best_version, row.best_manifest) == (1, "m0.1")


async def test_a_phase_that_follows_from_an_abandoned_lineage_does_not_begin(bench: Bench) -> None:
    seats = await bench.training_job(steps=2)
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 2)
    assert (await jobs.job(bench.state, JOB)).phase == "evaluation"
    back = (bench.state, JOB, TRAINER, seats.trainer)
    await steps.open_lineage(*back, 1, steps.VersionNames("m0.1", "c1"), "op")
    finish = (bench.state, JOB, jobs.Phase.FINISHED, token, EVALUATOR)
    await jobs.set_phase(*finish, lineage=0)
    assert (await jobs.job(bench.state, JOB)).phase == "training"
    await jobs.set_phase(*finish, lineage=1)
    assert (await jobs.job(bench.state, JOB)).phase == "finished"


async def test_a_job_that_is_restored_knows_its_best_and_its_first_version(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 1)
    await judged(bench, token, 1, 0.5)
    held = await steps.checkpoint_state(bench.state, JOB)
    await bench.state.command("FLUSHALL")
    await steps.restore_job(bench.state, JOB, document(), "/run", held | {"manifest": "m0.1"})
    row = await jobs.job(bench.state, JOB)
    assert (row.initial_manifest, row.best_version, row.best_manifest) == ("m0", 1, "m0.1")
    token = await bench.seat(EVALUATOR)
    assert await judged(bench, token, 1, 0.25, lineage=1)
    assert (await jobs.job(bench.state, JOB)).best_version == 1
