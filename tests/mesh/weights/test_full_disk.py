"""Disks that are full: of who publishes, of who receives."""

from __future__ import annotations

import resource

import pytest

from loadtests.weights.scene import Member
from tests.mesh.weights.weather import Weather

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
NO_CHUNK = 100_000  # bytes, below those of a chunk: no file of this process gets larger
UNLIMITED = resource.RLIM_INFINITY


def full(member: Member, size: int) -> None:
    """As if the disk had room for so many bytes in each file that the process writes."""
    resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (size, UNLIMITED))


@pytest.mark.rotating(3)
async def test_a_trainer_whose_disk_is_full_waits_and_nobody_sees_what_it_began(
    made: Weather,
) -> None:
    await made.begin()
    await made.publisher.ask("model", name="little", seed=1)
    full(made.publisher, NO_CHUNK)
    staging = made.scene.tell(made.publisher, "stage", version=1)
    await made.waits(made.publisher, on="disk")
    assert await made.serves(made.engine) == 0
    full(made.publisher, UNLIMITED)
    staged = await staging
    await made.commit(staged["digest"])
    await made.arrives(made.engine)


@pytest.mark.rotating(3)
async def test_an_engine_whose_disk_is_full_has_the_version_in_memory(made: Weather) -> None:
    await made.begin()
    full(made.engine, NO_CHUNK)
    await made.publish()
    await made.arrives(made.engine)
    full(made.engine, UNLIMITED)
    await made.publish()
    await made.arrives(made.engine)
