"""Restore of a trainer from real checkpoint files.

Training resumes from the last checkpoint or the one before it, or fails with a named error.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtests.weights.contents import staged_whole
from meshrl.common.api.weights import STORE_NAME, ManifestRequest, Weights
from meshrl.common.base.errors import ConfigError, CorruptData
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, LoraConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.records.checkpoints import (
    STATE_FOLDER,
    list_manifest_paths,
    read_manifest,
    verify_checkpoint,
)
from meshrl.common.state import events, steps
from meshrl.common.state.pool.demand.planned_jobs import ProcessStats, build_planned_job
from meshrl.common.state.registry import SNAPSHOT_STATS
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.initialization.initial_weights import add_adapters, create_learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.rows.row_filling import make_row_filler
from meshrl.services.trainer.rows.saved_rows import SavedRows
from meshrl.services.trainer.versions.checkpointing import CheckpointWriter
from meshrl.services.trainer.versions.publishing import VersionIdentity, VersionPublisher
from meshrl.services.trainer.versions.restoring import CheckpointRestorer
from meshrl.sim.mesh.job.job_setup import build_config, write_job
from meshrl.sim.mesh.job.vector_arithmetic import MODEL_CONFIG
from tests.stories import story_on
from tests.unit.common.base.files.harms import HARMS, Harm, delete
from tests.unit.weights.store_bench import JOB, StoreBench, on_store


class TrainedJob:
    """Job with two checkpoints and the trainer that wrote them."""

    def __init__(self, store: StoreBench, config: JobConfig, away: bool = False) -> None:
        """Create the job; with `away`, its trainer's host has no access to the run directory."""
        self.store = store
        config = replace(config, name=JOB)
        self.data = JobData.from_document(JOB, write_job(config, store.root), str(store.root))
        if away:
            self.data = self.data.for_remote_host(self.data.bundle, store.root / "away")
        self.learner = create_learner(self.data)
        add_adapters(self.data, self.learner)
        self.open()
        self.names: list[str] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.manifests: list[str] = []

    def resume(self, config: JobConfig) -> None:
        """Resume the job under a changed configuration, as another start of its trainer."""
        self.data = replace(self.data, config=replace(config, name=JOB))
        self.open()

    def open(self) -> None:
        store, mesh, enter = self.store, self.store.trainer, lambda phase, step: None
        compute = GangCompute(mesh, JOB, Rank.for_single_rank(self.learner))
        shape = ModelConfig.from_hf(MODEL_CONFIG)
        self.publisher = VersionPublisher(mesh, self.data, compute)
        self.checkpoints = CheckpointWriter(mesh, self.data, compute, shape, self.publisher, enter)
        self.restoring = CheckpointRestorer(mesh, store.bulk, self.data, compute, enter)

    async def begin(self) -> None:
        await self.store.submit()
        for step in (0, 1):
            await self.checkpoint(step)

    async def checkpoint(self, step: int, max_chunk_bytes: int = 0) -> None:
        """Write a checkpoint whose weights and state identify its step, in chunks of at most
        `max_chunk_bytes`.
        """
        torch.manual_seed(step)
        gradient = torch.randn(self.learner.parameter_count)
        self.learner.apply_gradient(gradient, 1.0, 1.0)
        weights, state = self.learner.copy_weights(), self.store.state
        before = self.manifests[-1] if self.manifests else ""
        if max_chunk_bytes:
            about = self.store.trainer, self.store.bulk, JOB, 0, step, weights
            manifest = await staged_whole(*about, most=max_chunk_bytes)
        else:
            manifest = (await self.publisher.stage_version(0, step, before)).digest
        account: dict[str, Any] = {"version": step}
        await self.checkpoints.begin_checkpoint(0, step, VersionIdentity(manifest), account)
        await self.checkpoints.wait_until_written(required=True)
        name, token = self.checkpoints.last_name, self.store.trainer.token
        if step == 0:
            trainer = self.store.trainer.name
            await steps.commit_initial(
                state, JOB, trainer, token, 0, steps.VersionReferences(manifest, name)
            )
        else:
            await self.store.commit(step, manifest, name)
        self.names.append(name)
        self.weights.append(weights)
        self.manifests.append(manifest)

    async def restore(self) -> int:
        """Restore, and return the step that the run resumes from; check the learner's weights and
        state.
        """
        name, checkpoint = await self.restoring.restore_newest(self.names[-1])
        number = self.names.index(name)
        found = self.learner.copy_weights()
        assert all(torch.equal(found[key], self.weights[number][key]) for key in found)
        assert self.learner.steps == number + 1 and checkpoint.step == number
        return number

    def manifest(self, number: int) -> Path:
        return self.store.run_dir / f"checkpoints/{self.names[number]}.json"

    def state(self, number: int) -> Path:
        (file,) = (self.manifest(number).with_suffix("") / STATE_FOLDER).glob("*.safetensors")
        return file

    def model(self, number: int) -> Path:
        return self.manifest(number).with_suffix("") / "model.safetensors"

    async def chunks(self, number: int) -> list[Path]:
        """Return the files of the manifest of a version's weights and of their chunks."""
        manifest_request = ManifestRequest(self.manifests[number])
        retained = await self.store.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, manifest_request
        )
        names = dict.fromkeys(
            [manifest_request.digest, *(tensor.chunk for tensor in retained.tensors)]
        )
        return [self.store.chunks.chunk_path(name) for name in names]

    async def read_events(self) -> list[dict[str, Any]]:
        found = await events.read_all(self.store.state)
        return [event.fields for event in found if event.kind == "damaged"]


def run_with_trained_job(
    root: Path,
    story: Callable[[TrainedJob], Awaitable[None]],
    config: JobConfig | None = None,
    away: bool = False,
) -> None:
    async def on(store: StoreBench) -> None:
        asyncio.get_running_loop().limit = 1e6  # type: ignore[attr-defined]
        bench = TrainedJob(store, config or build_config(1, 1, 1, 9), away)
        await bench.begin()
        await story(bench)

    on_store(root, on)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("corrupt", HARMS, ids=lambda corrupt: corrupt.__name__)
@pytest.mark.parametrize("which", ["manifest", "state"])
@story_on(run_with_trained_job, "tmp_path")
async def test_previous_checkpoint_replaces_a_corrupt_one(
    bench: TrainedJob, which: str, corrupt: Harm
) -> None:
    assert await bench.restore() == 1
    path = getattr(bench, which)
    corrupt(path(1), path(0).read_bytes())
    assert await bench.restore() == 0
    [one] = await bench.read_events()
    assert one["what"] == "checkpoint" and bench.names[1] in one["path"]
    assert bench.names[0] in one["then"]
    retained_files = bench.store.run_dir / "quarantine/checkpoints"
    assert (retained_files / bench.names[1] / STATE_FOLDER).is_dir()
    assert (retained_files / f"{bench.names[1]}.json").is_file() or (which, corrupt) == (
        "manifest",
        delete,
    )
    assert not bench.manifest(1).exists() and not bench.manifest(1).with_suffix("").exists()


@pytest.mark.parametrize("corrupt", HARMS, ids=lambda corrupt: corrupt.__name__)
@story_on(run_with_trained_job, "tmp_path")
async def test_corrupt_weights_in_the_store_are_restaged(bench: TrainedJob, corrupt: Harm) -> None:
    for path in await bench.chunks(1):
        corrupt(path, b"of another")
    await bench.store.restart_store()  # it caches manifests
    assert await bench.restore() == 1
    assert await bench.store.is_stored(bench.manifests[1])
    assert all("rewritten from" in one["then"] for one in (await bench.read_events())[-1:])


def test_corrupt_adapters_and_their_base_are_restaged(tmp_path: Path) -> None:
    async def story(bench: TrainedJob) -> None:
        chunks = await bench.chunks(1)
        assert len(chunks) == 3, "the manifest, the base and the adapters"
        for path in chunks:
            path.unlink()
        await bench.store.restart_store()
        assert await bench.restore() == 1
        assert await bench.store.is_stored(bench.manifests[1])

    run_with_trained_job(
        tmp_path, story, replace(build_config(1, 1, 1, 9), lora=LoraConfig(rank=2))
    )


@story_on(run_with_trained_job, "tmp_path")
async def test_job_without_a_valid_checkpoint_fails_by_name(bench: TrainedJob) -> None:
    for path in await bench.chunks(1):
        path.unlink()
    HARMS[0](bench.model(1), b"")
    await bench.store.restart_store()
    assert await bench.restore() == 0
    state = bench.state(0)
    HARMS[0](state, b"")
    with pytest.raises(ConfigError, match="no checkpoint of the run is complete") as read_events:
        await bench.restoring.restore_newest(bench.names[0])
    assert str(state) in str(read_events.value) and "quarantine" in read_events.value.fix
    assert "the job fails" in (await bench.read_events())[-1]["then"]


@story_on(run_with_trained_job, "tmp_path")
async def test_older_checkpoint_without_manifest_is_quarantined(
    bench: TrainedJob, tmp_path: Path
) -> None:
    bench.manifest(0).unlink()
    directory = bench.manifest(0).parent
    unfinished = [directory / f"{bench.names[0]}.cut", directory / "step-000-000009-00000000"]
    for path in unfinished:
        path.mkdir()
    await bench.checkpoints.clear_unfinished(bench.names[1])
    quarantined_path = tmp_path / "quarantine/checkpoints" / bench.names[0]
    assert (quarantined_path / "model.safetensors").is_file() and bench.model(1).is_file()
    assert [one["aside"] for one in await bench.read_events()] == [str(quarantined_path)]
    assert not any(path.exists() for path in unfinished)


@pytest.mark.parametrize("adapters", [0, 2])
def test_training_resumes_from_float32_masters(tmp_path: Path, adapters: int) -> None:
    """Compare bit by bit with `restore`."""

    async def story(bench: TrainedJob) -> None:
        manifest_request = ManifestRequest(bench.manifests[1])
        retained = await bench.store.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, manifest_request
        )
        assert {tensor.dtype for tensor in retained.tensors} == {"BF16"}
        assert await bench.restore() == 1
        for path in await bench.chunks(1):  # the restore needs none of them
            path.unlink()
        await bench.store.restart_store()
        assert await bench.restore() == 1
        assert await bench.store.is_stored(bench.manifests[1]), "engines need them"

    config = build_config(1, 1, 1, 9)
    half = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
    run_with_trained_job(tmp_path, story, replace(half, lora=LoraConfig(rank=adapters)))


@pytest.mark.parametrize("which", range(3), ids=["manifest", "base", "adapters"])
def test_missing_weights_are_restaged_with_float32_masters(tmp_path: Path, which: int) -> None:
    async def story(bench: TrainedJob) -> None:
        lost = (await bench.chunks(1))[which]
        lost.unlink()
        assert await bench.restore() == 1
        assert lost.exists()

    config = build_config(1, 1, 1, 9)
    half = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
    run_with_trained_job(tmp_path, story, replace(half, lora=LoraConfig(rank=2)))


@story_on(run_with_trained_job, "tmp_path")
async def test_previous_checkpoint_replaces_an_unreadable_model(bench: TrainedJob) -> None:
    """Check the fallback to the previous checkpoint. The model's weights are not numbers any more,
    and the store has lost them.
    """
    next(iter(bench.learner.get_weights().values())).detach().fill_(float("nan"))
    await bench.checkpoint(2)
    for path in await bench.chunks(2):
        path.unlink(missing_ok=True)
    await bench.store.restart_store()
    assert await bench.restore() == 1


def predict_hybrids(bench: TrainedJob, config: JobConfig) -> bool:
    """Return whether the planner would place hybrids, given what the core publishes."""
    assert "published" in SNAPSHOT_STATS, "it is read of stats"
    process_stats = ProcessStats(
        "core", "trainer", "1", {"published": bench.publisher.published_dtypes}
    )
    row = {"id": JOB, "phase": "training", "groups_per_step": 1, "submitted_ms": 0}
    row |= {"steps_done": 0, "block_reason": "", "checkpoint": "", "stale_requeued": 0}
    return build_planned_job(row, config.to_document(), [process_stats]).requirements.allows_hybrids


def test_changed_publish_dtype_of_adapters_keeps_the_base(tmp_path: Path) -> None:
    """Check adapters in float32 on a base that was published in bfloat16."""
    wide = replace(build_config(1, 1, 1, 9), lora=LoraConfig(rank=2))
    half = replace(wide, rollout=replace(wide.rollout, dtype="bfloat16"))

    async def story(bench: TrainedJob) -> None:
        assert "bfloat16" in bench.publisher.hybrid_rejection and not predict_hybrids(bench, half)
        bench.resume(wide)
        assert not bench.publisher.hybrid_rejection, "nobody has looked"
        assert predict_hybrids(bench, wide)
        await bench.publisher.load_version(bench.manifests[1])
        assert "bfloat16" in bench.publisher.hybrid_rejection
        assert not predict_hybrids(bench, wide), "the planner does as the core says"
        await bench.checkpoint(2)
        manifest_request = ManifestRequest(bench.manifests[2])
        retained = await bench.store.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, manifest_request
        )
        assert {tensor.dtype for tensor in retained.tensors} == {"BF16", "F32"}
        assert "bfloat16" in bench.publisher.hybrid_rejection
        assert await bench.restore() == 2

    run_with_trained_job(tmp_path, story, half)


def test_changed_publish_dtype_stages_a_complete_model(tmp_path: Path) -> None:
    wide = build_config(1, 1, 1, 9)
    half = replace(wide, rollout=replace(wide.rollout, dtype="bfloat16"))

    async def story(bench: TrainedJob) -> None:
        bench.resume(wide)
        await bench.publisher.load_version(bench.manifests[1])
        assert bench.publisher.has_narrow_dtypes and bench.publisher.hybrid_rejection, (
            "that version is in bfloat16"
        )
        await bench.checkpoint(2)
        assert not bench.publisher.has_narrow_dtypes and not bench.publisher.hybrid_rejection
        assert await bench.restore() == 2

    run_with_trained_job(tmp_path, story, half)


def test_missing_masters_are_not_restored_from_bfloat16(tmp_path: Path) -> None:
    half = build_config(1, 1, 1, 9)
    half = replace(half, rollout=replace(half.rollout, dtype="bfloat16"))

    async def story(bench: TrainedJob) -> None:
        own, empty = (
            bench.learner.get_rows(bench.learner.get_weights()),
            SavedRows(tmp_path / "nothing"),
        )
        about = bench.store.trainer, bench.store.bulk, bench.manifests[1]
        with pytest.raises(CorruptData, match="masters were not saved"):
            await make_row_filler(*about, empty, own)

    run_with_trained_job(tmp_path, story, half)


def test_base_with_another_layout_is_restaged_from_a_checkpoint(tmp_path: Path) -> None:
    async def story(bench: TrainedJob) -> None:
        await bench.checkpoint(2, max_chunk_bytes=64)
        await bench.checkpoint(3)
        lost = set(await bench.chunks(3)) & set(await bench.chunks(2))
        assert len(lost) > 3, "of the base"
        next(iter(lost)).unlink()
        await bench.store.restart_store()
        assert not await bench.publisher.restage_version(0, 3, bench.manifests[3])
        assert await bench.restoring.repair_version(bench.names[3], bench.manifests[3])
        assert await bench.store.is_stored(bench.manifests[3])

    run_with_trained_job(
        tmp_path, story, replace(build_config(1, 1, 1, 9), lora=LoraConfig(rank=2))
    )


def read_normalized(path: Path) -> Any:
    """Return a file's content for comparison bit by bit.

    The safetensors library writes its header in any order, and so a manifest has other digests each
    time.
    """
    retained = path.read_bytes()
    if path.suffix == ".safetensors":
        data = 8 + int.from_bytes(retained[:8], "little")
        return json.loads(retained[8:data]), retained[data:]
    if path.name.startswith("step-"):
        read_events = read_manifest(path)
        return read_events | {"files": list(read_events["files"])}
    return retained


def read_checkpoint_files(root: Path, away: bool) -> dict[str, Any]:
    """Return every file below `checkpoints` of a run host, by its path there."""
    found: dict[str, Any] = {}
    root.mkdir()

    async def story(bench: TrainedJob) -> None:
        home = bench.store.run_dir / "checkpoints"
        for path in home.rglob("*"):
            if path.is_file():
                name = path.relative_to(home).as_posix()
                found[name] = read_normalized(path)
        assert [
            verify_checkpoint(path)["step"] for path in list_manifest_paths(bench.store.run_dir)
        ] == [0, 1]

    run_with_trained_job(
        root, story, replace(build_config(1, 1, 1, 9), lora=LoraConfig(rank=2)), away
    )
    shutil.rmtree(root)  # equal paths in both runs, because PEFT's settings contain them
    return found


def test_checkpoint_bits_do_not_depend_on_the_writing_host(tmp_path: Path) -> None:
    at_home, away = (
        read_checkpoint_files(tmp_path / "run", False),
        read_checkpoint_files(tmp_path / "run", True),
    )
    assert at_home.keys() == away.keys() and len(at_home) > 8
    assert [name for name in at_home if at_home[name] != away[name]] == []


@story_on(partial(run_with_trained_job, away=True), "tmp_path")
async def test_fetched_checkpoint_is_removed_after_the_restore(
    bench: TrainedJob, tmp_path: Path
) -> None:
    assert await bench.restore() == 1
    assert not [path for path in (tmp_path / "away").rglob("*") if path.is_file()]


@story_on(partial(run_with_trained_job, away=True), "tmp_path")
async def test_checkpoint_fetched_by_a_killed_process_is_removed(bench: TrainedJob) -> None:
    name = bench.store.trainer.name.replace("/", "-")
    killed, other = (
        bench.data.local_run_dir / "restored" / of / "0123456789abcdef-step"
        for of in (name, "another")
    )
    for copy in (killed, other):
        copy.mkdir(parents=True)
        (copy / "part").write_bytes(b"rows")
    assert await bench.restore() == 1
    assert not killed.exists() and (other / "part").is_file()


@story_on(partial(run_with_trained_job, away=True), "tmp_path")
async def test_corrupt_checkpoint_on_the_run_host_is_quarantined_there(bench: TrainedJob) -> None:
    bench.store.age(5 * 3600.0)  # its staged part is gone
    await bench.store.store.sweeper.sweep()
    HARMS[0](bench.state(1), b"")
    assert await bench.restore() == 0
    read_events = await bench.read_events()
    assert read_events[-1]["what"] == "checkpoint" and bench.names[0] in read_events[-1]["then"]
    assert (bench.store.run_dir / "quarantine/checkpoints" / bench.names[1] / STATE_FOLDER).is_dir()


@pytest.mark.parametrize(
    "lost", [slice(2), slice(1), slice(1, 2)], ids=["both", "manifest", "chunk"]
)
@story_on(partial(run_with_trained_job, away=True), "tmp_path")
async def test_weights_are_restaged_from_the_model_on_the_run_host(
    bench: TrainedJob, tmp_path: Path, lost: slice
) -> None:
    """Check that lost weights are staged again from the run host's model. The manifest and its one
    chunk are lost; the needed files of the checkpoint stay.
    """
    chunks = await bench.chunks(1)
    assert len(chunks) == 2
    for path in chunks[lost]:
        path.unlink()
    await bench.store.restart_store()
    assert await bench.restore() == 1
    assert await bench.store.is_stored(bench.manifests[1])
    assert {one["what"] for one in await bench.read_events()} <= {"weights"}, "no checkpoint is"
    assert not [path for path in (tmp_path / "away").rglob("*") if path.is_file()]


@story_on(partial(run_with_trained_job, away=True), "tmp_path")
async def test_unfinished_files_of_an_earlier_start_are_removed_on_both_hosts(
    bench: TrainedJob,
) -> None:
    home, here = bench.store.run_dir / "checkpoints", bench.data.local_run_dir / "checkpoints"
    unfinished_dirs = [home / f"{bench.names[1]}.laying", here / f"{bench.names[1]}.cut"]
    for path in unfinished_dirs:
        path.mkdir(parents=True)
    await bench.checkpoints.clear_unfinished(bench.names[1])
    assert not any(path.exists() for path in unfinished_dirs)
    assert bench.model(0).is_file() and bench.model(1).is_file()
