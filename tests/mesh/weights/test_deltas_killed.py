"""Processes that are killed while a version is on its way as a delta: the receiver has a whole
version or none, and gets the next one, as a delta again.
"""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.weights.scene import Member, OrderFailed
from tests.mesh.weights.weather import Weather

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
SIZE = 8 << 20  # chunks of 1 MiB, whose deltas lie in one blob
SHARE = 0.05  # of the elements that change from a version to the next
MOST = SHARE * 2.5 * SIZE  # bytes of a delta, with whatever is said around it


class Versions:
    """Versions that differ in little from each other, on their way to one receiver."""

    def __init__(self, made: Weather) -> None:
        self.made, self.count = made, 0

    async def begin(self) -> None:
        """The receiver has the first."""
        made = self.made
        made.store, made.road = await made.on_a_road("weights", 0, "meshrl.services.weights")
        self.publisher = await made.scene.publisher()
        await self.publisher.ask("make", size=SIZE)
        self.receiver = await self.new_receiver(0)
        assert await self.carried(self.receiver, await self.staged(self.publisher)) > SIZE

    async def new_receiver(self, number: int) -> Member:
        receiver = await self.made.scene.receiver(number, host=1)
        await receiver.ask("ready", size=SIZE)
        return receiver

    async def staged(self, publisher: Member) -> str:
        """The next version, of which deltas are being made."""
        await publisher.ask("change", share=SHARE, seed=self.count)
        told: dict[str, Any] = await publisher.ask("stage", version=self.count, deltas=True)
        self.identity = await publisher.ask("identity")
        self.count += 1
        return str(told["digest"])

    async def carried(self, receiver: Member, digest: str) -> int:
        """Bytes that came for a version, once the receiver has it whole."""
        before = self.made.road.carried
        await receiver.ask("receive", digest=digest)
        assert await receiver.ask("identity") == self.identity
        return self.made.road.carried - before

    async def in_the_middle(self, digest: str) -> Any:
        """The order to receive a version, once half of its delta has come."""
        road = self.made.road
        road.stands_at = road.carried + int(SHARE * SIZE)
        order = self.made.scene.tell(self.receiver, "receive", digest=digest)
        await self.made.stands()
        return order


@pytest.fixture
async def versions(made: Weather) -> Versions:
    found = Versions(made)
    await found.begin()
    return found


@pytest.mark.rotating(3)
async def test_who_makes_deltas_is_killed(versions: Versions) -> None:
    digest = await versions.staged(versions.publisher)
    await versions.publisher.kill()
    await versions.carried(versions.receiver, digest)
    again = await versions.made.scene.publisher()
    await again.ask("make", size=SIZE)
    for seed in range(versions.count):
        await again.ask("change", share=SHARE, seed=seed)
    assert await versions.carried(versions.receiver, await versions.staged(again)) < MOST


@pytest.mark.rotating(3)
async def test_who_receives_is_killed(versions: Versions) -> None:
    digest = await versions.staged(versions.publisher)
    order = await versions.in_the_middle(digest)
    await versions.receiver.kill()
    versions.made.goes_on()
    assert isinstance(await order, RuntimeError)
    receiver = await versions.new_receiver(1)
    assert await versions.carried(receiver, digest) < MOST
    digest = await versions.staged(versions.publisher)
    assert await versions.carried(receiver, digest) < MOST


@pytest.mark.deep
async def test_the_store_is_killed(versions: Versions) -> None:
    digest = await versions.staged(versions.publisher)
    order = await versions.in_the_middle(digest)
    await versions.made.store.kill()
    versions.made.goes_on()
    await versions.made.again()
    assert not isinstance(await order, OrderFailed | RuntimeError)
    assert await versions.receiver.ask("identity") == versions.identity
    await versions.carried(versions.receiver, await versions.staged(versions.publisher))
    after = await versions.staged(versions.publisher)
    await versions.receiver.ask("receive", digest=after)
    assert await versions.receiver.ask("identity") == versions.identity
