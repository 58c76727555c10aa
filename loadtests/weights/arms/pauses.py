"""How long an engine's tokens pause while a version is put in place, under requests that run, and
how soon a new engine has its first token of the newest version.
"""

from __future__ import annotations

import asyncio
import statistics

from loadtests.measuring.rounds import Arm, percentile, spread
from loadtests.weights.arms.fanout import BEFORE_S, RATE
from loadtests.weights.plan import Honest, Plan
from loadtests.weights.scene import Member, now

JOB = "job"
MODEL = "medium"  # 300 MiB in float32: a step takes longer than a flush waits
SMALL = "small"
REQUESTS = 4
SEEDS = (0, 1)  # of versions that follow each other
SETTLE_S = 0.6  # between two versions: several steps
ENGINE = "engine/g0"
OTHERS = (0, 16)  # that pull meanwhile
WITHIN_S = 60.0
LOOK_S = 0.02
FACTOR = 1.5  # of putting a version in place that a pause may take, beside a step


async def pauses(plan: Plan) -> Arm:
    """`pause_p50_ms`, `pause_p99_ms`, `engine_step_ms`, `put_ms`."""
    honest = Honest()
    changed: list[float] = []
    steps: list[float] = []
    async with plan.scene() as scene:
        await scene.store()
        publisher, engine, shard = await asyncio.gather(
            scene.publisher(JOB), scene.engine(0, MODEL), scene.shard()
        )
        await publisher.ask("submit", run_dir=str(scene.directory))
        for version in range(plan.swaps + 1):
            await committed(publisher, MODEL, version)
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
    answer = told(changed, statistics.median(steps), statistics.median(put_ms))
    return answer | honest.told()


def told(changed_ms: list[float], step_ms: float, put_ms: float) -> Arm:
    """The figures of gaps in which a version changed."""
    p99 = percentile(changed_ms, 0.99)
    return {
        "pause_p50_ms": round(statistics.median(changed_ms), 2),
        "pause_p99_ms": round(p99, 2),
        "pauses": len(changed_ms),
        "engine_step_ms": round(step_ms, 2),
        "put_ms": round(put_ms, 2),
        "pause_p99_over_bound": round(p99 / (step_ms + FACTOR * put_ms), 3),
    }


async def committed(publisher: Member, model: str, version: int) -> Arm:
    """Stages and commits a version; the weights alternate."""
    await publisher.ask("model", name=model, seed=SEEDS[version % len(SEEDS)])
    staged = await publisher.ask("stage", version=version)
    found: Arm = await publisher.ask("commit", digest=staged["digest"])
    return found | {"digest": staged["digest"]}


async def reached(engine: Member, version: int) -> None:
    """Returns once an engine computes with a version; TimeoutError."""
    async with asyncio.timeout(WITHIN_S):
        while (await engine.ask("serves"))["version"] < version:
            await asyncio.sleep(LOOK_S)


async def first_token(plan: Plan) -> Arm:
    """`first_token_s`, `first_token_s_16`: from a new engine's registration."""
    honest = Honest()
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
                commit = await fresh_version(publisher, version)
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
    return answer | honest.told(paced=True)


async def fresh_version(publisher: Member, version: int) -> Arm:
    """Stages and commits weights that nobody has had."""
    await publisher.ask("model", name=SMALL, seed=100 + version)
    staged = await publisher.ask("stage", version=version)
    found: Arm = await publisher.ask("commit", digest=staged["digest"])
    return found | {"digest": staged["digest"]}
