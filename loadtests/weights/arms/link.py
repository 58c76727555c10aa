"""Arm with a version over a link of 200 Mbit/s, in full and as a delta.

The receiving host has the previous version.

The time is from staged to the receiver's own tensors, with encoding and applying. Each version
differs from the previous one in the same share of its elements, anywhere, whether sent in full or
not. The receiver checks that its tensors are the published ones.
"""

from __future__ import annotations

from loadtests.measuring.metered import HostMeter
from loadtests.measuring.rounds import Arm, ratios, spread, turns
from loadtests.weights.scene import Member, Plan, Scene

RATE = "200mbit"  # as of tc
SHARES = {"3pct": 0.03, "1pct": 0.01}
FULL = "full"
ARMS = (FULL, *SHARES)
SOURCE, TARGET = 0, 1  # hosts


class Link:
    """One publisher and one receiver, with the number of their requests."""

    def __init__(self, scene: Scene, size: int) -> None:
        self.scene, self.size = scene, size
        self.version = -1
        self.publisher: Member
        self.receiver: Member

    async def begin(self) -> None:
        await self.scene.store(SOURCE)
        self.publisher = await self.scene.publisher(host=SOURCE)
        self.receiver = await self.scene.receiver(0, host=TARGET)
        await self.publisher.ask("make", size=self.size)
        await self.receiver.ask("ready", size=self.size)
        await self.once(0.0, deltas=False)

    async def once(self, share: float, deltas: bool) -> float:
        self.version += 1
        await self.publisher.ask("change", share=share, seed=1000 + self.version)
        staged = await self.publisher.ask("stage", version=self.version, deltas=deltas)
        found = await self.receiver.ask("receive", digest=staged["digest"])
        if await self.receiver.ask("identity") != await self.publisher.ask("identity"):
            raise RuntimeError("the receiver has other tensors than were published")
        return float(found["ended"] - staged["staged"])


async def link(plan: Plan) -> Arm:
    honest = HostMeter()
    took: dict[str, list[float]] = {name: [] for name in ARMS}
    async with plan.scene([RATE] * 2) as scene:
        ends = Link(scene, plan.link)
        await ends.begin()
        for name in turns(ARMS, plan.rounds):
            share = SHARES.get(name, SHARES["1pct"])
            took[name].append(await ends.once(share, deltas=name != FULL))
    answer: Arm = {"link_mib": plan.link >> 20}
    for name in SHARES:
        answer |= spread(f"ratio_full_over_delta_{name}", ratios(took[FULL], took[name]))
    return answer | honest.get_validity(paced=True)
