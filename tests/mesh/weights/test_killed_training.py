"""A trainer of the product, or a rank of it, that is killed while it publishes a version: engines
answer with the one before, whole, and get the next one once it is there again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.mesh.weights.training import CORE, RANK, WHOLE_SHARE, TrainedWeather
from tests.mesh.weights.weather import weather

pytestmark = [pytest.mark.timeout(600), pytest.mark.group("weather")]


@pytest.fixture
async def trained() -> AsyncIterator[TrainedWeather]:
    async with weather(TrainedWeather) as found:
        yield found


async def killed_and_started(trained: TrainedWeather, name: str, share: float) -> None:
    """One of its processes is killed with so large a share of a version staged."""
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
