"""Step commits, lineages, checkpoints and evaluations, the same on every backend."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import Fenced, Refused
from meshrl.common.base.lineages import SINGLE_LINEAGE
from meshrl.common.state import events, groups, jobs, steps
from meshrl.common.state.job_lifecycle import trajectory_accounting
from meshrl.common.state.steps import StepCommitResult
from tests.contract.state.state_bench import (
    EVALUATOR,
    JOB,
    SHARD,
    TRAINER,
    Bench,
    Seats,
    document,
    trained_to,
)


async def account(bench: Bench) -> dict[str, int]:
    now = await groups.count_in_flight(bench.state, JOB)
    return trajectory_accounting.compute_account(
        await events.read_all(bench.state), now.samples, JOB
    )


async def test_initial_weights_are_committed_once_as_version_zero(bench: Bench) -> None:
    seats = await bench.training_job()
    await steps.commit_initial(
        bench.state, JOB, TRAINER, seats.trainer, 0, steps.VersionReferences("m0", "c0")
    )
    with pytest.raises(Refused, match="other weights"):
        await steps.commit_initial(
            bench.state, JOB, TRAINER, seats.trainer, 0, steps.VersionReferences("m9", "c0")
        )
    row = await jobs.read_job(bench.state, JOB)
    assert (row.version, row.manifest, row.checkpoint) == (0, "m0", "c0")


async def test_committed_step_becomes_the_current_version_and_removes_its_groups(
    bench: Bench,
) -> None:
    seats = await bench.training_job(groups_per_step=2)
    await seats.fill()
    group_ids = await seats.leased(1)
    assert await seats.commit(1, group_ids, filtered=(group_ids[0],)) == StepCommitResult(1, False)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.version, row.steps_done, row.manifest, row.checkpoint) == (1, 1, "m0.1", "c1")
    assert (row.trained, row.filtered) == (2, 2)
    [step_event] = [e for e in await events.read_all(bench.state) if e.kind == "step"]
    assert step_event.fields["groups"] == [
        {"group": 0, "samples": 2, "scored": 2, "filtered": True},
        {"group": 1, "samples": 2, "scored": 2, "filtered": False},
    ]
    assert step_event.fields["metrics"] == {"reward": 0.5, "lengths": []}
    assert not await bench.state.run_command("EXISTS", "{job}:group:0", "{job}:group:1")


async def test_step_records_the_share_of_samples_failed_since_the_last_step(
    bench: Bench,
) -> None:
    seats = await bench.training_job(groups_per_step=1)
    dropped, first, second = await seats.admit()
    await seats.drop(dropped.group, "failed", "d")
    await seats.finish(first, scored=1)
    await seats.step(1)
    await seats.finish(second)
    await seats.step(2)
    rows = await steps.read_step_rows(bench.state, JOB)
    assert [row["failed_share"] for row in rows] == [3 / 4, 0.0]
    lineage = await seats.go_back(1)
    group_ids = await seats.leased(2)
    await seats.commit(2, group_ids, lineage=lineage)
    assert (await steps.read_step_rows(bench.state, JOB))[-1]["failed_share"] == 0.0


async def test_resent_commit_counts_as_one_step(bench: Bench) -> None:
    seats = await bench.training_job()
    await seats.fill()
    group_ids = await seats.leased(1)
    assert await seats.commit(1, group_ids) == StepCommitResult(1, False)
    assert await seats.commit(1, group_ids) == StepCommitResult(1, True)
    assert (await account(bench))["trained"] == 4
    with pytest.raises(Refused, match="committed with manifest"):
        await seats.commit(1, group_ids, manifest="other")


async def test_zombie_trainer_cannot_commit(bench: Bench) -> None:
    seats = await bench.training_job()
    await seats.fill()
    group_ids = await seats.leased(1)
    zombie = Seats(bench.state, seats.shard, seats.trainer)
    seats.trainer = await bench.seat(TRAINER)
    with pytest.raises(Fenced):
        await zombie.commit(1, group_ids)
    with pytest.raises(Refused, match="not leased"):
        await seats.commit(1, group_ids)
    assert await seats.leased(1) == group_ids
    assert await seats.commit(1, group_ids) == StepCommitResult(1, False)
    with pytest.raises(Fenced):
        await zombie.commit(2, group_ids)


async def test_commit_must_account_for_exactly_the_leased_groups(bench: Bench) -> None:
    seats = await bench.training_job()
    await seats.fill()
    group_ids = await seats.leased(1)
    with pytest.raises(Refused, match="accounts for 1"):
        await seats.commit(1, group_ids[:1])
    with pytest.raises(Refused, match="not leased"):
        await seats.commit(1, [group_ids[0], 5])
    with pytest.raises(Refused, match="does not follow"):
        await seats.commit(2, group_ids)
    with pytest.raises(Refused, match="does not follow"):
        await seats.commit(1, group_ids, lineage=1)


async def test_failed_group_members_are_typed_drops_of_the_step(bench: Bench) -> None:
    seats = await bench.training_job(group_size=4)
    await seats.fill(scored=3)
    await seats.step(1)
    terms = await account(bench)
    assert (terms["trained"], terms["typed_drops"], terms["lost"]) == (6, 2, 0)
    assert (await jobs.read_job(bench.state, JOB)).typed_drops == 2


async def test_last_step_of_the_budget_starts_the_evaluation(bench: Bench) -> None:
    seats = await bench.training_job(steps=1)
    await seats.train(1)
    assert (await jobs.read_job(bench.state, JOB)).phase == "evaluation"


async def test_steps_are_read_in_order_with_their_metrics(bench: Bench) -> None:
    seats = await bench.training_job()
    for step in (1, 2, 3):
        await seats.train(step)
    rows = await steps.read_step_rows(bench.state, JOB)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["reward"] == 0.5 and rows[0]["trained"] == 4 and rows[0]["lengths"] == []
    assert [row["step"] for row in await steps.read_step_rows(bench.state, JOB, after_step=2)] == [
        3
    ]


async def test_step_records_are_kept_for_replay_until_a_checkpoint_covers_them(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    for step in (1, 2):
        await seats.train(step)
    found = await steps.read_step_records(bench.state, JOB)
    assert [record.step for record in found] == [1, 2]
    assert found[0].replay_data == {"bins": [[0, 1]]}
    assert [row.digest for row in found[0].groups] == ["digest0", "digest1"]
    await seats.train(3, checkpointed_version=1)
    assert [record.step for record in await steps.read_step_records(bench.state, JOB)] == [2, 3]
    assert len(await steps.read_step_rows(bench.state, JOB)) == 3


async def test_checkpoint_outside_a_step_covers_the_current_version(bench: Bench) -> None:
    seats = await bench.training_job()
    await seats.train(1)
    open_before = await steps.read_checkpoint_state(bench.state, JOB)
    for lineage, step in ((0, 0), (1, 1)):
        with pytest.raises(Refused, match="not the current one"):
            checkpoint = lineage, step, "other"
            await steps.record_checkpoint(bench.state, JOB, TRAINER, seats.trainer, *checkpoint)
    with pytest.raises(Fenced):
        await steps.record_checkpoint(bench.state, JOB, TRAINER, seats.trainer - 1, 0, 1, "other")
    for _ in range(2):  # the request may be repeated
        await steps.record_checkpoint(bench.state, JOB, TRAINER, seats.trainer, 0, 1, "beside")
    row = await jobs.read_job(bench.state, JOB)
    assert (row.version, row.checkpoint) == (1, "beside")
    assert await steps.read_step_records(bench.state, JOB) == []
    assert await steps.read_checkpoint_state(bench.state, JOB) == open_before
    await seats.train(2)  # training continues


async def test_new_lineage_trains_the_abandoned_groups_again(bench: Bench) -> None:
    seats = await bench.training_job()
    first = await seats.fill()
    for step in (1, 2):
        await seats.step(step)
    for _ in range(2):
        lineage = await seats.go_back(1)
        assert lineage == 1
    row = await jobs.read_job(bench.state, JOB)
    assert (row.lineage, row.version, row.manifest, row.trained) == (1, 1, "m0.1", 4)
    terms = await account(bench)
    assert (terms["trained"], terms["in_flight"], terms["lost"]) == (4, 8, 0)
    assert (
        await seats.admit() == []
        or (await groups.count_in_flight(bench.state, JOB)).admissible_groups >= 0
    )
    again = await seats.leased(2)
    assert again == [group.group for group in first[2:4]]
    assert await seats.commit(2, again, lineage=1) == StepCommitResult(2, False)
    terms = await account(bench)
    assert (terms["trained"], terms["lost"], terms["trained_twice"]) == (8, 0, 0)


async def test_versions_of_an_abandoned_lineage_are_foreign_in_its_successor(bench: Bench) -> None:
    seats = await bench.training_job(max_staleness=1)
    for step in (1, 2, 3):
        await seats.train(step)
    ready, slow_group = (await seats.admit())[:2]  # version 3; two more were open before
    await seats.finish(ready)
    await seats.go_back(1)

    open_ = {group.group: group for group in await groups.read_open_groups(bench.state, JOB, SHARD)}
    assert open_[slow_group.group].version == 1, (
        "an engine of the new lineage must be able to serve it"
    )
    for group in open_.values():
        await seats.finish(slow_group if group.group == slow_group.group else group)

    async def leased(step: int) -> list[groups.GroupRow]:
        answer = await seats.lease(step)
        assert isinstance(answer, groups.LeasedGroups), answer
        return answer.groups

    leased_groups = []
    for step in (2, 3):
        rows = await leased(step)
        assert {row.abandoned_above for row in rows} == {1}
        leased_groups += [row.group for row in rows]
        await seats.commit(step, [row.group for row in rows], lineage=1)
    assert len(leased_groups) == 4
    assert isinstance(await seats.lease(4), groups.LeaseWait), "the others count as of version 1"
    await seats.fill()
    assert {row.abandoned_above for row in await leased(4)} == {SINGLE_LINEAGE}
    stale = [e for e in await events.read_all(bench.state) if e.kind == "stale"]
    records = [record for e in stale for record in e.fields["groups"]]
    assert {record["group"] for record in records} >= {ready.group, slow_group.group}
    assert {record["min_version"] for record in records} <= {0, 1}
    assert (await account(bench))["lost"] == 0


async def test_lineage_cannot_open_below_a_covered_version_without_saved_state(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    for step in (1, 2):
        await seats.train(step, checkpointed_version=step)
    with pytest.raises(Refused, match="covered"):
        await seats.go_back(1)
    with pytest.raises(Refused, match="current version is 2"):
        await steps.open_lineage(
            bench.state, JOB, TRAINER, seats.trainer, 3, steps.VersionReferences("m", "c"), "op2"
        )


async def test_lineage_below_a_covered_version_requeues_the_lost_groups_prompts(
    bench: Bench,
) -> None:
    seats = await bench.training_job(max_staleness=2)
    await seats.fill()
    group_ids = await seats.leased(1)
    saved = await steps.read_checkpoint_state(bench.state, JOB, group_ids)
    await seats.commit(1, group_ids, checkpointed_version=1)
    for step in (2, 3, 4):
        await seats.train(step, checkpointed_version=2)
    slow_group = (await seats.admit())[0]
    await seats.drop(slow_group.group, "bad", "drop")
    before = await account(bench)
    assert (before["lost"], before["typed_drops"]) == (0, 2)

    for _ in range(2):
        assert await seats.go_back(1, saved) == 1
    row = await jobs.read_job(bench.state, JOB)
    assert (row.version, row.trained, row.typed_drops) == (1, 4, 0)
    assert row.host_lost == 4 + 2, "of step 2, which is covered, and of what was dropped"
    terms = await account(bench)
    assert terms["in_flight"] == before["in_flight"] + 8, "of steps 3 and 4, which are on record"
    terms_at_end = {term: terms[term] for term in ("trained", "host_lost", "typed_drops", "lost")}
    assert terms_at_end == {"trained": 4, "host_lost": 6, "typed_drops": 0, "lost": 0}

    all_events = await events.read_all(bench.state)
    lost_groups = {slow_group.group} | {
        one["group"]
        for e in all_events
        if e.kind == "step" and e.fields["step"] == 2
        for one in e.fields["groups"]
    }
    prompts = {
        group: prompt
        for e in all_events
        if e.kind == "opened"
        for group, prompt in zip(e.fields["groups"], e.fields["prompts"], strict=True)
    }
    waiting = await bench.state.run_command("LRANGE", "{job}:requeue", 0, -1)
    assert waiting == [f"{prompt}:0" for prompt in sorted(prompts[group] for group in lost_groups)]
    for step in (2, 3):
        await seats.train(step, lineage=1)
    terms = await account(bench)
    assert (terms["trained"], terms["lost"], terms["trained_twice"]) == (12, 0, 0)
    in_flight = await groups.count_in_flight(bench.state, JOB)
    assert in_flight.admissible_groups >= 0, "what was lost is admitted again"


async def test_lineage_below_the_restored_checkpoint_loses_no_sample(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2)
    saved = {}
    for step in (1, 2):
        await seats.fill()
        group_ids = await seats.leased(step)
        saved[step] = await steps.read_checkpoint_state(bench.state, JOB, group_ids)
        saved[step] |= {"manifest": f"m0.{step}", "checkpoint": f"c{step}"}
        await seats.commit(step, group_ids, checkpointed_version=step)
    await bench.state.run_command("FLUSHALL")
    await steps.restore_job(bench.state, JOB, document(groups_per_step=2), "/runs", saved[2])
    seats = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
    await seats.fill()
    assert await seats.go_back(1, saved[1]) == 2
    terms = await account(bench)
    assert (terms["trained"], terms["lost"]) == (saved[1]["counts"]["trained"], 0)
    await seats.train(2, lineage=2)
    terms = await account(bench)
    assert (terms["lost"], terms["trained_twice"]) == (0, 0)


async def test_job_resumes_from_its_checkpoint_after_redis_lost_all_data(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2)
    opened = await seats.admit()
    for group in opened[:4]:
        await seats.finish(group)
    await seats.step(1)
    await seats.requeue(5, "host_lost", "op")
    group_ids = await seats.leased(2)
    saved = await steps.read_checkpoint_state(bench.state, JOB, group_ids)
    assert (saved["version"], saved["steps_done"], saved["lineage"]) == (2, 2, 0)
    assert saved["requeue"] == [5, 4] and saved["in_flight"] == 2
    assert saved["counts"]["trained"] == 8
    saved |= {"manifest": "m0.2", "checkpoint": "c2"}
    await seats.commit(2, group_ids)

    await bench.state.run_command("FLUSHALL")
    for _ in range(2):
        await steps.restore_job(bench.state, JOB, document(groups_per_step=2), "/runs", saved)
    seats = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
    row = await jobs.read_job(bench.state, JOB)
    assert (row.lineage, row.version, row.manifest, row.phase) == (1, 2, "m0.2", "training")
    assert (row.opened, row.trained, row.host_lost) == (12, 8, 4)
    assert (await account(bench))["lost"] == 0
    again = await seats.admit()
    assert [group.prompt for group in again] == [5, 4, 6, 7, 8, 9]
    assert again[0].group > 1000
    with pytest.raises(Refused, match="covered"):
        await seats.go_back(1)
    for group in again:
        await seats.finish(group)
    await seats.commit(3, await seats.leased(3), lineage=1)
    terms = await account(bench)
    assert (terms["trained"], terms["lost"], terms["trained_twice"]) == (12, 0, 0)


async def test_tokens_rise_even_after_redis_lost_all_data(simulated: Bench) -> None:
    before = await simulated.seat(SHARD)
    await simulated.state.run_command("FLUSHALL")
    await simulated.pass_ms(1000)
    assert await simulated.seat(SHARD) > before


async def record_value(
    bench: Bench, token: int, step: int, value: float | None, lineage: int = 0
) -> bool:
    return await jobs.record_evaluation(
        bench.state,
        JOB,
        jobs.EvaluationRecord(f"step-{step}", lineage, step, {"x": value}, value),
        EVALUATOR,
        token,
    )


async def test_version_with_the_highest_value_becomes_the_best(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    for version, value in ((0, 0.25), (1, 0.5), (2, 0.5), (3, 0.125)):
        await trained_to(bench, seats, version)
        assert await record_value(bench, token, version, value)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.version, row.best_version, row.best_manifest) == (3, 1, "m0.1")
    evaluations = [e.fields for e in await events.read_all(bench.state) if e.kind == "evaluation"]
    assert [e["value"] for e in evaluations] == [0.25, 0.5, 0.5, 0.125]
    assert [(e["step"], e["best"], e["manifest"]) for e in evaluations] == [
        (0, True, "m0"),
        (1, True, "m0.1"),
        (2, False, "m0.2"),
        (3, False, "m0.3"),
    ]


async def test_evaluation_of_an_old_version_does_not_set_the_best(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 1)
    assert await record_value(bench, token, 0, 0.9)
    assert (await jobs.read_job(bench.state, JOB)).best_version == -1
    assert not await record_value(bench, token, 0, 0.9), "one result per tag"


async def test_evaluation_without_a_value_does_not_set_the_best(bench: Bench) -> None:
    await bench.training_job()
    token = await bench.seat(EVALUATOR)
    assert await record_value(bench, token, 0, None)
    assert (await jobs.read_job(bench.state, JOB)).best_manifest == ""


async def test_new_lineage_discards_evaluations_of_abandoned_versions(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    for version, value in ((1, 0.25), (2, 0.5)):
        await trained_to(bench, seats, version)
        assert await record_value(bench, token, version, value)
    await seats.go_back(1)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.version, row.best_version, row.best_manifest) == (1, -1, "")
    assert [e["tag"] for e in await jobs.read_evaluations(bench.state, JOB)] == ["step-1"]

    assert not await record_value(bench, token, 2, 0.9, lineage=0), "of the abandoned version 2"
    await seats.commit(2, await seats.leased(2), lineage=1)
    assert await record_value(bench, token, 2, 0.375, lineage=1)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.best_version, row.best_manifest) == (2, "m1.2")


async def test_best_version_within_the_new_lineage_is_retained(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 1)
    await record_value(bench, token, 1, 0.5)
    await trained_to(bench, seats, 2)
    await seats.go_back(1)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.best_version, row.best_manifest) == (1, "m0.1")


async def test_phase_change_from_an_abandoned_lineage_is_ignored(bench: Bench) -> None:
    seats = await bench.training_job(steps=2)
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 2)
    assert (await jobs.read_job(bench.state, JOB)).phase == "evaluation"
    await seats.go_back(1)
    finish = (bench.state, JOB, jobs.Phase.FINISHED, token, EVALUATOR)
    await jobs.set_phase(*finish, lineage=0)
    assert (await jobs.read_job(bench.state, JOB)).phase == "training"
    await jobs.set_phase(*finish, lineage=1)
    assert (await jobs.read_job(bench.state, JOB)).phase == "finished"


async def test_restored_job_has_its_best_and_initial_versions(bench: Bench) -> None:
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await trained_to(bench, seats, 1)
    await record_value(bench, token, 1, 0.5)
    checkpoint_state = await steps.read_checkpoint_state(bench.state, JOB)
    await bench.state.run_command("FLUSHALL")
    await steps.restore_job(
        bench.state, JOB, document(), "/run", checkpoint_state | {"manifest": "m0.1"}
    )
    row = await jobs.read_job(bench.state, JOB)
    assert (row.initial_manifest, row.best_version, row.best_manifest) == ("m0", 1, "m0.1")
    token = await bench.seat(EVALUATOR)
    assert await record_value(bench, token, 1, 0.25, lineage=1)
    assert (await jobs.read_job(bench.state, JOB)).best_version == 1
