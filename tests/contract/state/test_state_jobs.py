"""Admission of jobs, changes of their documents, and deletion, the same on every backend."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded, Fenced, NotFound, Refused
from meshrl.common.job.change_rules import apply_changes
from meshrl.common.mesh.process.supervision import exit_reports
from meshrl.common.state import events, groups, jobs, leader, readers, registry, steps
from meshrl.common.state.hosts import host_requests
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    FormGang,
    Rationale,
    SetBlockReason,
)
from meshrl.common.state.pool.scheduling.snapshot import SHUTDOWN_NOTICE, PoolRequest
from meshrl.common.state.pool.store import host_notices
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.host_notices import HostNotice
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.common.state.redis.client import StateClient
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

REQUEST_FIELDS = {"host": "gpu1-1f3a9c", "nested": {"roles": ["node"]}}
WHY = Rationale("default")


async def test_host_request_is_answered_once_despite_resends(state: StateClient) -> None:
    clock = SystemClock()
    submission = asyncio.create_task(
        host_requests.submit_host_request(state, clock, "q1", host_requests.JOIN, REQUEST_FIELDS)
    )
    while not (found := await host_requests.read_pending_requests(state)):
        await asyncio.sleep(0.01)
    [one] = found
    assert (one.id, one.kind, one.arguments) == ("q1", "join", REQUEST_FIELDS)
    await host_requests.answer_host_request(state, "q1", {"prefix": "h1w", "settings": {}})
    assert await submission == {"prefix": "h1w", "settings": {}}
    assert await host_requests.read_pending_requests(state) == []
    reply = await host_requests.submit_host_request(
        state, clock, "q1", host_requests.JOIN, REQUEST_FIELDS
    )
    assert reply["prefix"] == "h1w" and await host_requests.read_pending_requests(state) == []


async def test_pending_host_requests_are_listed_in_order_of_submission(bench: Bench) -> None:
    ids = [f"q{7 * i % 30}" for i in range(30)]  # a hash lists them in its own order
    for id in ids:
        with pytest.raises(DeadlineExceeded):
            await host_requests.submit_host_request(
                bench.state, SystemClock(), id, host_requests.RETURN, REQUEST_FIELDS, -1.0
            )
        await bench.pass_ms(2)
    assert [one.id for one in await host_requests.read_pending_requests(bench.state)] == ids


async def test_rejected_host_request_raises_its_error(state: StateClient) -> None:
    await host_requests.answer_host_request(
        state, "q2", Refused("a host called x is in the mesh", fix="Join anew")
    )
    with pytest.raises(Refused, match=r"a host called x is in the mesh.*Join anew"):
        await host_requests.submit_host_request(
            state, SystemClock(), "q2", host_requests.JOIN, REQUEST_FIELDS
        )


async def test_unanswered_host_request_times_out_and_expires(bench: Bench) -> None:
    with pytest.raises(DeadlineExceeded, match=r"launcher.*log"):
        await host_requests.submit_host_request(
            bench.state, SystemClock(), "q3", host_requests.LEAVE, REQUEST_FIELDS, 0.0
        )
    assert [one.id for one in await host_requests.read_pending_requests(bench.state)] == ["q3"]
    if bench.clock is None:  # a test cannot advance a real server's clock
        return
    bench.clock.now += host_requests.ANSWER_TIMEOUT_S + 1
    assert await host_requests.read_pending_requests(bench.state) == []


async def test_drain_reasons_are_set_compared_and_cleared(state: StateClient) -> None:
    await pool.submit_request(state, PoolRequest("op", "drain", host="a"))
    assert await pool.read_drain_reasons(state) == {"a": "asked for"}
    assert await pool.set_drain_reason(state, "b", "has left")
    assert not await pool.set_drain_reason(state, "b", "has left")
    assert await pool.read_drain_reasons(state) == {"a": "asked for", "b": "has left"}
    assert await pool.set_drain_reason(state, "a", "")
    assert await pool.read_drain_reasons(state) == {"b": "has left"}
    assert await state.run_command("HGETALL", "{mesh}:requests") in ({}, [])
    assert not await pool.set_drain_reason(state, "b", "", expected=SHUTDOWN_NOTICE), (
        "that was said for another reason"
    )
    assert await pool.set_drain_reason(state, "a", SHUTDOWN_NOTICE, expected="")
    assert not await pool.set_drain_reason(state, "b", SHUTDOWN_NOTICE, expected="")
    assert await pool.read_drain_reasons(state) == {"a": SHUTDOWN_NOTICE, "b": "has left"}
    assert await pool.set_drain_reason(state, "a", "", expected=SHUTDOWN_NOTICE)
    assert await pool.read_drain_reasons(state) == {"b": "has left"}


async def change_job(bench: Bench, op: str, **budget_or_staleness: int) -> bool:
    row = await jobs.read_job(bench.state, JOB)
    keys = {"steps": "budget.steps", "staleness": "algorithm.max_staleness"}
    values = {keys[name]: value for name, value in budget_or_staleness.items()}
    changes = {key: (None, value) for key, value in values.items()}
    return await jobs.change_document(
        bench.state, JOB, apply_changes(row.document, values), changes, op
    )


async def finish_job(bench: Bench, steps: int) -> tuple[Seats, int]:
    """Return a job that has done its two steps and was evaluated after them."""
    seats = await bench.training_job()
    token = await bench.seat(EVALUATOR)
    await change_job(bench, "two steps", steps=steps)
    await trained_to(bench, seats, steps)
    result = {"sampled": 0.5}
    state = bench.state
    await jobs.record_evaluation(
        state, JOB, jobs.EvaluationRecord("after", 0, steps, result), EVALUATOR, token
    )
    await jobs.set_phase(state, JOB, jobs.Phase.FINISHED, seats.trainer, TRAINER)
    return seats, token


async def test_finished_job_resumes_training_when_steps_are_added(bench: Bench) -> None:
    seats, token = await finish_job(bench, 2)
    for _ in range(2):  # a resend changes nothing
        assert await change_job(bench, "more", steps=3)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.phase, row.version, row.document["budget"]["steps"]) == ("training", 2, 3)
    [before] = await jobs.read_evaluations(bench.state, JOB)
    assert (before["tag"], before["step"], before["result"]) == ("step-2", 2, {"sampled": 0.5})
    await trained_to(bench, seats, 3)
    assert (await jobs.read_job(bench.state, JOB)).phase == "evaluation", "the new number ends it"
    assert await jobs.record_evaluation(
        bench.state, JOB, jobs.EvaluationRecord("after", 0, 3, {}), EVALUATOR, token
    )
    [change_event] = [e.fields for e in await events.read_all(bench.state) if e.kind == "changed"][
        1:
    ]
    assert (change_event["version"], change_event["lineage"], change_event["extended"]) == (
        2,
        0,
        True,
    )
    assert change_event["changes"] == {"budget.steps": [None, 3]}


async def test_change_without_new_steps_leaves_a_job_finished(bench: Bench) -> None:
    await finish_job(bench, 2)
    assert not await change_job(bench, "staleness", staleness=1)
    assert (await jobs.read_job(bench.state, JOB)).phase == "finished"


async def test_job_is_evaluated_when_its_budget_shrinks_to_the_steps_done(bench: Bench) -> None:
    seats = await bench.training_job()
    await trained_to(bench, seats, 2)
    assert not await change_job(bench, "fewer", steps=2)
    assert (await jobs.read_job(bench.state, JOB)).phase == "evaluation"


async def stop_early(bench: Bench, values: list[float], patience: int = 2) -> tuple[Seats, int]:
    """Train and evaluate versions of a job of nine steps with these figures, version 1 first."""
    seats, token = await bench.training_job(), await bench.seat(EVALUATOR)
    await change_job(bench, "nine steps", steps=9)
    for step, value in enumerate(values, 1):
        await trained_to(bench, seats, step)
        await evaluate(bench, token, step, value, patience)
    return seats, token


async def evaluate(bench: Bench, token: int, step: int, value: float, patience: int = 2) -> None:
    record = jobs.EvaluationRecord(f"step-{step}", 0, step, {}, value, patience)
    assert await jobs.record_evaluation(bench.state, JOB, record, EVALUATOR, token)


async def test_job_without_a_better_version_ends_after_the_step_in_progress(bench: Bench) -> None:
    seats, token = await stop_early(bench, [0.5, 0.7, 0.6, 0.7])
    row = await jobs.read_job(bench.state, JOB)
    assert (row.best_version, row.early_stop, row.last_step, row.phase) == (2, 4, 5, "training")
    assert await seats.admit() == [], "the groups of the last step are admitted"
    event = [e.fields for e in await events.read_all(bench.state) if e.kind == "evaluation"][-1]
    assert (event["ends_at"], event["best_version"], event["patience"]) == (5, 2, 2)
    await trained_to(bench, seats, 5)
    assert (await jobs.read_job(bench.state, JOB)).phase == "evaluation"
    assert not await change_job(bench, "another key", staleness=1)
    assert (await jobs.read_job(bench.state, JOB)).last_step == 5
    assert await change_job(bench, "go on", steps=10)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.phase, row.early_stop, row.last_step) == ("training", -1, 10)
    await trained_to(bench, seats, 6)
    await evaluate(bench, token, 6, 0.1)
    assert (await jobs.read_job(bench.state, JOB)).last_step == 10, "its patience began again"
    await trained_to(bench, seats, 7)
    await evaluate(bench, token, 7, 0.1)
    assert (await jobs.read_job(bench.state, JOB)).last_step == 8


async def test_early_stop_is_undone_with_its_evaluation(bench: Bench) -> None:
    seats, _ = await stop_early(bench, [0.5, 0.7, 0.6, 0.7])
    names = steps.VersionReferences("m", "c")
    await steps.open_lineage(bench.state, JOB, TRAINER, seats.trainer, 3, names, "lineage")
    row = await jobs.read_job(bench.state, JOB)
    assert (row.early_stop, row.last_step, row.best_version) == (-1, 9, 2)


async def test_early_stop_remains_after_redis_lost_all_data(bench: Bench) -> None:
    seats, _ = await stop_early(bench, [0.5, 0.7, 0.6, 0.7])
    await trained_to(bench, seats, 5)
    saved = await steps.read_checkpoint_state(bench.state, JOB) | {"manifest": "m0.5"}
    await bench.state.run_command("FLUSHALL")
    await steps.restore_job(bench.state, JOB, document(steps=9), "/run", saved)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.early_stop, row.last_step, row.phase) == (4, 5, "evaluation")
    assert await change_job(bench, "go on", steps=10)
    assert (await jobs.read_job(bench.state, JOB)).last_step == 10


@pytest.mark.parametrize(
    ("values", "patience"),
    [([0.5, 0.7, 0.6], 2), ([0.5, 0.4, 0.6, 0.5], 2), ([0.5, 0.4, 0.3, 0.2], 0)],
)
async def test_job_goes_on_while_patience_is_left(
    bench: Bench, values: list[float], patience: int
) -> None:
    await stop_early(bench, values, patience)
    row = await jobs.read_job(bench.state, JOB)
    assert (row.early_stop, row.last_step) == (-1, 9)


async def test_gate_applies_the_changed_staleness(bench: Bench) -> None:
    seats = await bench.training_job(max_staleness=0)
    first = await seats.admit()
    assert first and await seats.admit() == []
    await change_job(bench, "wider", staleness=1)
    assert len(await seats.admit()) == len(first)


async def test_change_of_an_unknown_job_raises_not_found(bench: Bench) -> None:
    with pytest.raises(NotFound):
        await jobs.change_document(bench.state, "other", document(), {}, "op")


async def list_keys(state: StateClient, job: str) -> list[str]:
    """Return all keys of a job except answers to operations, which expire by themselves."""
    found = await state.run_command("KEYS", f"{{{job}}}:*")
    return sorted(key for key in found if ":op:" not in key)


async def stop_job(bench: Bench, steps: int = 3) -> None:
    """Stop a job that has done some steps and has groups in every state."""
    seats = await bench.training_job()
    await groups.claim_shard(bench.state, JOB, SHARD, seats.shard)
    for number in range(1, steps + 1):
        await seats.train(number)
    opened = await seats.admit()
    await seats.finish(opened[0])
    await seats.requeue(opened[1].group, "lost", uuid.uuid4().hex)
    await jobs.record_evaluation(
        bench.state, JOB, jobs.EvaluationRecord("step-0", 0, 0, {}), TRAINER, seats.trainer
    )
    await exit_reports.report_exit(
        bench.state, exit_reports.ExitReport(TRAINER, 1, "code 1", job=JOB)
    )
    await jobs.cancel(bench.state, JOB, "stop")


async def test_deleted_job_leaves_no_keys_readers_or_exits(bench: Bench) -> None:
    await stop_job(bench)
    assert len(await list_keys(bench.state, JOB)) > 8
    for _ in range(2):
        await deletion.delete_job(bench.state, JOB, "op")
    assert await list_keys(bench.state, JOB) == []
    assert await jobs.read_jobs(bench.state) == []
    assert (
        await readers.list_readers(bench.state) == []
        and await exit_reports.read_last_exits(bench.state) == []
    )
    deletions = [e.fields for e in await events.read_all(bench.state) if e.kind == "deleted"]
    assert [(one["job"], one["run_dir"]) for one in deletions] == [(JOB, "/runs/job")]
    assert await deletion.read_pending_store_deletions(bench.state) == [JOB]
    with pytest.raises(NotFound):
        await deletion.delete_job(bench.state, JOB, "another")
    at = await events.read_last_id(bench.state)
    await readers.record_cursor(bench.state, readers.recorder_name(JOB), at, "/runs/job")
    assert await readers.list_readers(bench.state) == []  # a late recorder does not block trimming
    with pytest.raises(Refused, match="being deleted"):
        await jobs.submit(bench.state, JOB, document(), "/runs/again", "early")
    await deletion.confirm_store_deletion(bench.state, JOB)
    await jobs.submit(bench.state, JOB, document(), "/runs/again", "again")
    assert (await jobs.read_job(bench.state, JOB)).steps_done == 0


async def test_active_job_cannot_be_deleted(bench: Bench) -> None:
    await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    with pytest.raises(Refused, match="queued"):
        await deletion.delete_job(bench.state, JOB, "op")
    await jobs.cancel(bench.state, JOB, "stop")
    await jobs.reopen(bench.state, JOB, "go on")
    with pytest.raises(Refused):
        await deletion.delete_job(bench.state, JOB, "op2")
    assert (await jobs.read_job(bench.state, JOB)).phase == "queued"


async def test_leader_completes_an_interrupted_deletion(
    bench: Bench,
) -> None:
    await stop_job(bench, steps=6)
    leader_token = await leader.campaign(bench.state, "planner", "a", 600_000)
    args = {"job": JOB, "op": "op", "by": "a person"}
    await bench.state.run_script("delete_job", [f"{{{JOB}}}"], args)
    piece = await bench.state.run_script(
        "delete_remaining_rows", [f"{{{JOB}}}"], {"job": JOB, "most": 3}
    )
    assert piece["more"]
    with pytest.raises(Refused, match="being deleted"):
        await jobs.submit(bench.state, JOB, document(), "/runs/job", "again")
    assert await deletion.delete_old_jobs(bench.state, leader_token, retention_days=30) == []
    assert await list_keys(bench.state, JOB) == []


async def test_leader_deletes_jobs_past_their_retention(bench: Bench) -> None:
    leader_token = await leader.campaign(bench.state, "planner", "a", 600_000)
    for n in range(deletion.MAX_JOBS + 2):
        await jobs.submit(bench.state, f"job{n}", document(), "/runs/job", f"op{n}")
        await jobs.cancel(bench.state, f"job{n}", f"stop{n}")
    await jobs.submit(bench.state, JOB, document(), "/runs/job", "op")
    assert await deletion.delete_old_jobs(bench.state, leader_token, retention_days=1) == []
    await bench.pass_ms(20)
    with pytest.raises(Fenced):
        await deletion.delete_old_jobs(bench.state, leader_token + 1, retention_days=0)
    first = await deletion.delete_old_jobs(bench.state, leader_token, retention_days=0)
    assert len(first) == deletion.MAX_JOBS
    assert len(await deletion.delete_old_jobs(bench.state, leader_token, retention_days=0)) == 2
    assert [row.id for row in await jobs.read_jobs(bench.state)] == [JOB]


async def test_lost_workers_and_hosts_are_removed(bench: Bench) -> None:
    state = bench.state
    for n in range(3):
        token = await bench.seat(f"worker/w{n}")
        await pool.join_worker(state, WorkerRow(f"w{n}", f"h{n}", "cpu:0", token))
    leader_token = await leader.campaign(state, "planner", "a", 600_000)
    serve = [AssignServices(f"h{n}", ("rollout/job/0",), WHY) for n in range(3)]
    node = registry.RegistryEntry("node/h0", "node", incarnation="n")
    await registry.register(state, node, 600_000)
    await pool.write_decisions(
        state, leader_token, "op", [FormGang("g0", ("w2",), WHY), *serve], None
    )
    await pool.submit_request(state, PoolRequest("d", "drain", host="h1"))
    kept = HostNotice("EC2", 1e9, "gone")
    for host in ("h0", "h1"):
        await host_notices.write_notice(state, host, kept)
    for n in (1, 2):
        entry = await registry.lookup(state, f"worker/w{n}")
        assert entry and await registry.release_lease(state, f"worker/w{n}", entry.token)
    assert await pool.remove_gone(state, leader_token, 300.0) == 0
    await bench.pass_ms(30)
    assert await pool.remove_gone(state, leader_token, 0.02) == 1
    assert [worker.id for worker in await pool.read_workers(state)] == ["w0", "w2"]
    assert [await pool.read_host_services(state, f"h{n}") for n in range(3)] == [
        serve[0].services,
        (),
        (),
    ]
    hosts = (await pool.read_snapshot(state, leader_token)).snapshot.hosts
    assert [(host.name, host.drain_reason) for host in hosts] == [("h0", ""), ("h2", "")]
    assert await host_notices.read_notices(state) == {"h0": kept}
    token = await bench.seat("worker/w1")
    joined = await pool.join_worker(state, WorkerRow("w1", "h1", "cpu:0", token))
    assert (joined.gang, joined.membership) == ("", 0)


async def test_paused_job_is_not_charged_with_exits(simulated: Bench) -> None:
    leader_token = await leader.campaign(simulated.state, "planner", "a", 600_000_000)
    await jobs.submit(simulated.state, JOB, document(), "/runs/job", "op")

    async def report_exits(count: int) -> bool:
        failed = False
        for _ in range(count):
            await simulated.pass_ms(6_000)
            end = exit_reports.ExitReport("trainer/job", -9, "", job=JOB)
            failed = await exit_reports.report_exit(simulated.state, end) or failed
        return failed

    async def set_block_reason(reason: str) -> None:
        op = uuid.uuid4().hex
        await pool.write_decisions(
            simulated.state, leader_token, op, [SetBlockReason(JOB, reason, WHY)], None
        )

    assert not await report_exits(4)
    await set_block_reason("paused: another job has its workers")
    assert not await report_exits(12)
    await set_block_reason("")
    assert not await report_exits(4)  # exits before the pause are not counted
    assert await report_exits(4)
