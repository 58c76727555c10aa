"""Two trainers of one job: the one that was replaced changes nothing, whenever it wakes."""

from __future__ import annotations

import signal

import pytest

from tests.mesh.weights.weather import MODEL, Weather

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]
OTHER = 70  # seed of what the successor publishes


@pytest.mark.rotating(3)
async def test_a_trainer_that_was_replaced_commits_nothing(made: Weather) -> None:
    await made.begin()
    first = made.publisher
    await first.ask("model", name=MODEL, seed=1)
    staged = (await first.ask("stage", version=1))["digest"]
    first.signal(signal.SIGSTOP)
    second = await made.scene.publisher()
    await second.ask("resume", step=0)
    digest = await made.stage(OTHER, second)
    await made.commit(digest, OTHER, second)
    first.signal(signal.SIGCONT)
    late = await made.scene.tell(first, "commit", digest=staged)
    assert isinstance(late, Exception), late  # refused, or it has ended as it woke
    assert getattr(late, "code", "lost") in ("fenced", "lost", "refused"), late
    await made.arrives(made.engine)
    made.publisher = second
    await made.publish()
    await made.arrives(made.engine)
