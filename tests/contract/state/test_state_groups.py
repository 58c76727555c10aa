"""Jobs, the staleness gate, shards and leases of groups, the same on every backend."""

from __future__ import annotations

import uuid

import pytest

from meshrl.common.base.errors import Fenced, NotFound, Refused
from meshrl.common.state import events, groups, jobs, leader, registry, steps
from meshrl.common.state.groups import LeasedGroups, LeaseWait
from meshrl.common.state.job_lifecycle import trajectory_accounting
from meshrl.common.state.pool.scheduling.decisions import Rationale, SetBlockReason
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.redis.client import StateClient
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, document


async def test_submitted_job_is_queued_and_read_back_unchanged(bench: Bench) -> None:
    for _ in range(2):
        await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    row = await jobs.read_job(bench.state, JOB)
    assert (row.phase, row.version, row.opened, row.run_dir) == ("queued", -1, 0, "/runs/job")
    assert row.document == document()
    assert await jobs.read_jobs(bench.state) == [row]
    kinds = [event.kind for event in await events.read_all(bench.state)]
    assert kinds == ["submitted"]


async def test_job_name_must_be_valid_and_unused(state: StateClient) -> None:
    await jobs.submit(state, JOB, document(), "", "op1")
    with pytest.raises(Refused, match="already"):
        await jobs.submit(state, JOB, document(), "", "op2")
    for name in ("mesh", "", "a b", "{x}", "a:b"):
        with pytest.raises(Refused, match="is not a valid job name"):
            await jobs.submit(state, name, document(), "", "op3")
    with pytest.raises(NotFound):
        await jobs.read_job(state, "other")


async def test_phase_only_advances_and_only_under_a_valid_lease(bench: Bench) -> None:
    token = await bench.seat("planner/0")
    await jobs.submit(bench.state, JOB, document(), "", "op")
    await jobs.set_phase(bench.state, JOB, jobs.Phase.WARM_START, token, "planner/0")
    await jobs.set_phase(bench.state, JOB, jobs.Phase.WARM_START, token, "planner/0")
    await jobs.set_phase(bench.state, JOB, jobs.Phase.TRAINING, token, "planner/0")
    with pytest.raises(Refused, match="cannot go back"):
        await jobs.set_phase(bench.state, JOB, jobs.Phase.BASELINE, token, "planner/0")
    newer = await bench.seat("planner/0")
    with pytest.raises(Fenced):
        await jobs.set_phase(bench.state, JOB, jobs.Phase.EVALUATION, token, "planner/0")
    await jobs.set_phase(bench.state, JOB, jobs.Phase.FAILED, newer, "planner/0", "no reward")
    with pytest.raises(Refused):
        await jobs.set_phase(bench.state, JOB, jobs.Phase.FINISHED, newer, "planner/0")
    row = await jobs.read_job(bench.state, JOB)
    assert row.is_terminal and row.error == "no reward"
    phases = [e for e in await events.read_all(bench.state) if e.kind == "phase"]
    assert [e.fields["phase"] for e in phases] == ["warm_start", "training", "failed"]


async def test_reopened_job_continues_in_its_phase(bench: Bench) -> None:
    seats = await bench.training_job()
    await seats.train(1)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.STOPPED, seats.trainer, TRAINER)
    assert await seats.admit() == []
    for _ in range(2):
        await jobs.reopen(bench.state, JOB, "op")
    assert (await jobs.read_job(bench.state, JOB)).phase == "training"
    assert await seats.admit() != []
    await jobs.set_phase(bench.state, JOB, jobs.Phase.FINISHED, seats.trainer, TRAINER)
    with pytest.raises(Refused, match="has finished"):
        await jobs.reopen(bench.state, JOB, "op2")


async def test_cancel_needs_no_lease_and_reopen_continues_the_job(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    await seats.train(1)
    for _ in range(2):
        assert await jobs.cancel(bench.state, JOB, "op")
    assert (await jobs.read_job(bench.state, JOB)).phase == "stopped"
    assert await seats.admit() == []
    assert not await jobs.cancel(bench.state, JOB, "op2"), "it had ended"
    await jobs.reopen(bench.state, JOB, "op3")
    assert (await jobs.read_job(bench.state, JOB)).phase == "training"
    assert await seats.admit() != []
    await jobs.set_phase(bench.state, JOB, jobs.Phase.FINISHED, seats.trainer, TRAINER)
    assert not await jobs.cancel(bench.state, JOB, "op4")
    assert (await jobs.read_job(bench.state, JOB)).phase == "finished"
    with pytest.raises(NotFound):
        await jobs.cancel(bench.state, "other", "op5")


async def test_evaluation_is_recorded_once_per_tag(bench: Bench) -> None:
    token = await bench.seat("evaluator")
    await jobs.submit(bench.state, JOB, document(), "", "op")
    first = {"greedy": 0.5, "wrong": []}
    assert await jobs.record_evaluation(
        bench.state, JOB, jobs.EvaluationRecord("s10", 0, 10, first), "evaluator", token
    )
    assert not await jobs.record_evaluation(
        bench.state, JOB, jobs.EvaluationRecord("s10", 0, 10, {"greedy": 0.6}), "evaluator", token
    )
    assert await jobs.record_evaluation(
        bench.state, JOB, jobs.EvaluationRecord("before", 0, 0, {}), "evaluator", token
    )
    found = await jobs.read_evaluations(bench.state, JOB)
    assert [(row["tag"], row["result"]) for row in found] == [("before", {}), ("s10", first)]


async def test_gate_admits_groups_within_the_staleness_bound(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2, max_staleness=2)
    opened = await seats.admit(4) + await seats.admit(4)
    assert [group.group for group in opened] == [0, 1, 2, 3, 4, 5]
    assert [group.prompt for group in opened] == [0, 1, 2, 3, 4, 5]
    assert await seats.admit(1) == []
    for group in opened[:2]:
        await seats.finish(group)
    await seats.step(1)
    assert [(g.group, g.version) for g in await seats.admit()] == [(6, 1), (7, 1)]
    row = await jobs.read_job(bench.state, JOB)
    assert (row.opened, row.trained, row.admitted, row.cursor) == (16, 4, 8, 8)


async def test_no_group_is_admitted_before_training_or_beyond_the_budget(bench: Bench) -> None:
    shard, trainer = await bench.seat(SHARD), await bench.seat(TRAINER)
    await jobs.submit(bench.state, JOB, document(steps=1), "", "op")
    assert await groups.admit_groups(bench.state, JOB, SHARD, shard, 9, "op1") == []
    await jobs.set_phase(bench.state, JOB, jobs.Phase.TRAINING, trainer, TRAINER)
    assert await groups.admit_groups(bench.state, JOB, SHARD, shard, 9, "op2") == []
    await steps.commit_initial(
        bench.state, JOB, TRAINER, trainer, 0, steps.VersionReferences("m0", "c0")
    )
    assert len(await groups.admit_groups(bench.state, JOB, SHARD, shard, 9, "op3")) == 2


async def test_no_group_is_admitted_while_the_job_is_paused(bench: Bench) -> None:
    seats = await bench.training_job()
    led = await leader.campaign(bench.state, "planner", "planner/0", 600_000)

    async def set_block_reason(reason: str) -> None:
        admit = SetBlockReason(JOB, reason, Rationale("preempt"))
        assert await pool.write_decisions(bench.state, led, f"hold {reason}", [admit], None) == []

    await set_block_reason("paused: preempted by another")
    assert await seats.admit() == []
    assert (await jobs.read_job(bench.state, JOB)).is_paused and await jobs.is_paused(
        bench.state, JOB
    )
    await set_block_reason("")
    assert len(await seats.admit()) == 6
    assert not await jobs.is_paused(bench.state, JOB)
    await set_block_reason("paused: preempted again")
    assert await jobs.cancel(bench.state, JOB, "cancel")
    assert not await jobs.is_paused(bench.state, JOB) and not await jobs.is_paused(
        bench.state, "other"
    )


async def test_resent_admission_opens_its_groups_once(bench: Bench) -> None:
    seats = await bench.training_job()
    first = await groups.admit_groups(bench.state, JOB, SHARD, seats.shard, 3, "op")
    again = await groups.admit_groups(bench.state, JOB, SHARD, seats.shard, 3, "op")
    assert first == again and len(first) == 3
    assert (await groups.count_in_flight(bench.state, JOB)).open == 3


async def test_shard_without_its_lease_is_fenced_from_all_operations(bench: Bench) -> None:
    seats = await bench.training_job()
    [group] = await seats.admit(1)
    old = seats.shard
    await bench.seat(SHARD)
    with pytest.raises(Fenced):
        await seats.admit(1)
    with pytest.raises(Fenced):
        await seats.finish(group)
    with pytest.raises(Fenced):
        await groups.drop_group(bench.state, JOB, SHARD, old, group.group, "", "op1")
    with pytest.raises(Fenced):
        await groups.requeue_lost_group(bench.state, JOB, SHARD, old, group.group, "", "op2")
    with pytest.raises(Fenced):
        await groups.claim_shard(bench.state, JOB, SHARD, old)


async def test_new_incarnation_takes_over_groups_and_segments(bench: Bench) -> None:
    seats = await bench.training_job()
    opened = await seats.admit(3)
    assert await groups.claim_shard(bench.state, JOB, SHARD, seats.shard) == {}
    await groups.record_segment(bench.state, JOB, SHARD, seats.shard, "a", -1)
    await groups.record_segment(bench.state, JOB, SHARD, seats.shard, "a", 4096)
    await groups.record_segment(bench.state, JOB, SHARD, seats.shard, "b", -1)
    await groups.record_segment(bench.state, JOB, SHARD, seats.shard, "c", -1)
    await groups.remove_segment(bench.state, JOB, SHARD, seats.shard, "c")
    old, seats.shard = seats.shard, await bench.seat(SHARD)
    with pytest.raises(Fenced):  # it holds the name but has not claimed yet
        await groups.record_segment(bench.state, JOB, SHARD, seats.shard, "d", -1)
    found = await groups.claim_shard(bench.state, JOB, SHARD, seats.shard)
    assert found == {"a": 4096, "b": -1}
    with pytest.raises(Fenced):
        await groups.record_segment(bench.state, JOB, SHARD, old, "b", 7)
    assert await groups.read_open_groups(bench.state, JOB, SHARD) == opened
    assert await groups.read_open_groups(bench.state, JOB, "rollout/1") == []
    await seats.finish(opened[0])
    assert await groups.read_open_groups(bench.state, JOB, SHARD) == opened[1:]


async def test_finished_group_becomes_ready_once(bench: Bench) -> None:
    seats = await bench.training_job()
    [group] = await seats.admit(1)
    for _ in range(2):
        await groups.mark_group_ready(
            bench.state,
            JOB,
            SHARD,
            seats.shard,
            groups.FinishedGroup(group.group, "d", 9, 0, 2),
            "same",
        )
    with pytest.raises(Refused, match="not open"):
        await seats.finish(group)
    now = await groups.count_in_flight(bench.state, JOB)
    assert (now.open, now.ready, now.samples) == (0, 1, 2)


async def test_dropped_group_returns_its_admission_but_not_its_prompt(bench: Bench) -> None:
    seats = await bench.training_job()
    opened = await seats.admit()
    for _ in range(2):
        await seats.drop(opened[0].group, "tool_failed", "op")
    again = await seats.admit()
    assert [(g.group, g.prompt) for g in again] == [(6, 6)]
    row = await jobs.read_job(bench.state, JOB)
    assert (row.typed_drops, row.host_lost, row.admitted) == (2, 0, 6)


async def test_requeued_groups_prompt_is_admitted_first(bench: Bench) -> None:
    seats = await bench.training_job()
    opened = await seats.admit()
    for _ in range(2):
        await seats.requeue(opened[1].group, "host_lost", "op")
    again = await seats.admit()
    assert [(g.group, g.prompt) for g in again] == [(6, 1)]
    row = await jobs.read_job(bench.state, JOB)
    assert (row.typed_drops, row.host_lost, row.cursor) == (0, 2, 6)


async def test_step_leases_the_oldest_ready_groups(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2)
    opened = await seats.admit()
    answer = await seats.lease(1)
    assert isinstance(answer, LeaseWait) and answer.shard == SHARD and "0 of 2" in answer.reason
    for n in (3, 2, 1):
        await seats.finish(opened[n])
    first = await seats.lease(1)
    assert isinstance(first, LeasedGroups)
    assert [row.group for row in first.groups] == [1, 2]
    assert first.groups[0].digest == "digest1" and first.groups[0].scored == 2
    assert await seats.lease(1) == first
    await seats.finish(opened[0])
    assert await seats.lease(1) == first


async def test_lease_of_a_step_that_is_not_next_is_rejected(bench: Bench) -> None:
    seats = await bench.training_job()
    with pytest.raises(Refused, match="current version is 0"):
        await seats.lease(2)


async def test_new_trainer_leases_its_predecessors_groups(bench: Bench) -> None:
    seats = await bench.training_job()
    await seats.fill()
    old = seats.trainer
    group_ids = await seats.leased(1)
    seats.trainer = await bench.seat(TRAINER)
    with pytest.raises(Fenced):
        await groups.lease_groups(bench.state, JOB, TRAINER, old, 1)
    assert await seats.leased(1) == group_ids
    now = await groups.count_in_flight(bench.state, JOB)
    assert (now.ready, now.leased) == (4, 2)


async def test_stale_groups_prompt_returns_to_the_cursor(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2, max_staleness=1)
    opened = await seats.admit()
    await seats.finish(opened[0], age=2)
    for group in opened[1:]:
        await seats.finish(group)
    assert await seats.leased(1) == [1, 2]
    row = await jobs.read_job(bench.state, JOB)
    assert (row.stale_requeued, row.admitted) == (2, 3)
    assert [(g.group, g.prompt) for g in await seats.admit()] == [(4, 0)]
    stale_events = [e for e in await events.read_all(bench.state) if e.kind == "stale"]
    assert [e.fields["groups"][0]["group"] for e in stale_events] == [0]


async def test_step_waits_for_a_slow_group_after_max_staleness_skips(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=1, max_staleness=2)
    slow, *others = await seats.admit()
    for step in (1, 2):
        await seats.finish(others[step - 1])
        await seats.step(step)
    [after] = [g for g in await seats.admit() if g.group == 3]
    await seats.finish(after)
    reason = f"0 of 1 groups are ready, group {slow.group} of {SHARD} is waited for"
    assert await seats.lease(3) == LeaseWait(reason, SHARD)
    await seats.finish(slow)
    assert await seats.leased(3) == [slow.group]


async def test_requeued_prompt_inherits_its_skip_count(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=1, max_staleness=1)
    slow, other = await seats.admit()
    await seats.finish(other)
    await seats.step(1)
    await seats.requeue(slow.group, "environment_lost", "op")
    successor, younger = await seats.admit()
    assert successor.prompt == slow.prompt
    await seats.finish(younger)
    reason = f"0 of 1 groups are ready, group {successor.group} of {SHARD} is waited for"
    assert await seats.lease(2) == LeaseWait(reason, SHARD)


async def test_step_without_staleness_waits_for_every_older_group(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2, max_staleness=0)
    opened = await seats.admit()
    assert len(opened) == 2
    await seats.finish(opened[1])
    assert isinstance(await seats.lease(1), LeaseWait)
    await seats.finish(opened[0])
    assert await seats.leased(1) == [0, 1]


async def test_ready_groups_are_leased_before_the_step_is_complete(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2)
    opened = await seats.admit()
    await seats.finish(opened[1])
    part = await groups.lease_groups(bench.state, JOB, TRAINER, seats.trainer, 1)
    assert [row.group for row in part.groups] == [1] and part.wait is not None
    await seats.finish(opened[0])
    await seats.finish(opened[2])
    assert await seats.leased(1) == [0, 1]


async def test_trainer_requeues_a_poisoned_group(bench: Bench) -> None:
    seats = await bench.training_job()
    for group in await seats.admit(3):
        await seats.finish(group)
    assert await seats.leased(1) == [0, 1]
    with pytest.raises(Refused, match="leased to trainer/job"):
        await groups.requeue_lost_group(
            bench.state, JOB, TRAINER, seats.trainer, 2, "poisoned", "op1"
        )
    await groups.requeue_lost_group(bench.state, JOB, TRAINER, seats.trainer, 0, "poisoned", "op2")
    assert await seats.leased(1) == [1, 2]


async def test_zombie_shards_admit_no_group(bench: Bench) -> None:
    seats = await bench.training_job()
    tokens = [await bench.seat(SHARD) for _ in range(20)]
    for token in tokens[:-1]:
        with pytest.raises(Fenced):
            await groups.admit_groups(bench.state, JOB, SHARD, token, 1, uuid.uuid4().hex)
    seats.shard = tokens[-1]
    assert len(await seats.admit(1)) == 1
    found = await registry.lookup(bench.state, SHARD)
    assert found and found.token == tokens[-1]


async def test_digests_stay_live_while_a_step_or_its_replay_needs_them(bench: Bench) -> None:
    seats = await bench.training_job()
    assert await groups.read_live_digests(bench.state, JOB) == set()
    for group in (await seats.admit())[:4]:
        await seats.finish(group)
    await seats.step(1)
    assert await groups.read_live_digests(bench.state, JOB) == {f"digest{n}" for n in range(4)}
    await seats.commit(2, await seats.leased(2), checkpointed_version=1)
    assert await groups.read_live_digests(bench.state, JOB) == {"digest2", "digest3"}


async def test_filtered_group_frees_its_admission_for_another(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2, group_size=3, max_staleness=0)
    admitted = await seats.admit()
    assert len(admitted) == 2 and await seats.admit() == []
    for group, scored in zip(admitted, (2, 3), strict=True):
        await seats.finish(group, scored=scored)
    assert await seats.leased(1) == [0, 1]
    for _ in range(2):  # once, however often it is reported
        await groups.filter_group(bench.state, JOB, TRAINER, seats.trainer, 0, "op")
    assert isinstance(await seats.lease(1), LeaseWait)
    (another,) = await seats.admit()
    assert (another.group, another.prompt) == (2, 2)  # its prompt is not requested again
    await seats.finish(another, scored=3)
    assert await seats.leased(1) == [1, 2]
    await seats.commit(1, [1, 2])
    row = await jobs.read_job(bench.state, JOB)
    assert (row.trained, row.filtered, row.typed_drops) == (6, 2, 1)
    in_flight = (await groups.count_in_flight(bench.state, JOB)).samples
    account = trajectory_accounting.compute_account(await events.read_all(bench.state), in_flight)
    assert account["lost"] == 0 and account["trained_twice"] == 0
    assert (account["filtered"], account["typed_drops"]) == (2, 1)


async def test_only_the_leasing_trainer_can_filter_a_group(bench: Bench) -> None:
    seats = await bench.training_job()
    group, *_ = await seats.admit()
    await seats.finish(group)
    with pytest.raises(Refused, match="leased to trainer/job"):
        await groups.filter_group(bench.state, JOB, TRAINER, seats.trainer, group.group, "op")
