"""Jobs of a mesh: hanging, cancelled, changed, without steps, measured, traced, on two shards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from meshrl.common.job.change_rules import apply_changes
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.events import Event
from meshrl.common.state.pool.demand.measurements import (
    MeasuredWork,
    Measurements,
    parse_accelerator_kind,
)
from meshrl.common.state.pool.demand.planned_jobs import ProcessStats, collect_measurements
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.sim.mesh.job.job_setup import JOB_NAME
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from meshrl.sim.virtual_process import VirtualProcess
from meshrl.view.trace import trace_writer
from tests.mesh.simulated.virtual_meshes import (
    check_account,
    mesh_story,
    run_on_mesh,
    wait_for_version,
    wait_until_ended,
)
from tests.traced import check_trace, list_spans

STEPS, WORKERS = 3, 4
SOON_S = 60.0 + 10.0 * STEPS  # processes start and steps are made as without the other job
HANGING = f"{JOB_NAME}-2"
CLOSING_S = 60.0  # until the processes of ended jobs have exited


def block_environments(world: VirtualMesh) -> None:
    """Make the environments of one job accept messages without an answer."""
    answering = world.machine.programs["meshrl.services.environment"]

    async def environment(process: VirtualProcess, argv: list[str]) -> None:
        if HANGING not in " ".join(argv):
            return await answering(process, argv)
        while await process.channel.to_child.get() is not None:
            pass

    world.machine.programs["meshrl.services.environment"] = environment


def list_job_processes(world: VirtualMesh) -> set[str]:
    kinds = ("rollout/", "environment-")
    return {
        process.name for process in world.machine.live_processes if process.name.startswith(kinds)
    }


@pytest.mark.rotating(2)
@pytest.mark.timeout(300)
@mesh_story(VirtualMeshSize(WORKERS, steps=STEPS, jobs=2))
async def test_hanging_job_does_not_delay_another(world: VirtualMesh) -> None:
    block_environments(world)
    await wait_until_ended(world)
    assert world.clock.monotonic() <= SOON_S
    row = await jobs.read_job(world.state, HANGING)
    assert row.phase == jobs.Phase.BASELINE, "it hung all the while"
    await jobs.cancel(world.state, HANGING, "cancel")
    async with world.clock.timeout(CLOSING_S, "the end of the jobs' processes"):
        while list_job_processes(world):
            await world.clock.sleep(1.0)
    counted, _ = await check_account(world.state)
    assert counted["in_flight"] == 0


FEW_STEPS = 3


@pytest.mark.rotating(2)
@pytest.mark.timeout(200)
@mesh_story(VirtualMeshSize(workers=2, steps=FEW_STEPS), seed=4)
async def test_cancelled_job_frees_its_workers_and_resumes(
    world: VirtualMesh,
) -> None:
    state, clock = world.state, world.clock
    await wait_for_version(world, 1)
    assert await jobs.cancel(state, JOB_NAME, "cancelled")
    while await pool.read_gangs(state):
        await clock.sleep(1.0)
    stopped = await jobs.read_job(state, JOB_NAME)
    await clock.sleep(10.0)
    later = await jobs.read_job(state, JOB_NAME)
    assert (later.phase, later.version) == ("stopped", stopped.version), "nobody works on it"
    await jobs.reopen(state, JOB_NAME, "reopened")
    await wait_until_ended(world)
    assert (await jobs.read_job(state, JOB_NAME)).steps_done == FEW_STEPS
    counted, _ = await check_account(state)
    assert counted["host_lost"] == 0


CHANGED_STEPS, EVERY = 12, 3  # a checkpoint every third step


@pytest.mark.deep
@mesh_story(VirtualMeshSize(steps=CHANGED_STEPS))
async def test_steps_before_a_change_replay_with_their_settings(
    world: VirtualMesh,
) -> None:
    while (row := await jobs.read_job(world.state, JOB_NAME)).version < 2 * EVERY - 1:
        await world.clock.sleep(0.2)
    assert row.version % EVERY == EVERY - 1  # two steps exist only in their records
    now = {"optimizer.final_lr": 0.9, "optimizer.warmup_steps": 0}
    document = apply_changes(row.document, now)
    changes = {key: (row.document["optimizer"][key[10:]], now[key]) for key in now}
    assert not await jobs.change_document(world.state, JOB_NAME, document, changes, "change")
    killed = next(p for p in world.machine.live_processes if p.name.startswith("trainer/"))
    killed.kill()
    await wait_until_ended(world)
    row = await jobs.read_job(world.state, JOB_NAME)
    assert (row.version, row.lineage) == (CHANGED_STEPS, 0)
    assert row.document["optimizer"]["final_lr"] == 0.9


@mesh_story(VirtualMeshSize(workers=2, steps=0), limit_s=600.0)
async def test_job_without_steps_is_evaluated_without_groups(world: VirtualMesh) -> None:
    await wait_until_ended(world)
    [row] = await jobs.read_evaluations(world.state, JOB_NAME)
    assert row["tag"] == "before" and row["result"]["problems"] == 2
    kinds = {event.kind for event in await events.read_all(world.state)}
    assert not kinds & {"opened", "step"}


MANY_STEPS, LATE = 40, 8


async def read_measurements(world: VirtualMesh) -> Measurements:
    """Return the measurements that the leader would read now."""
    kinds = {
        w.gang: parse_accelerator_kind(w.accelerator) for w in await pool.read_workers(world.state)
    }
    entries = [e for e in await registry.list_entries(world.state) if e.alive]
    about = [ProcessStats(e.name, e.kind, e.incarnation, e.stats) for e in entries]
    return collect_measurements([p for p in about if p.stats.get("job") == JOB_NAME], kinds)


@pytest.mark.deep
@mesh_story(VirtualMeshSize(steps=MANY_STEPS))
async def test_shards_core_and_engines_publish_their_work(
    world: VirtualMesh,
) -> None:
    while (await jobs.read_job(world.state, JOB_NAME)).version < MANY_STEPS // 2:
        await world.clock.sleep(0.2)
    await world.clock.sleep(7.0)  # all have renewed their leases since
    row, found = await jobs.read_job(world.state, JOB_NAME), await read_measurements(world)
    whole = sum(found.work_by_process.values(), MeasuredWork())
    by_kind = {name.partition("/")[0]: work for name, work in found.work_by_process.items()}
    assert set(by_kind) == {"rollout", "trainer"}
    assert MANY_STEPS // 2 <= whole.steps <= row.version
    a_step = row.document["algorithm"]["groups_per_step"]
    assert whole.groups >= (whole.steps - LATE) * a_step  # a shard may have reported earlier
    assert whole.trajectories >= whole.groups and whole.sampled > whole.trajectories
    assert min(whole.busy_s, whole.wait_s, whole.work_s, whole.tokens) > 0
    assert whole.work_s < whole.busy_s and 0 < whole.held_s < whole.busy_s
    assert whole.flight_s > whole.engine_s > 0 and whole.tool_s > 0
    assert abs(whole.flight_s - whole.engine_s - whole.queue_s - whole.tool_s) < 0.01
    assert found.curves
    for curve in found.curves:
        assert curve.accelerator_kind and curve.predict_step_s(4, 20) > 0 and curve.fitted_steps > 8
    await wait_until_ended(world)


# A shard takes all that an open gate admits: in fewer steps, one shard takes all.
SHARED_STEPS = 12


def run(root: Path, shards: int) -> tuple[dict[str, int], set[str], list[int]]:
    """Return the account, the shards of trained groups, and the prompts of opened groups."""

    async def job(world: VirtualMesh) -> tuple[dict[str, int], list[Event]]:
        await wait_until_ended(world)
        return await check_account(world.state)

    root.mkdir()
    size = VirtualMeshSize(workers=3, shards=shards, steps=SHARED_STEPS)
    counted, details = run_on_mesh(root, size, job, seed=2)
    opened = [e.fields for e in details if e.kind == "opened"]
    shard_of = {group: fields["shard"] for fields in opened for group in fields["groups"]}
    trained = [row for e in details if e.kind == "step" for row in e.fields["groups"]]
    prompts = sorted(prompt for fields in opened for prompt in fields["prompts"])
    return counted, {shard_of[row["group"]] for row in trained}, prompts


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_two_shards_have_the_accounting_of_one(tmp_path: Path) -> None:
    one, _, prompts_of_one = run(tmp_path / "one", 1)
    two, shards, prompts_of_two = run(tmp_path / "two", 2)
    assert two["in_flight"] == 0
    # Which group samples a prompt, and so whether its rewards are equal, depends on the shards.
    for account in one, two:
        account["trained"] += account.pop("filtered")
    assert one == two
    assert prompts_of_one == prompts_of_two
    assert shards == {"rollout/simulated/0", "rollout/simulated/1"}


TRACED_STEPS = 6


@pytest.mark.deep
@pytest.mark.timeout(300)
@mesh_story(VirtualMeshSize(workers=3, shards=2, steps=TRACED_STEPS), seed=2)
async def test_run_of_two_shards_is_traced_from_prompts_to_weights(
    world: VirtualMesh, tmp_path: Path
) -> None:
    await wait_until_ended(world)
    recorded = await events.read_all(world.state)
    path = tmp_path / "trace.json"
    assert trace_writer.write_trace(tmp_path, path, recorded) > 100
    found = json.loads(path.read_text())["traceEvents"]
    check_trace(found)

    begun = [s for n in (0, 1) for s in list_spans(found, f"shard {n}") if "args" in s]
    trained = {s["args"]["group"] for s in begun if "trained in step" in s["args"]}
    assert {e["id"] for e in found if e["ph"] == "s"} == trained
    steps = [e.fields for e in recorded if e.kind == "step"]
    assert trained == {row["group"] for fields in steps for row in fields["groups"]}
    inside = Counter(s["name"] for n in (0, 1) for s in list_spans(found, f"shard {n}"))
    assert min(inside[name] for name in ("open", "queue", "prefill", "decode")) > 0, inside

    trainer = Counter(span["name"] for span in list_spans(found, "trainer"))
    assert [trainer[f"step {n}"] for n in range(1, TRACED_STEPS + 1)] == [1] * TRACED_STEPS
    assert trainer["train"] == trainer["sync: stage"] == TRACED_STEPS, trainer
    assert trainer["round"] >= TRACED_STEPS and trainer["checkpoint: write"] >= 2
    versions = {s["name"] for s in list_spans(found, "engines") if s["name"].startswith("version")}
    assert f"version {TRACED_STEPS}" in versions
    roles = {span["name"] for span in list_spans(found, "gangs")}
    assert {"training", "rollout"} <= roles
