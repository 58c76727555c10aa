"""Sources that stall, and receivers that are slow."""

from __future__ import annotations

import asyncio
import signal

import pytest

from loadtests.weights.scene import Member
from tests.load import scaled
from tests.mesh.weights.weather import LOOK_S, WITHIN_S, Weather, until

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
OTHERS_BYTES_S = 20 << 20
SLOW_BYTES_S = OTHERS_BYTES_S // 100


@pytest.mark.deep
async def test_a_host_that_stalls_as_it_serves_is_left_for_another(made: Weather) -> None:
    await made.begin()
    agent = await made.scene.agent(1)
    await made.publish()
    await made.arrives(made.engine)
    agent.signal(signal.SIGSTOP)  # its kernel takes connections, and nobody answers
    try:
        engine = await made.new_engine(host=3)
        await made.arrives(engine)
    finally:
        agent.signal(signal.SIGCONT)


@pytest.mark.rotating(3)
async def test_a_store_that_stalls_in_the_middle_is_left_for_a_host_that_has_it(
    made: Weather,
) -> None:
    await made.begin()
    await made.scene.agent(1)
    await made.publish()
    await made.arrives(made.engine)
    made.stand(0.0)  # the store's bulk port carries nothing more; its other one does
    engine = await made.new_engine(host=3)
    await made.arrives(engine)


@pytest.mark.deep
async def test_a_receiver_at_a_hundredth_of_the_others_pace_holds_nobody_up(made: Weather) -> None:
    await made.begin()
    made.scene.settings(3, rate_down=int(SLOW_BYTES_S / scaled(1.0)))  # of what others do here
    slow = await made.new_engine(host=3)
    made.scene.settings(4, rate_down=OTHERS_BYTES_S)
    other = await made.new_engine(host=4)
    await made.arrives(other)
    await made.publish()
    await asyncio.gather(*(until_served(made, engine) for engine in (made.engine, other)))
    assert await made.serves(slow) == -1  # a version takes it most of a minute
    chunks = made.scene.root(3) / "chunks"

    def has_some() -> bool:
        return any(part.is_file() and part.stat().st_size for part in chunks.rglob("*"))

    await until(has_some, "the slow one has a part")


async def until_served(made: Weather, engine: Member) -> None:
    """Returns once the engine has the newest version, whatever it says meanwhile."""
    async with asyncio.timeout(scaled(WITHIN_S)):
        while (await engine.ask("serves"))["version"] < len(made.seeds) - 1:
            await asyncio.sleep(LOOK_S)
