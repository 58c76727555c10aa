"""One version from one source to 1, 4 and 16 receivers, each on a host of its own whose link is
capped in each direction: how long until the last one has it, and how often it left the source.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from loadtests.measuring.rounds import Arm, ratios, spread, turns
from loadtests.weights.plan import Honest, Plan
from loadtests.weights.scene import Member, Scene, now

CAP = 20_000_000  # bytes a second, of each link in each direction
RATE = "20mbps"  # the same, as of tc
COUNTS = (1, 4, 16)
BEFORE_S = 0.5  # that orders have to reach everybody
SOURCE = 0  # the host


class Fanout:
    """The source and all receivers."""

    def __init__(self, scene: Scene, size: int) -> None:
        self.scene, self.size = scene, size
        self.version = 0

    async def begin(self, count: int) -> None:
        """So many receivers, on hosts 1, 2 and so on."""
        self.store = await self.scene.store(SOURCE)
        self.publisher = await self.scene.publisher(host=SOURCE)
        hosts = range(1, count + 1)
        await self.scene.agents(hosts)
        self.receivers = await self.scene.receivers(list(hosts))
        await asyncio.gather(*(one.ask("ready", size=self.size) for one in self.receivers))

    async def staged(self) -> str:
        """The digest of a new version."""
        await self.publisher.ask("make", size=self.size, seed=self.version)
        found = await self.publisher.ask("stage", version=self.version)
        self.version += 1
        return str(found["digest"])

    async def once(self, receivers: Sequence[Member]) -> Arm:
        """All of these receive a new version at the same time."""
        assert self.scene.links is not None
        digest = await self.staged()
        before, at = self.scene.links.sent(SOURCE), now() + BEFORE_S
        orders = [one.ask("receive", digest=digest, at=at) for one in receivers]
        found = await asyncio.gather(*orders)
        took = max(one["ended"] for one in found) - at
        sent = self.scene.links.sent(SOURCE) - before
        identity = await self.publisher.ask("identity")
        for one in receivers:
            if await one.ask("identity") != identity:
                raise RuntimeError(f"{one.name} has other tensors than were published")
            await one.ask("spoil")
        return {"took_s": took, "copies": sent / self.size}


async def fanout(plan: Plan) -> Arm:
    """`fanout_16_over_4`, `fanout_16_s`, `source_copies_sent`."""
    honest = Honest()
    found: dict[int, list[Arm]] = {count: [] for count in COUNTS}
    most = max(COUNTS)
    async with plan.scene([RATE] * (most + 1)) as scene:
        race = Fanout(scene, plan.fanout)
        await race.begin(most)
        for count in turns(COUNTS, plan.rounds):
            found[count].append(await race.once(race.receivers[:count]))
    took = {count: [one["took_s"] for one in runs] for count, runs in found.items()}
    answer: Arm = {"fanout_mib": plan.fanout >> 20, "fanout_cap_s": round(plan.fanout / CAP, 3)}
    answer |= spread("fanout_16_over_4", ratios(took[16], took[4]))
    for count in COUNTS:
        answer |= spread(f"fanout_{count}_s", took[count])
        copies = [one["copies"] for one in found[count]]
        answer[f"source_copies_sent_{count}"] = round(statistics.median(copies), 3)
    answer["source_copies_sent"] = round(max(one["copies"] for one in found[most]), 3)
    return answer | honest.told(paced=True)
