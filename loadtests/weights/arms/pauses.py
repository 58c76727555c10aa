"""Arm with the pause of an engine's tokens while a version is installed under running requests.

It also measures the time until a new engine's first token of the newest version, and a version to
many hosts.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from loadtests.measuring.metered import HostMeter
from loadtests.measuring.rounds import Arm, percentile, ratios, spread, turns
from loadtests.weights.scene import Member, Plan, Scene, now

JOB = "job"
MODEL = "medium"  # 300 MiB in float32: a step takes longer than a flush waits
SMALL = "small"
REQUESTS = 4
SEEDS = (0, 1)  # of versions that follow each other
SETTLE_S = 0.6  # between two versions: several steps
ENGINE = "engine/g0"
OTHERS = (0, 16)  # hosts that pull at the same time
WITHIN_S = 60.0
LOOK_S = 0.02
FACTOR = 1.5  # of putting a version in place that a pause may take, beside a step
CAP = 20_000_000  # bytes a second, of each link in each direction
RATE = "20mbps"  # the same, as of tc
COUNTS = (1, 4, 16)
BEFORE_S = 0.5  # time for orders to reach all processes
SOURCE = 0  # the host


class Fanout:
    def __init__(self, scene: Scene, size: int) -> None:
        self.scene, self.size = scene, size
        self.version = 0

    async def begin(self, count: int) -> None:
        self.store = await self.scene.store(SOURCE)
        self.publisher = await self.scene.publisher(host=SOURCE)
        hosts = range(1, count + 1)
        await self.scene.agents(hosts)
        self.receivers = await self.scene.receivers(list(hosts))
        await asyncio.gather(*(one.ask("ready", size=self.size) for one in self.receivers))

    async def staged(self) -> str:
        await self.publisher.ask("make", size=self.size, seed=self.version)
        found = await self.publisher.ask("stage", version=self.version)
        self.version += 1
        return str(found["digest"])

    async def once(self, receivers: Sequence[Member]) -> Arm:
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
    honest = HostMeter()
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
    return answer | honest.get_validity(paced=True)


async def pauses(plan: Plan) -> Arm:
    honest = HostMeter()
    changed: list[float] = []
    steps: list[float] = []
    async with plan.scene() as scene:
        await scene.store()
        publisher, engine, shard = await asyncio.gather(
            scene.publisher(JOB), scene.engine(0, MODEL), scene.shard()
        )
        await publisher.ask("submit", run_dir=str(scene.directory))
        for version in range(plan.swaps + 1):
            # The weights alternate.
            await committed(publisher, MODEL, version, SEEDS[version % len(SEEDS)])
            if version == 0:
                await engine.ask("begin")
                await shard.ask("attach", engine=ENGINE)
            await reached(engine, version)
            if version % 8 == 0:
                await shard.ask("generates", engine=ENGINE, count=REQUESTS, most=3000)
            await asyncio.sleep(SETTLE_S)
            found = await shard.ask("pauses", engine=ENGINE)
            if version:
                changed += found["changed_ms"]
                steps.append(found["step_ms"])
        put_ms = [1e3 * took for took in await engine.ask("puts", seeds=[*SEEDS] * 3)]
    answer = summarize(changed, statistics.median(steps), statistics.median(put_ms))
    return answer | honest.get_validity()


def summarize(changed_ms: list[float], step_ms: float, put_ms: float) -> Arm:
    p99 = percentile(changed_ms, 0.99)
    return {
        "pause_p50_ms": round(statistics.median(changed_ms), 2),
        "pause_p99_ms": round(p99, 2),
        "engine_step_ms": round(step_ms, 2),
        "put_ms": round(put_ms, 2),
        "pause_p99_over_bound": round(p99 / (step_ms + FACTOR * put_ms), 3),
    }


async def committed(publisher: Member, model: str, version: int, seed: int) -> Arm:
    """Stage and commit a version."""
    await publisher.ask("model", name=model, seed=seed)
    staged = await publisher.ask("stage", version=version)
    found: Arm = await publisher.ask("commit", digest=staged["digest"])
    return found | {"digest": staged["digest"]}


async def reached(engine: Member, version: int) -> None:
    """Wait until an engine computes with a version; TimeoutError."""
    async with asyncio.timeout(WITHIN_S):
        while (await engine.ask("serves"))["version"] < version:
            await asyncio.sleep(LOOK_S)


async def first_token(plan: Plan) -> Arm:
    """Measure `first_token_s`, `first_token_s_16` from a new engine's registration."""
    honest = HostMeter()
    found: dict[int, list[float]] = {count: [] for count in OTHERS}
    rounds = max(1, plan.rounds // 2)
    fresh = rounds * len(OTHERS)  # engines, each of which is new once
    async with plan.scene([RATE] * (max(OTHERS) + 2)) as scene:
        await scene.store()
        publisher, shard = await asyncio.gather(scene.publisher(JOB), scene.shard())
        await scene.agents(range(1, max(OTHERS) + 2))
        receivers = await scene.receivers(list(range(1, max(OTHERS) + 1)), first=fresh)
        await asyncio.gather(*(one.ask("take", model=SMALL) for one in receivers))
        await publisher.ask("submit", run_dir=str(scene.directory))
        version = 0
        for number in range(rounds):
            for count in OTHERS if number % 2 == 0 else OTHERS[::-1]:
                engine = await scene.engine(version, SMALL, host=max(OTHERS) + 1)
                # Weights that no host has received.
                commit = await committed(publisher, SMALL, version, 100 + version)
                at = now() + BEFORE_S
                orders = [
                    asyncio.create_task(one.ask("receive", digest=commit["digest"], at=at))
                    for one in receivers[:count]
                ]
                await asyncio.sleep(max(0.0, at - now()))
                began = await engine.ask("begin")
                name = f"engine/g{version}"
                first = await shard.ask("first_token", engine=name, version=version)
                found[count].append(first - began)
                await asyncio.gather(*orders)
                await engine.kill()
                version += 1
    answer = spread("first_token_s", found[0]) | spread("first_token_s_16", found[16])
    return answer | honest.get_validity(paced=True)
