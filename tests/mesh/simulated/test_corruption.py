"""Corruption under a mesh (checkpoints, ledgers, disks, notes, engines), which costs no
trajectory.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.weights import Manifest
from meshrl.common.base.digest import compute_file_digest
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.base.files.corruption import CORRUPTION_EVENT, QUARANTINE_DIRECTORY
from meshrl.common.records import ledger
from meshrl.common.records.checkpoints import STATE_FOLDER, read_manifest
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.events import Event
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.services.rollout.shard import RolloutShard
from meshrl.services.rollout.trajectories.trajectory import RestoredGroups
from meshrl.sim.mesh.faults.invariants import InvariantLimits, check_staleness
from meshrl.sim.mesh.faults.state_observer import StateObserver
from meshrl.sim.mesh.job.job_setup import JOB_NAME
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from meshrl.sim.virtual_process import VirtualProcess
from tests.mesh.simulated.virtual_meshes import (
    check_account,
    mesh_story,
    wait_for_version,
    wait_until_ended,
)

STEPS = 8
BROKEN_AT = 7  # checkpoints are written every third step, and two are retained


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def state_of(checkpoint: Path) -> Path:
    return max(
        (checkpoint.with_suffix("") / STATE_FOLDER).iterdir(), key=lambda file: file.stat().st_size
    )


def chunks_of(checkpoint: Path) -> list[Path]:
    """Return the files of the manifest of a checkpoint's weights and of their chunks."""
    store = ChunkStore(checkpoint.parents[1] / "store")
    manifest = read_manifest(checkpoint)["weights"]
    read_descriptions = unpack(Manifest, store.read(manifest)).tensors
    return [
        store.chunk_path(digest) for digest in {manifest, *(t.chunk for t in read_descriptions)}
    ]


async def run_with_corruption(world: VirtualMesh, corrupt: Callable[[Path], None]) -> list[Event]:
    """Run a job to its end and return its events. Its trainer is killed after `break_it` was
    applied to the manifest of its last checkpoint.
    """
    row = await wait_for_version(world, BROKEN_AT)
    corrupt(world.root / f"checkpoints/{row.checkpoint}.json")
    for name in ("weights", f"trainer/{JOB_NAME}"):  # the store caches manifests
        next(p for p in world.machine.live_processes if p.name == name).kill()
    await wait_until_ended(world)
    state = world.process_context.meshes["weights"].state
    await check_account(state)
    return await events.read_all(state)


def list_fields(recorded: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in recorded if event.kind == kind]


def delete(checkpoint: Path) -> None:
    checkpoint.unlink()


def flip_state(checkpoint: Path) -> None:
    flip(state_of(checkpoint))


@pytest.mark.rotating(2)
@pytest.mark.parametrize("corrupt", [delete, flip_state])
@mesh_story(VirtualMeshSize(steps=STEPS))
async def test_older_checkpoint_replaces_a_corrupt_one(
    world: VirtualMesh, corrupt: Callable[[Path], None]
) -> None:
    recorded = await run_with_corruption(world, corrupt)
    [back] = list_fields(recorded, "lineage")
    assert (back["lineage"], back["version"], back["lost_through"]) == (1, 3, 6)
    assert back["host_lost"] >= 3 * 3 * 3, "three steps of three groups of three"
    assert list_fields(recorded, "step")[-1]["step"] == STEPS
    damaged = list_fields(recorded, "damaged")[0]
    assert damaged["what"] == "checkpoint" and "step-000-000003" in damaged["then"]
    assert list((world.root / "quarantine/checkpoints").glob("step-000-000006-*"))


@pytest.mark.rotating(2)
@mesh_story(VirtualMeshSize(steps=STEPS, max_staleness=0))
async def test_strictly_on_policy_step_trains_no_tokens_of_lost_weights(world: VirtualMesh) -> None:
    observer = StateObserver(world.redis, world.root, JOB_NAME)
    recorded = await run_with_corruption(world, delete)
    [back] = list_fields(recorded, "lineage")
    requeued = [row["group"] for one in list_fields(recorded, "stale") for row in one["groups"]]
    # Those of step 7, which no checkpoint covered, and of step 8, which were in flight.
    assert back["version"] == 3 and sorted(requeued) == [18, 19, 20, 21, 22, 23]
    limits = InvariantLimits(STEPS, max_staleness=0, keep_checkpoints=2)
    assert list(check_staleness(observer.read_final_state(), limits)) == []
    metrics = [step["metrics"] for step in list_fields(recorded, "step")]
    assert {row["staleness_max"] for row in metrics} == {0}


@pytest.mark.deep
@mesh_story(VirtualMeshSize(steps=STEPS))
async def test_missing_weights_are_restaged_from_the_checkpoint(
    world: VirtualMesh,
) -> None:
    def corrupt(checkpoint: Path) -> None:
        for path in chunks_of(checkpoint):
            flip(path)

    recorded = await run_with_corruption(world, corrupt)
    assert not list_fields(recorded, "lineage"), "the steps since were replayed"
    assert any("rewritten from" in one["then"] for one in list_fields(recorded, "damaged"))
    assert len(list((world.root / "store/quarantine").glob("??/*"))) >= 2


@pytest.mark.rotating(2)
@mesh_story(VirtualMeshSize(steps=7), limit_s=1800.0)
async def test_unloadable_weights_are_restaged_by_the_trainer(
    world: VirtualMesh,
) -> None:
    row = await wait_for_version(world, 4)
    path = ChunkStore(world.root / "store").chunk_path(row.manifest)
    flip(path)
    for process in world.machine.live_processes:
        if (
            process.name == "weights" or process.kind == "engine"
        ):  # processes that have already read the file
            process.kill()
    while not path.exists() or compute_file_digest(path) != path.name:
        await world.clock.sleep(0.1)
    await wait_until_ended(world)
    recorded = await events.read_all(world.process_context.meshes["weights"].state)
    assert {one["what"] for one in list_fields(recorded, "damaged")} == {"weights"}
    assert (world.root / "store/quarantine").is_dir()


DAMAGED_AT_S = 60.0


def damage_last_segment(root: Path) -> Path:
    (directory,) = {segment.parent for segment in root.rglob("*.ledger")}
    segment = ledger.list_segments(directory)[-1]
    content = bytearray(segment.read_bytes())
    assert len(content) > len(ledger.HEADER)
    content[2] ^= 1
    segment.write_bytes(content)
    return segment


@pytest.mark.deep
@mesh_story(VirtualMeshSize(steps=14))
async def test_corrupt_record_header_restarts_in_flight_groups_and_loses_none(
    world: VirtualMesh,
) -> None:
    await world.clock.sleep(DAMAGED_AT_S)
    next(p for p in world.machine.live_processes if p.name == "rollout/simulated/0").kill()
    segment = damage_last_segment(world.root)
    await wait_until_ended(world)
    state = world.process_context.meshes["rollout/simulated/0"].state
    (recorded,) = list_fields(await events.read_all(state), CORRUPTION_EVENT)
    assert recorded["path"] == str(segment) and "prompt" in recorded["then"]
    assert QUARANTINE_DIRECTORY in recorded["aside"] and Path(
        recorded["aside"]
    ) in world.root.rglob("*")
    counters, _ = await check_account(state)
    assert counters["trained"] > 0


FULL_AT_S = 60.0
FULL_S = 60.0


@pytest.mark.deep
@mesh_story(VirtualMeshSize(steps=14))
async def test_trajectories_wait_for_disk_space_and_none_is_lost(world: VirtualMesh) -> None:
    clock = world.clock
    await clock.sleep(FULL_AT_S)
    mesh = world.process_context.meshes["rollout/simulated/0"]
    shard = mesh._actor
    assert isinstance(shard, RolloutShard) and shard.shard_job is not None
    runner = shard.shard_job.runner
    world.machine.disk.max_file_bytes = 0
    await clock.sleep(FULL_S / 2)
    wait_until_halfway = {t.id: t.tokens.tolist() for t in runner.active_trajectories}
    await clock.sleep(FULL_S / 2)
    restored = RestoredGroups()
    for record in ledger.iter_records(runner.ledger.directory):
        restored.apply_record(record, shard.shard_job.compute_seed)
    waiting = {t.id: t.tokens.tolist() for t in runner.active_trajectories}
    assert waiting and waiting == wait_until_halfway, "nothing counts while it is full"
    written = {t.id: t.tokens.tolist() for t in restored.trajectories.values()}
    for trajectory in runner.active_trajectories:
        if trajectory.length > trajectory.prompt_length:
            counts = waiting[trajectory.id]
            assert written[trajectory.id] == counts, "what counts is what is written"
    entry = await registry.lookup(mesh.state, "rollout/simulated/0")
    assert entry is not None
    assert "room for the ledger" in [wait["what"] for wait in entry.waits]
    assert (await jobs.read_job(mesh.state, JOB_NAME)).version < 13
    world.machine.disk.clear_faults()
    await wait_until_ended(world)
    counters, _ = await check_account(mesh.state)
    assert counters["typed_drops"] == 0 and counters["trained"] + counters["filtered"] > 0


@mesh_story(VirtualMeshSize(steps=4))
async def test_workers_are_adopted_from_the_registry(world: VirtualMesh, tmp_path: Path) -> None:
    await world.clock.sleep(10.0)
    before = {p.name: p.pid for p in world.machine.live_processes}
    (tmp_path / "mesh" / "node-one.json").unlink()
    next(p for p in world.machine.live_processes if p.name == "node/one").kill()
    await world.clock.sleep(30.0)
    after = {p.name: p.pid for p in world.machine.live_processes}
    assert after["node/one"] != before["node/one"]
    for worker in ("worker/w0", "worker/w1"):
        assert after[worker] == before[worker]
        started = [p for p in world.machine.processes.values() if p.name == worker]
        assert len(started) == 1


@mesh_story(VirtualMeshSize(steps=4))
async def test_worker_that_registers_too_late_is_replaced(
    world: VirtualMesh, tmp_path: Path
) -> None:
    """Check that a worker that registers too late is replaced.

    Its agent has no note of it, and the next agent could not find it.
    """

    def workers() -> list[VirtualProcess]:
        return [p for p in world.machine.live_processes if p.name == "worker/w0"]

    await world.clock.sleep(10.0)
    workers()[0].kill()
    await world.clock.sleep(0.1)
    (unnoted,) = workers()
    unnoted.stop()  # before it has registered
    (tmp_path / "mesh" / "node-one.json").unlink()
    next(p for p in world.machine.live_processes if p.name == "node/one").kill()
    while len(workers()) == 1:
        await world.clock.sleep(0.05)
    unnoted.resume()
    await world.clock.sleep(30.0)
    assert unnoted.has_exited
    assert len(workers()) == 1


SEES_S = 300.0  # the job has failed by then
AGAIN = "again"


@pytest.mark.rotating(2)
@mesh_story(VirtualMeshSize(steps=2))
async def test_signal_at_each_start_fails_the_job_and_keeps_the_mesh(
    world: VirtualMesh,
) -> None:
    began = world.clock.monotonic()
    while world.phase != "failed" and world.clock.monotonic() - began < SEES_S:
        for process in world.machine.live_processes:
            if process.kind == "engine":
                process.exit(-signal.SIGSEGV)
        await world.clock.sleep(0.3)
    row = await jobs.read_job(world.state, JOB_NAME)
    assert row.phase == "failed", row.phase
    assert row.error.startswith("engine/") and "signal 11 (SIGSEGV)" in row.error
    recorded = [e for e in await events.read_all(world.state) if e.kind == "process_ended"]
    assert {e.fields["name"].split("/")[0] for e in recorded} == {"engine"}
    there = {e.kind for e in await registry.list_entries(world.state) if e.alive}
    assert {"planner", "weights", "node", "worker"} <= there
    await jobs.reopen(world.state, JOB_NAME, AGAIN)
    await wait_until_ended(world)
