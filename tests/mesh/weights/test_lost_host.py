"""The store's host is lost, with the home of its runs: engines answer with what they have. Who
trains goes on from memory; one that is lost, too, from the durable copy; and where there is none
the job says what can be done.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.records.durable_copy import DurableCopy, of_job
from meshrl.common.state import jobs
from tests.mesh.weights.training import CORE, JOB, TrainedWeather
from tests.mesh.weights.weather import until, weather

pytestmark = [pytest.mark.timeout(600), pytest.mark.group("weather")]


@pytest.fixture
async def trained() -> AsyncIterator[TrainedWeather]:
    async with weather(TrainedWeather) as found:
        yield found


async def lose_host(trained: TrainedWeather) -> None:
    """The store ends, and all that its host had."""
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
            return bool(copy.read(f"{of_job(JOB)}/standing.json")["checkpoint"] == row.checkpoint)
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
