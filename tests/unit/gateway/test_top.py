"""`meshrl top` with a token: the jobs that came with it, by what the gateway tells of them."""

from __future__ import annotations

from pathlib import Path

from meshrl import Client
from meshrl.common.state import events
from meshrl.run.following.top import TokenOnlooker
from tests.unit.gateway.conftest import House


async def test_its_steps_and_judged_moves_are_seen_with_the_token(house: House, job: Path) -> None:
    onlooker = TokenOnlooker()
    async with Client(token=house.token("alice")) as client:
        assert (await onlooker.look(client)).jobs == ()
        handle = await client.submit(job)
        [before] = (await onlooker.look(client)).jobs
        assert (before.job, before.phase, before.reward) == (handle.name, "queued", None)
        for step in (1, 2):
            metrics = {"reward": step / 4, "wait_s": 1.0, "train_s": 3.0}
            told = {"job": handle.name, "step": step, "metrics": metrics}
            await events.append(house.state, "step", told)
        moved = {"resident": "g1.1", "to": "training", "paid": True}
        for of in (handle.name, "another"):
            await events.append(house.state, "move_judged", {"job": of, **moved})
        for _ in range(2):  # what is heard once counts once
            found = await onlooker.look(client)
            [now] = found.jobs
            assert (now.rewards, now.wait_share) == ((0.25, 0.5), 0.25)
            assert [(m.job, m.gang, m.paid) for m in found.judged] == [(handle.name, "g1", True)]
        await handle.stop()
        assert (await onlooker.look(client)).jobs[0].phase == "stopped"
        await handle.delete()
        assert (await onlooker.look(client)).jobs == ()
