"""Benchmark of the makespan of a long-tailed step, by the policy that assigns trajectories to
engines.

Two real engines at the pace of a declared accelerator (decoding flat up to 16 sequences), the
product's router, tools with latencies, and trajectories of which a few are ten times longer than
most: which ones shows only in what their tools answer. Policies, each with the same engines, batch
bound and queue discipline:

- ours: C-MLFQ, from the lengths of past trajectories of the same prompts;
- fifo: no buckets, in the order of requests;
- mlfq: buckets by what a trajectory has sampled so far;
- oracle: buckets by what it will still sample.

Every policy runs each round's trajectories once, in changing order. `makespan_ratio_*` is the
other's makespan over ours, the median of rounds; `oracle_agreement` the share of our decisions that
equal the oracle's. `python -m loadtests.routing`
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtests.measuring.entry import flat, options, report
from loadtests.measuring.meshed import meshed
from loadtests.measuring.rounds import ratio, rotated
from meshrl.common.api.engine import SamplingParams
from meshrl.common.mesh.runtime.mesh import Mesh, run_service
from meshrl.common.records.token_records import TokenRows
from meshrl.common.state import registry
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.routing.cmlfq import BucketScheduler
from meshrl.services.rollout.routing.engine_link import EngineSnapshot
from meshrl.services.rollout.routing.length_trees import (
    LengthTrees,
    PastTrajectory,
    ToolReturn,
    classify_tool_return,
)
from meshrl.services.rollout.routing.queue_policy import BucketDecision, LengthBucket, find_bucket
from meshrl.services.rollout.routing.router import Router
from meshrl.services.rollout.trajectories.trajectory import Trajectory, TrajectoryOutcome, Turn

PACE = "6/16/30000"  # ms a decode step, sequences on the plateau, prefill tokens/s
BATCH = 16  # requests that an engine decodes together: the plateau
SEATS = 256  # trajectories whose keys and values it holds
PROMPTS, SAMPLES = 32, 16
PAST = 80  # trajectories of each prompt that were seen before
BORDER = 300  # tokens between the short and the long bucket
ANSWER = 25  # tokens that a tool's answer adds to the context
LOOK_S = 0.25
ATTACH_S = 30.0
ANSWERS = {
    ("small", "success"): "done",
    ("small", "failure"): "error: exit status 1",
    ("large", "success"): "x" * 6000,
    ("large", "failure"): "error: " + "x" * 6000,
}


@dataclass(frozen=True)
class Step:
    tokens: int  # that the model samples
    answer: str = ""  # of the tool; empty: this was the last turn
    latency_s: float = 0.0


@dataclass(frozen=True)
class Script:
    """Script of one trajectory: its samples and its tools' answers, unknown to the policies."""

    prompt: int
    steps: tuple[Step, ...]

    @property
    def sampled(self) -> int:
        return sum(step.tokens for step in self.steps)

    def remaining(self, returns: int) -> int:
        return sum(step.tokens for step in self.steps[returns:])

    def past(self) -> PastTrajectory:
        returns, sampled = [], 0
        for step in self.steps[:-1]:
            sampled += step.tokens
            returns.append((classify_tool_return("run", step.answer), sampled))
        return PastTrajectory(self.prompt, tuple(returns), self.sampled)


def scripts(rng: random.Random, hard: Sequence[bool], samples: int) -> list[Script]:
    """Draw scripts: most have one to four short turns, a few a long debugging session."""

    def turn(log_mean: float, size: str, failed: bool) -> Step:
        answer = ANSWERS[size, "failure" if failed else "success"]
        tokens = max(8, int(rng.lognormvariate(log_mean, 0.5)))
        return Step(tokens, answer, rng.expovariate(1 / 0.15))

    made = []
    for prompt, is_hard in enumerate(hard):
        for _ in range(samples):
            steps = [turn(3.6, "small", rng.random() < 0.15) for _ in range(rng.randint(1, 4))]
            if rng.random() < (0.1 if is_hard else 0.005):
                steps = [turn(3.6, "large", True)]
                for _ in range(rng.randint(10, 20)):
                    size = "large" if rng.random() < 0.5 else "small"
                    steps.append(turn(4.6, size, rng.random() < 0.6))
            steps.append(Step(max(8, int(rng.lognormvariate(3.3, 0.4)))))
            made.append(Script(prompt, tuple(steps)))
    return made


class Fifo(BucketScheduler):
    """Queue with one bucket, in the order of requests."""

    def compute_order(self, trajectory: int, bucket: int) -> tuple[int, ...]:
        return ()


class Mlfq(BucketScheduler):
    """Policy that promotes a trajectory by the tokens that it has sampled so far."""

    def decide_bucket(
        self, trajectory: Trajectory, path: Sequence[ToolReturn], current: int
    ) -> BucketDecision:
        bucket = find_bucket(float((trajectory.versions >= 0).sum()), self.buckets)
        outcome = "already_in_target" if bucket == current else "causal_signal_agree"
        return BucketDecision(outcome, bucket, "by current length")


class Oracle(BucketScheduler):
    """Policy with exact knowledge of the tokens that each trajectory will still sample."""

    def __init__(self, buckets: Sequence[LengthBucket], plan: Sequence[Script]) -> None:
        super().__init__(buckets, LengthTrees())
        self._plan = plan

    def decide_bucket(
        self, trajectory: Trajectory, path: Sequence[ToolReturn], current: int
    ) -> BucketDecision:
        bucket = find_bucket(self._plan[trajectory.group].remaining(len(path)), self.buckets)
        outcome = "already_in_target" if bucket == current else "causal_signal_agree"
        return BucketDecision(outcome, bucket, "by the future")


class Ours(BucketScheduler):
    """C-MLFQ unchanged, compared at each decision with the oracle's choice."""

    def __init__(
        self, buckets: Sequence[LengthBucket], lengths: LengthTrees, plan: Sequence[Script]
    ) -> None:
        super().__init__(buckets, lengths)
        self._plan = plan
        self.agreed: list[bool] = []

    def decide_bucket(
        self, trajectory: Trajectory, path: Sequence[ToolReturn], current: int
    ) -> BucketDecision:
        decision = super().decide_bucket(trajectory, path, current)
        truth = find_bucket(self._plan[trajectory.group].remaining(len(path)), self.buckets)
        self.agreed.append(decision.bucket == truth)
        return decision


class NoLedger:
    """Tokens count at once: what is measured is routing."""

    async def write_tokens(self, rows: TokenRows) -> None:
        return None


async def makespan(
    mesh: Mesh, plan: Sequence[Script], scheduler: BucketScheduler
) -> tuple[float, Router]:
    commits = GroupCommit(mesh, NoLedger())
    router = Router(mesh, commits, SamplingParams([], []), SEATS, scheduler)

    async def poll_engines() -> None:
        while True:
            entries = await registry.list_entries(mesh.state, "engine")
            router.update_engines(
                {e.name: EngineSnapshot.from_entry(e) for e in entries if e.alive}
            )
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(poll_engines())
    try:
        async with asyncio.timeout(ATTACH_S):
            while sum(link.version >= 0 for link in router.links.values()) < 2:
                await asyncio.sleep(0.02)
        began = time.perf_counter()
        await asyncio.gather(*(trajectory(router, i, s) for i, s in enumerate(plan)))
        return time.perf_counter() - began, router
    finally:
        looking.cancel()
        await router.close()
        await commits.close()


async def trajectory(router: Router, index: int, script: Script) -> None:
    t = Trajectory(index, 0, script.prompt, 0, seed=index)
    words = np.random.default_rng(script.prompt).integers(0, 64, 40)
    t.set_prompt(words.tolist())
    async with router.create_assignment(t) as stay:
        for step in script.steps:
            await stay.generate(t.length + step.tokens)
            if step.answer:
                t.open_turn = Turn("", step.tokens, "run", None, step.answer, has_tool_value=True)
                router.on_tool_return(stay)
                await asyncio.sleep(step.latency_s)
                t.append(words[:ANSWER].tolist())
    t.outcome = TrajectoryOutcome("done", 0.0)
    router.scheduler.record_end(t, stay.bucket_state)


async def compare(rounds: int, seed: int, prompts: int, samples: int) -> dict[str, Any]:
    one = [LengthBucket(1 << 30, BATCH)]
    two = [LengthBucket(BORDER, BATCH), LengthBucket(1 << 30, BATCH)]
    spans: dict[str, list[float]] = {name: [] for name in ("ours", "fifo", "mlfq", "oracle")}
    moved: dict[str, list[int]] = {name: [] for name in spans}
    caches: dict[str, list[dict[str, int]]] = {name: [] for name in spans}
    agreed: list[bool] = []
    async with meshed("rollout/job/0") as (mesh, members):
        for name in ("engine/g0", "engine/g1"):
            words = ("--name", name, "--slots", str(SEATS), "--pace", PACE)
            members.start(name, "loadtests.routing.engine", *words)
        await members.ready(mesh, "engine")
        for number in range(rounds):
            rng = random.Random(seed + number)
            hard = [rng.random() < 0.25 for _ in range(prompts)]
            history = [script.past() for script in scripts(rng, hard, PAST)]
            plan = scripts(rng, hard, samples)
            ours = Ours(two, LengthTrees(history), plan)
            policies: dict[str, BucketScheduler] = {
                "ours": ours,
                "fifo": Fifo(one, LengthTrees()),
                "mlfq": Mlfq(two, LengthTrees()),
                "oracle": Oracle(two, plan),
            }
            for name in rotated([*policies], number):
                seconds, router = await makespan(mesh, plan, policies[name])
                spans[name].append(seconds)
                moved[name].append(router.rebalanced_trajectories)
                caches[name].append(dict(router.cache_actions))
            agreed += ours.agreed
    found = figures(spans, agreed, plan, rounds)
    changed = {name: sum(map(Counter, rows), Counter[str]()) for name, rows in caches.items()}
    return flat({**found, "balanced": moved, "changed_engine": changed})


def figures(
    spans: dict[str, list[float]], agreed: list[bool], plan: Sequence[Script], rounds: int
) -> dict[str, Any]:
    lengths = sorted(script.sampled for script in plan)
    return {
        **{
            f"makespan_ratio_{name}": ratio(took, spans["ours"])
            for name, took in spans.items()
            if name != "ours"
        },
        "oracle_agreement": round(sum(agreed) / len(agreed), 3),
        "decisions": len(agreed),
        "makespan_s": {name: [round(s, 2) for s in rows] for name, rows in spans.items()},
        "trajectories": len(plan),
        "tokens_p50_p90_max": [
            lengths[len(lengths) // 2],
            lengths[-len(lengths) // 10],
            lengths[-1],
        ],
        "pace": PACE,
        "batch": BATCH,
        "rounds": rounds,
    }


def main() -> None:
    parser = options(
        __doc__,
        rounds=3,
        seed=0,
        prompts=PROMPTS,
        samples=(SAMPLES, "of each prompt"),
    )
    a = parser.parse_args()

    async def measure() -> None:
        report(await compare(a.rounds, a.seed, a.prompts, a.samples))

    run_service(measure)


if __name__ == "__main__":
    main()
