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
from tests.mesh.weights.training import CORE, JOB, RANK, WHOLE_SHARE, TrainedWeather
from tests.mesh.weights.weather import until, weather

pytestmark = [pytest.mark.timeout(600), pytest.mark.group("weather")]


@pytest.fixture
async def trained() -> AsyncIterator[TrainedWeather]:
    async with weather(TrainedWeather) as found:
        yield found


async def killed_and_started(trained: TrainedWeather, name: str, share: float) -> None:
    """Kill one of the job's processes with so large a share of a version staged."""
    before = trained.newest
    await trained.released_until(share)
    await trained.kill(name)
    assert await trained.serves(trained.engine) == before
    trained.goes_on()
    trained.start(name)
    await trained.arrives(trained.engine)
    await trained.release()
    await trained.arrives(trained.engine)


@pytest.mark.deep
async def test_a_core_that_is_killed_as_it_stages(trained: TrainedWeather) -> None:
    await trained.begin_training()
    for share in (0.01, 0.5, WHOLE_SHARE):
        await killed_and_started(trained, CORE, share)
    assert (await trained.row()).lineage == 0


@pytest.mark.deep
async def test_a_rank_that_is_killed_as_it_stages_its_rows(trained: TrainedWeather) -> None:
    await trained.begin_training(ranks=2)
    for share in (0.01, 0.25, WHOLE_SHARE):
        await killed_and_started(trained, RANK, share)
    assert (await trained.row()).lineage == 0


@pytest.mark.deep
async def test_the_core_of_a_gang_that_is_killed_as_a_rank_stages(trained: TrainedWeather) -> None:
    await trained.begin_training(ranks=2)
    await killed_and_started(trained, CORE, 0.25)
    assert (await trained.row()).lineage == 0


async def lose_host(trained: TrainedWeather) -> None:
    """Kill the store and delete all of its host's files."""
    await trained.store.kill()
    for directory in ("store", "run", "mesh"):
        shutil.rmtree(trained.scene.root(0) / directory, ignore_errors=True)


@pytest.mark.rotating(3)
async def test_who_trains_goes_on_from_memory(trained: TrainedWeather) -> None:
    await trained.begin_training()
    await trained.release()
    await trained.arrives(trained.engine)
    await lose_host(trained)
    assert await trained.serves(trained.engine) == 1
    await trained.again()
    late = await trained.new_engine(host=3)
    await trained.arrives(late)  # once the trainer has written the version again
    await trained.release()
    for engine in (trained.engine, late):
        await trained.arrives(engine)


@pytest.mark.rotating(3)
async def test_without_a_copy_the_job_fails_and_says_what_can_be_done(
    trained: TrainedWeather,
) -> None:
    await trained.begin_training()
    await trained.release()
    await trained.arrives(trained.engine)
    await lose_host(trained)
    await trained.kill(CORE)
    await trained.again()
    trained.start(CORE)
    row = await trained.came(lambda row: row.phase == jobs.Phase.FAILED)
    assert "no checkpoint of the run is whole" in row.error
    assert "from a copy, and resume; or start over: meshrl run JOB" in row.error
    assert await trained.serves(trained.engine) == 1


@pytest.mark.deep
async def test_with_a_durable_copy_it_goes_on_on_another_host(
    trained: TrainedWeather, tmp_path: Path
) -> None:
    url = str(tmp_path / "copy")
    await trained.begin_training(url=url, training__checkpoint_every=1)
    for _ in range(2):  # the second one's commit names the checkpoint of the first
        await trained.release()
        await trained.arrives(trained.engine)
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
    assert await trained.serves(trained.engine) == 2
    async with weather(TrainedWeather) as elsewhere:
        await elsewhere.go_on(url)
        assert await elsewhere.serves(elsewhere.engine) == elsewhere.newest >= 1
        await elsewhere.release()
        await elsewhere.arrives(elsewhere.engine)
