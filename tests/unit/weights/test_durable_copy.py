"""Durable copy of a mesh's jobs, from which another mesh resumes them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from meshrl.common.api.weights import STORE_NAME, Checkpoint, CheckpointAssembly, Weights
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import BadMessage, CorruptData, MeshError, NotFound, Refused
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.job.bundle import bundle_files
from meshrl.common.records.checkpoints import (
    STATE_FOLDER,
    compute_file_digests,
    list_manifest_paths,
    read_manifest,
    verify_checkpoint,
)
from meshrl.common.records.durable_copy import CopyTakenOver, DurableCopy, DurableCopyRecord
from meshrl.common.state import events, jobs, registry, steps
from meshrl.common.state.job_lifecycle import deletion
from meshrl.directory.directory_paths import MeshPaths, read_json
from meshrl.launch.head import durable_restore
from meshrl.services.weights.durable_copier import (
    DAY_S,
    MAX_RETRY_S,
    OLD_JOBS_POLL_S,
    POLL_S,
    STALL_WARNING_S,
    DurableCopier,
)
from meshrl.sim.mesh.job.job_setup import build_config, write_job
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.view.live import mesh_tables
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.weights.store_bench import JOB, TRAINER, StoreBench, on_store

T = TypeVar("T")


def make_url(root: Path, kind: str = "file") -> str:
    return f"{kind}://{root}/copy"


class StalledHost(SimulatedHost):
    """Host whose blocking calls take longer than the stall warning."""

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        await self._clock.sleep(2 * STALL_WARNING_S)
        return fn(*args)


class DelayedListingFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """File system whose listing of checkpoints is one call out of date."""

    protocol = "behind"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, object] = {}

    def ls(self, path: str, detail: bool = False, **options: object) -> object:
        current = super().ls(path, detail, **options)
        if not path.endswith("/checkpoints"):
            return current
        stale, self._found[path] = self._found.get(path, []), current
        return stale


class CopyBench:
    """Mesh with a job of a few checkpoints, whose store writes a copy."""

    def __init__(self, store: StoreBench, root: Path) -> None:
        self.store, self.root = store, root
        self.copy = DurableCopy(make_url(root))

    async def start_job(self, kind: str) -> None:
        DurableCopyRecord(make_url(self.root, kind), "us").write(self.store.root / "mesh")
        config = replace(build_config(1, 1, 1, 9), name=JOB)
        document = write_job(config, self.store.root / "packed")
        files = bundle_files.list_files(self.store.root / "packed/bundle")
        document["bundle"] |= {"files": files, "digest": bundle_files.compute_digest(files)}
        document["training"]["keep_checkpoints"] = 2
        await jobs.submit(self.store.state, JOB, document, str(self.store.run_dir), "submit")
        self.copier = DurableCopier(self.store.mesh("copying", "weights"))
        self.task = asyncio.create_task(self.copier.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def checkpoint(self, step: int) -> str:
        """Commit a step with a checkpoint whose files identify the step."""
        manifest = await self.store.stage(step)
        name = f"step-000-{step:06d}-{manifest[:8]}"
        directory = self.store.run_dir / "checkpoints" / name
        (directory / STATE_FOLDER).mkdir(parents=True)
        (directory / STATE_FOLDER / "a.safetensors").write_text(f"state {step}")
        (directory / "tokenizer.json").write_text("always the same")
        checkpoint_state = await steps.read_checkpoint_state(self.store.state, JOB)
        checkpoint_state |= {"version": step, "cursor": 7}
        checkpoint = Checkpoint(
            JOB, 0, step, manifest, checkpoint_state, compute_file_digests(directory)
        )
        await self.store.trainer.ref(STORE_NAME).call(Weights.save_checkpoint, checkpoint)
        if step:
            await self.store.commit(step, manifest, name)
        else:
            token = self.store.trainer.token
            await steps.commit_initial(
                self.store.state, JOB, TRAINER, token, 0, steps.VersionReferences(manifest, name)
            )
        return name

    async def wait_for_poll(self) -> None:
        await self.store.clock.sleep(2 * POLL_S)

    async def list_events(self, kind: str) -> list[dict[str, object]]:
        return [dict(e.fields) for e in await events.read_all(self.store.state) if e.kind == kind]


def run_with_copy(
    root: Path,
    story: Callable[[CopyBench], Awaitable[None]],
    kind: str = "file",
    stalls: bool = False,
) -> None:
    (root / "mesh-a").mkdir()

    async def run_story(store: StoreBench) -> None:
        bench = CopyBench(store, root)
        if stalls:
            store.host = StalledHost(store.clock, store.random)
        await bench.start_job(kind)
        try:
            await story(bench)
        finally:
            await bench.stop()

    on_store(root / "mesh-a", run_story)


def test_another_mesh_resumes_from_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    async def story(bench: CopyBench) -> None:
        for step in range(4):
            name = await bench.checkpoint(step)
            await bench.wait_for_poll()
        [*_, last] = await bench.list_events("durable_copied")
        assert last["checkpoint"] == name and last["job"] == JOB
        assert bench.copier.stats()["durable_checkpoints"] == 4
        # as many as the job retains, and only files of those
        assert len(bench.copy.list_checkpoints(JOB)) == 2
        states = (tmp_path / "copy").rglob("files/*")
        texts = [path.read_text() for path in states]
        assert sorted(t for t in texts if t.startswith("state")) == ["state 2", "state 3"]
        assert texts.count("always the same") == 1

    run_with_copy(tmp_path, story)
    shutil.rmtree(tmp_path / "mesh-a")  # the head and its disk
    mesh_paths = MeshPaths(tmp_path / "mesh-b")
    [run_dir] = durable_restore.fetch_runs(make_url(tmp_path), mesh_paths)
    [manifest] = list_manifest_paths(run_dir)
    assert verify_checkpoint(manifest)["step"] == 3
    document = read_json(run_dir / "job.json")["document"]
    bundle = Path(document["bundle"]["dir"])
    assert bundle.is_relative_to(run_dir)
    bundle_files.check_files(bundle, bundle_files.read_file_list(document), read_large=True)

    async def restore_job() -> jobs.JobRow:
        state = open_simulated_state(SystemClock())
        restore = durable_restore.make_pending_restore(mesh_paths)
        assert restore is not None
        await restore(state)
        row = await jobs.read_job(state, JOB)
        await state.close()
        return row

    row = asyncio.run(restore_job())
    assert (row.lineage, row.version, row.checkpoint) == (1, 3, manifest.stem)
    assert row.cursor == 7 and row.run_dir == str(run_dir)
    assert durable_restore.make_pending_restore(mesh_paths) is None  # once


def test_returning_head_stops_copying_after_a_takeover(tmp_path: Path) -> None:
    async def story(bench: CopyBench) -> None:
        await bench.checkpoint(0)
        await bench.wait_for_poll()
        durable_restore.fetch_runs(make_url(tmp_path), MeshPaths(tmp_path / "mesh-b"))
        await bench.checkpoint(1)
        await bench.wait_for_poll()
        assert bench.task.done() and len(bench.copy.list_checkpoints(JOB)) == 1
        assert len(await bench.list_events("durable_taken_over")) == 1
        assert "another mesh has taken over" in bench.copier.stats()["durable_trouble"]
        entries = await registry.list_entries(bench.store.state)
        entry = replace(entries[0], stats=bench.copier.stats())
        assert "another mesh has taken over" in mesh_tables.list_copy_errors([entry])[0]

    run_with_copy(tmp_path, story)
    with pytest.raises(Refused, match="holds the jobs of another mesh"):
        durable_restore.configure_durable_copy(make_url(tmp_path), MeshPaths(tmp_path / "mesh-c"))
    durable_restore.configure_durable_copy(make_url(tmp_path), MeshPaths(tmp_path / "mesh-b"))


def test_ended_jobs_are_not_restored(tmp_path: Path) -> None:
    async def story(bench: CopyBench) -> None:
        await bench.checkpoint(0)
        await jobs.cancel(bench.store.state, JOB, "stop")
        await bench.wait_for_poll()

    run_with_copy(tmp_path, story)
    with pytest.raises(NotFound, match="no unfinished job"):
        durable_restore.fetch_runs(make_url(tmp_path), MeshPaths(tmp_path / "mesh-b"))


@story_on(run_with_copy, "tmp_path")
async def test_unwritable_copy_is_reported_once_and_completed_later(
    bench: CopyBench, tmp_path: Path
) -> None:
    (tmp_path / "copy").write_text("in the way")
    name = await bench.checkpoint(0)
    await bench.store.clock.sleep(200.0)
    assert len(await bench.list_events("durable_failed")) == 1
    assert bench.copier.stats()["durable_errors"] > 2
    (tmp_path / "copy").unlink()
    await bench.store.clock.sleep(MAX_RETRY_S + 5.0)
    assert bench.copy.list_checkpoints(JOB) == [name]
    assert bench.copier.stats()["durable_trouble"] == ""


def test_writes_are_rejected_after_a_takeover_by_another_mesh(tmp_path: Path) -> None:
    """Check that no file is written once another mesh has the copy, not even by a slow copy that
    was requested before.
    """
    ours, theirs = (DurableCopy(make_url(tmp_path), owner) for owner in ("us", "them"))
    assert ours.claim() and not ours.claim()
    ours.write_document("jobs/j/standing.json", {"phase": "training"})
    theirs.take_over()
    for late in (
        lambda: ours.write_document("jobs/j/standing.json", {"phase": "stopped"}),
        lambda: ours.remove_files(["jobs/j/standing.json"]),
        lambda: ours.remove_job("j"),
        ours.claim,
    ):
        with pytest.raises(CopyTakenOver, match="another mesh has taken over"):
            late()
    assert theirs.read_document("jobs/j/standing.json")["phase"] == "training"


@story_on(run_with_copy, "tmp_path")
async def test_copy_is_not_accessed_without_new_data(bench: CopyBench, tmp_path: Path) -> None:
    await bench.checkpoint(0)
    await bench.wait_for_poll()
    # the store detects an unreachable copy only once there is something to copy
    (tmp_path / "copy").rename(tmp_path / "away")
    (tmp_path / "copy").write_text("in the way")
    await bench.store.clock.sleep(20 * POLL_S)
    assert bench.copier.stats()["durable_errors"] == 0
    await bench.checkpoint(1)
    await bench.wait_for_poll()
    assert bench.copier.stats()["durable_errors"] == 1


@story_on(run_with_copy, "tmp_path")
async def test_deleted_job_is_removed_from_the_copy(bench: CopyBench) -> None:
    state = bench.store.state
    await bench.checkpoint(0)
    await jobs.cancel(state, JOB, "stop")
    await bench.wait_for_poll()
    assert bench.copy.list_file_digests(JOB), "an ended job stays as long as its records"
    await deletion.delete_job(state, JOB, "delete")
    await bench.wait_for_poll()
    assert bench.copy.list_jobs() == []


@story_on(run_with_copy, "tmp_path")
async def test_old_jobs_that_ended_before_a_takeover_are_removed(
    bench: CopyBench, tmp_path: Path
) -> None:
    us, month_ago = DurableCopy(make_url(tmp_path), "us"), bench.store.clock.wall() - 30 * DAY_S
    us.claim()
    for job, phase, at in (
        ("old", "finished", month_ago - OLD_JOBS_POLL_S),
        ("newer", "failed", month_ago + OLD_JOBS_POLL_S / 2),
        ("goes on", "training", 0.0),
    ):
        us.write_document(f"jobs/{job}/standing.json", {"phase": phase, "at": at})
    await bench.wait_for_poll()
    assert us.list_jobs() == ["goes on", JOB, "newer"]
    await bench.store.clock.sleep(OLD_JOBS_POLL_S + POLL_S)
    assert us.list_jobs() == ["goes on", JOB]


@story_on(run_with_copy, "tmp_path")
async def test_new_job_has_no_checkpoints_of_an_earlier_job_of_its_name(
    bench: CopyBench, tmp_path: Path
) -> None:
    name = "step-000-000009-aaaaaaaa"
    us = DurableCopy(make_url(tmp_path), "us")
    us.claim()
    us.write_document(f"jobs/{JOB}/checkpoints/{name}.json", {"files": {}})
    await bench.wait_for_poll()
    assert bench.copy.list_checkpoints(JOB) == []
    await bench.checkpoint(0)
    await bench.wait_for_poll()
    assert len(bench.copy.list_checkpoints(JOB)) == 1


@story_on(run_with_copy, "tmp_path")
async def test_job_with_corrupt_files_does_not_block_other_copies(bench: CopyBench) -> None:
    state = bench.store.state
    broken = (await jobs.read_job(state, JOB)).document | {
        "name": "broken",
        "bundle": {"dir": "/gone", "digest": "0", "files": {"modules/a.py": [1, "0" * 64]}},
    }
    await jobs.submit(state, "a-broken", broken, "/gone", "submit it")
    name = await bench.checkpoint(0)
    await bench.store.clock.sleep(100.0)
    assert bench.copy.list_checkpoints(JOB) == [name]
    [event] = await bench.list_events("durable_failed")
    assert "/gone/modules/a.py" in str(event["error"])


def test_corrupt_checkpoint_of_the_copy_is_replaced_by_the_previous_one(tmp_path: Path) -> None:
    async def story(bench: CopyBench) -> None:
        for step in range(2):
            await bench.checkpoint(step)
            await bench.wait_for_poll()

    run_with_copy(tmp_path, story)
    for path in (tmp_path / "copy").rglob("files/*"):
        if path.read_text() == "state 1":
            path.write_text("state 2")
    [run_dir] = durable_restore.fetch_runs(make_url(tmp_path), MeshPaths(tmp_path / "mesh-b"))
    [manifest] = list_manifest_paths(run_dir)
    assert verify_checkpoint(manifest)["step"] == 0


def test_interrupted_upload_is_no_file_of_the_copy(tmp_path: Path) -> None:
    copy, source = DurableCopy(make_url(tmp_path)), tmp_path / "source"
    source.write_bytes(b"whole")
    digest = "0" * 64
    (tmp_path / f"copy/jobs/{JOB}/files").mkdir(parents=True)
    (tmp_path / f"copy/jobs/{JOB}/files/{digest}.part").write_bytes(b"wh")
    assert not copy.list_file_digests(JOB)
    copy.upload(JOB, digest, source)
    assert copy.list_file_digests(JOB) == {digest}
    [stored_file] = (tmp_path / f"copy/jobs/{JOB}/files").iterdir()
    assert stored_file.read_bytes() == b"whole"


def test_incomplete_job_copy_does_not_block_other_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story(bench: CopyBench) -> None:
        await bench.checkpoint(0)
        await bench.wait_for_poll()

    run_with_copy(tmp_path, story)
    (tmp_path / "copy/jobs/begun/files").mkdir(parents=True)
    mesh_paths = MeshPaths(tmp_path / "mesh-b")
    runs = durable_restore.fetch_runs(make_url(tmp_path), mesh_paths)
    assert [run.name for run in runs] == [JOB]
    assert "begun is incomplete in the copy" in capsys.readouterr().out
    assert durable_restore.fetch_runs(make_url(tmp_path), mesh_paths) == runs, (
        "as after an interruption"
    )


@story_on(run_with_copy, "tmp_path")
async def test_checkpoint_may_list_only_its_own_files(bench: CopyBench, tmp_path: Path) -> None:
    secret = tmp_path / "owner.json"
    secret.write_text("secret")
    manifest = await bench.store.stage(0)
    checkpoint_state = await steps.read_checkpoint_state(bench.store.state, JOB)
    store, digest = bench.store.trainer.ref(STORE_NAME), compute_digest(b"secret")
    for name in (str(secret), "state/../../../owner.json", ""):
        checkpoint = Checkpoint(JOB, 0, 0, manifest, checkpoint_state, {name: digest})
        with pytest.raises(BadMessage, match="not a path in a checkpoint"):
            await store.call(Weights.save_checkpoint, checkpoint)
        with pytest.raises(BadMessage, match="not a path in a checkpoint"):
            assembly = CheckpointAssembly(JOB, f"step-000-000000-{manifest[:8]}", {name: digest})
            await store.call(Weights.assemble_checkpoint, assembly)
    assert not list_manifest_paths(bench.store.run_dir)
    path = bench.store.run_dir / f"checkpoints/step-000-000000-{manifest[:8]}.json"
    path.parent.mkdir(exist_ok=True)
    record = {"lineage": 0, "step": 0, "weights": manifest, "files": {str(secret): digest}}
    path.write_bytes(encode_sealed(record))
    with pytest.raises(CorruptData, match="lists no files of a checkpoint"):
        read_manifest(path)


def test_last_checkpoint_is_retained_under_a_delayed_listing(tmp_path: Path) -> None:
    fsspec.register_implementation("behind", DelayedListingFileSystem, clobber=True)

    async def story(bench: CopyBench) -> None:
        for step in range(4):
            name = await bench.checkpoint(step)
            await bench.wait_for_poll()
            assert name in bench.copy.list_checkpoints(JOB)
        assert len(bench.copy.list_checkpoints(JOB)) <= 3, (
            "older checkpoints are removed one poll later"
        )

    run_with_copy(tmp_path, story, kind="behind")
    [run_dir] = durable_restore.fetch_runs(make_url(tmp_path), MeshPaths(tmp_path / "mesh-b"))
    [manifest] = list_manifest_paths(run_dir)
    assert verify_checkpoint(manifest)["step"] == 3


def test_job_with_unlistable_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    async def story(bench: CopyBench) -> None:
        await bench.checkpoint(0)
        await bench.wait_for_poll()

    run_with_copy(tmp_path, story)
    checkpoints = tmp_path / f"copy/jobs/{JOB}/checkpoints"
    checkpoints.rename(tmp_path / "away")
    checkpoints.symlink_to(checkpoints)  # reads there raise an error
    with pytest.raises(MeshError, match="the durable copy cannot be reached"):
        durable_restore.fetch_runs(make_url(tmp_path), MeshPaths(tmp_path / "mesh-b"))


@pytest.mark.parametrize(("job", "file"), [("..", "modules/a.py"), ("j", "../../../../a.py")])
def test_paths_of_a_copy_cannot_escape_the_run_directory(
    tmp_path: Path, job: str, file: str
) -> None:
    copy, mesh_paths = DurableCopy(make_url(tmp_path), "us"), MeshPaths(tmp_path / "mesh-b")
    copy.claim()
    (tmp_path / "a.py").write_text("what somebody else wrote")
    digest = compute_digest(b"what somebody else wrote")
    copy.upload(job, digest, tmp_path / "a.py")
    bundle = {"digest": "b", "files": {file: [1, digest]}}
    folder = f"jobs/{job}"
    copy.write_document(f"{folder}/job.json", {"job": job, "document": {"bundle": bundle}})
    copy.write_document(f"{folder}/standing.json", {"phase": "training", "lineage": 0})
    with pytest.raises(CorruptData, match="is not a path in a checkpoint"):
        durable_restore._fetch_run(copy, job, mesh_paths)
    assert not mesh_paths.root.exists() or not list(mesh_paths.root.rglob("*.py"))


@pytest.mark.deep
@story_on(partial(run_with_copy, stalls=True), "tmp_path")
async def test_hanging_url_is_reported_once(bench: CopyBench) -> None:
    await bench.checkpoint(0)
    await bench.store.clock.sleep(STALL_WARNING_S + 1.0)
    [event] = await bench.list_events("durable_failed")
    assert "no byte has been copied for 15 minutes" in str(event["error"])
    assert str(event["error"]) == bench.copier.stats()["durable_trouble"]
    await bench.store.clock.sleep(20 * STALL_WARNING_S)
    assert len(await bench.list_events("durable_failed")) == 1
    assert bench.copier.stats()["durable_checkpoints"] == 1
    assert bench.copier.stats()["durable_trouble"] == ""
