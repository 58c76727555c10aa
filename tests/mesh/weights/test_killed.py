"""Processes that are killed while a version is on its way, at any byte: an engine answers with a
whole version at every moment, and gets the next one.
"""

from __future__ import annotations

import pytest

from tests.mesh.weights.weather import ENDLESS, MODEL, WHOLE, Weather

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
ANYWHERE = pytest.mark.parametrize("share", [0.01, 0.5, 0.95])


@pytest.mark.rotating(3)
@ANYWHERE
async def test_a_store_that_is_killed_as_it_sends(made: Weather, share: float) -> None:
    await made.begin()
    made.stand(share)
    await made.publish()
    await made.stands()
    assert await made.serves(made.engine) == 0
    await made.store.kill()
    made.goes_on()  # so that the kernel's word that it is gone comes through
    assert await made.serves(made.engine) == 0
    await made.again()
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
@ANYWHERE
async def test_an_engine_that_is_killed_as_it_receives(made: Weather, share: float) -> None:
    await made.begin()
    made.stand(share)
    await made.publish()
    await made.stands()
    await made.engine.kill()
    made.goes_on()
    await made.arrives(await made.new_engine())


@pytest.mark.rotating(3)
@ANYWHERE
async def test_a_trainer_that_is_killed_as_it_stages(made: Weather, share: float) -> None:
    await made.begin(far=True)
    made.stand(share)
    await made.publisher.ask("model", name=MODEL, seed=1)
    staging = made.scene.tell(made.publisher, "stage", version=1)
    await made.stands()
    await made.publisher.kill()
    await staging
    made.goes_on()
    assert await made.serves(made.engine) == 0
    made.publisher = await made.scene.publisher(host=2)
    await made.publisher.ask("resume", step=0)
    await made.publish()
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
async def test_a_host_that_is_killed_as_it_serves_is_left_for_another(made: Weather) -> None:
    await made.begin()
    first, road = await made.agent_on_a_road(1)
    _, other = await made.agent_on_a_road(2)
    beside = await made.new_engine(host=2)
    await made.publish()
    for engine in (made.engine, beside):
        await made.arrives(engine)
    made.stand(0.0)  # the store gives nothing any more
    made.stand(0.0, other)
    made.stand(0.5, road)
    engine = await made.new_engine(host=3)
    await made.stands(road)
    await first.kill()
    assert await made.serves(engine) == -1
    road.stands_at = other.stands_at = ENDLESS
    given, before = other.carried, made.road.carried
    await made.arrives(engine)
    assert other.carried - given > 0.3 * WHOLE > made.road.carried - before
