"""Training that resumes from the store after the loss of its processes or their host."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.records.durable_copy import DurableCopy, job_folder
from meshrl.common.state import jobs
from tests.mesh.weights.training_bench import CORE, JOB, RANK, WHOLE_SHARE, TrainingBench
from tests.mesh.weights.transfer_bench import open_bench, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.group("weather")]


@pytest.fixture
async def trained() -> AsyncIterator[TrainingBench]:
    async with open_bench(TrainingBench) as found:
        yield found


async def kill_and_restart(trained: TrainingBench, name: str, share: float) -> None:
    """Kill one of the job's processes after it staged this share of a version, and restart it."""
    before = trained.newest
    await trained.release_until_share(share)
    await trained.kill(name)
    assert await trained.read_served_version(trained.engine) == before
    trained.resume_transfer()
    trained.start(name)
    await trained.wait_for_version(trained.engine)
    await trained.release()
    await trained.wait_for_version(trained.engine)


@pytest.mark.deep
async def test_core_killed_during_staging_resumes(trained: TrainingBench) -> None:
    await trained.begin_training()
    for share in (0.01, 0.5, WHOLE_SHARE):
        await kill_and_restart(trained, CORE, share)
    assert (await trained.row()).lineage == 0


@pytest.mark.deep
async def test_rank_killed_during_staging_resumes(trained: TrainingBench) -> None:
    await trained.begin_training(ranks=2)
    for share in (0.01, 0.25, WHOLE_SHARE):
        await kill_and_restart(trained, RANK, share)
    assert (await trained.row()).lineage == 0


@pytest.mark.deep
async def test_core_killed_during_staging_by_a_rank_resumes(trained: TrainingBench) -> None:
    await trained.begin_training(ranks=2)
    await kill_and_restart(trained, CORE, 0.25)
    assert (await trained.row()).lineage == 0


async def lose_host(trained: TrainingBench) -> None:
    """Kill the store and delete all of its host's files."""
    await trained.store.kill()
    for directory in ("store", "run", "mesh"):
        shutil.rmtree(trained.scene.root(0) / directory, ignore_errors=True)


@pytest.mark.rotating(5)
async def test_training_continues_from_memory_after_store_loss(trained: TrainingBench) -> None:
    await trained.begin_training()
    await trained.release()
    await trained.wait_for_version(trained.engine)
    await lose_host(trained)
    assert await trained.read_served_version(trained.engine) == 1
    await trained.restart_store()
    late = await trained.new_engine(host=3)
    await trained.wait_for_version(late)  # once the trainer has written the version again
    await trained.release()
    for engine in (trained.engine, late):
        await trained.wait_for_version(engine)


@pytest.mark.rotating(5)
async def test_lost_store_without_a_copy_fails_the_job_with_a_fix(
    trained: TrainingBench,
) -> None:
    await trained.begin_training()
    await trained.release()
    await trained.wait_for_version(trained.engine)
    await lose_host(trained)
    await trained.kill(CORE)
    await trained.restart_store()
    trained.start(CORE)
    row = await trained.wait_for_row(lambda row: row.phase == jobs.Phase.FAILED)
    assert "no checkpoint of the run is complete" in row.error
    assert "from a copy, and resume; or start over: meshrl run JOB" in row.error
    assert await trained.read_served_version(trained.engine) == 1


@pytest.mark.deep
async def test_job_with_a_durable_copy_resumes_on_another_host(
    trained: TrainingBench, tmp_path: Path
) -> None:
    url = str(tmp_path / "copy")
    await trained.begin_training(url=url, training__checkpoint_every=1)
    for _ in range(2):  # the second one's commit names the checkpoint of the first
        await trained.release()
        await trained.wait_for_version(trained.engine)
    row = await trained.row()
    copy = DurableCopy(url)

    def copied() -> bool:
        with suppress(NotFound):
            return bool(
                copy.read_document(f"{job_folder(JOB)}/standing.json")["checkpoint"]
                == row.checkpoint
            )
        return False

    await until(copied, "the checkpoint is in the copy", trained.within_s)
    await lose_host(trained)
    await trained.kill(CORE)
    assert await trained.read_served_version(trained.engine) == 2
    async with open_bench(TrainingBench) as elsewhere:
        await elsewhere.resume_job(url)
        assert await elsewhere.read_served_version(elsewhere.engine) == elsewhere.newest >= 1
        await elsewhere.release()
        await elsewhere.wait_for_version(elsewhere.engine)
