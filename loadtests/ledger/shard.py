r"""Rollout shard under the load of `loadtests.ledger`: router, links, group commit and ledger of a
real job.

Usage:

    python -m loadtests.ledger.shard load --engines 64 --trajectories 2000 --warm 15 \
        --seconds 45
    python -m loadtests.ledger.shard greedy --engines 3 --trajectories 64 --seconds 120

Prints `ready` when all is in flight, and its figures as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.ledger.traffic import (
    GREEDY_NEW,
    GREEDY_PROMPT,
    MAX_TOKENS,
    SLOTS,
    STOP,
    Traffic,
    greedy_prompt,
)
from loadtests.measuring.entry import options
from loadtests.measuring.processes import cpu_s
from meshrl.common.api.engine import FinishReason, SamplingParams
from meshrl.common.base.errors import MeshError, ToolFailed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.records.ledger import RecordKind, iter_records, make_trajectory_id
from meshrl.common.records.token_records import TokenRows
from meshrl.common.state import jobs, registry
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.record.shard_ledger import ShardLedger
from meshrl.services.rollout.routing.assignment import Assignment
from meshrl.services.rollout.routing.engine_link import EngineSnapshot
from meshrl.services.rollout.routing.router import Router
from meshrl.services.rollout.trajectories.trajectory import (
    RestoredGroups,
    Trajectory,
    TrajectoryOutcome,
    Turn,
)

JOB = "ledger-load"
GROUP = 8  # trajectories of a prompt
LOOK_S = 0.5  # as a job's shard looks
PROBE_S = 0.005  # of the loop's lag
START_S = 60.0
REST_S = 120.0  # limit for requests in flight to end


@dataclass
class Noting:
    """The ledger, with a note of when it had which token."""

    ledger: ShardLedger
    on: bool
    times_ns: list[int] = field(default_factory=list)
    rows: list[TokenRows] = field(default_factory=list)
    tokens_written: int = 0

    async def write_tokens(self, new: TokenRows) -> None:
        await self.ledger.write_tokens(new)
        self.tokens_written += len(new.tokens)
        if self.on:
            self.times_ns.append(time.monotonic_ns())
            self.rows.append(new)

    def save(self, path: Path) -> None:
        counts = [len(new.trajectory_ids) for new in self.rows]
        columns = (
            np.repeat(np.array(self.times_ns, np.int64), counts),
            np.concatenate([new.trajectory_ids for new in self.rows]),
            np.concatenate([new.counts for new in self.rows]).astype(np.int64),
        )
        np.save(path, np.stack(columns))


class Shard:
    """Keeps a number of trajectories in flight: when one ends, another begins."""

    def __init__(self, mesh: Mesh, data: JobData, stop: list[int], notes: bool) -> None:
        self.mesh, self.data = mesh, data
        self.ledger = ShardLedger(mesh, data)
        self.written = Noting(self.ledger, notes)
        self.commits = GroupCommit(mesh, self.written)
        self.router = Router(mesh, self.commits, SamplingParams(stop, []), SLOTS)
        self.traffic = Traffic(0)
        self.opened = self.ended = self.failed = 0
        self.engines = 0
        self.going = True
        self._open_members: dict[int, int] = {}

    async def look_forever(self) -> None:
        while True:
            await self.poll_engines()
            await self.mesh.clock.sleep(LOOK_S)

    async def poll_engines(self) -> None:
        found = await registry.list_entries(self.mesh.state, "engine")
        ready = [e for e in found if e.alive and e.stats.get("ready")]
        alive = {e.name: EngineSnapshot.from_entry(e) for e in ready}
        self.engines = len(alive)
        self.router.update_engines(alive)

    async def keep_one(self, greedy: bool) -> None:
        while self.going:
            group, member = divmod(self.opened, GROUP)
            t = Trajectory(group, member, group, 0, seed=self.opened)
            self._open_members[group] = self._open_members.get(group, 0) + 1
            number, self.opened = self.opened, self.opened + 1
            try:
                async with self.router.create_assignment(t) as stay:
                    await (self.greedy(stay, number) if greedy else self.with_tools(stay))
                t.outcome = TrajectoryOutcome("done", 0.0)
            except ToolFailed as error:
                self.failed += 1
                t.outcome = TrajectoryOutcome("failed", None, str(error))
            end = [t.id, t.outcome.reason, t.outcome.reward, t.outcome.error]
            self.ledger.defer_record(RecordKind.END, end, t.group)
            self.ended += 1
            self._open_members[group] -= 1
            if not self._open_members[group] and (group + 1) * GROUP <= self.opened:
                del self._open_members[group]
                await self.ledger.write_records((RecordKind.CLOSE, [group, "ready"]))
                if not greedy:
                    await self.ledger.forget_group(group)

    async def _begin(self, t: Trajectory, prompt: list[int]) -> None:
        t.set_prompt(prompt)
        head = [t.group, t.member, t.prompt, t.version, t.tokens.tolist()]
        await self.ledger.write_records((RecordKind.OPEN, head), groups=(t.group,))

    async def with_tools(self, stay: Assignment) -> None:
        t, plan = stay.trajectory, self.traffic.plan()
        await self._begin(t, plan.prompt.tolist())
        while True:
            finish = await stay.generate(MAX_TOKENS)
            text = self.traffic.text(len(t.turn_tokens))
            t.open_turn = Turn(text, len(t.turn_tokens))
            self.ledger.defer_record(RecordKind.TURN, [t.id, text], t.group)
            if finish is FinishReason.LENGTH or len(t.past_turns) + 1 >= plan.turns:
                return
            await self.mesh.clock.sleep(self.traffic.tool_s())
            r = t.open_turn
            r.tool_name, r.tool_input, r.tool_value, r.has_tool_value = (
                "search",
                {"query": text[:40]},
                text[:80],
                True,
            )
            record = (RecordKind.TOOL, [t.id, r.tool_name, r.tool_input, r.tool_value])
            await self.ledger.write_records(record, groups=(t.group,))
            self.router.on_tool_return(stay)
            value = self.traffic.answer()
            if t.length + len(value) >= MAX_TOKENS:
                return
            self.ledger.defer_record(RecordKind.APPEND, [t.id, value], t.group)
            t.append(value)

    async def greedy(self, stay: Assignment, number: int) -> None:
        t = stay.trajectory
        t.temperature = 0.0
        await self._begin(t, greedy_prompt(number).tolist())
        await stay.generate(GREEDY_PROMPT + GREEDY_NEW)

    async def close(self) -> None:
        await self.router.close()
        await self.commits.close()
        await self.ledger.close()


async def opened(chosen: argparse.Namespace) -> Shard:
    """Return a shard of a registered job, with its engines connected."""
    settings = MeshSettings.from_env()
    mesh = await Mesh.open("rollout/job/0", "rollout", settings)
    config = JobConfig(name=JOB)
    data = JobData(JOB, config, Path(settings.run_root), Path(settings.run_root) / "run")
    await jobs.submit(mesh.state, JOB, config.to_document(), str(data.run_dir), "submit")
    await mesh.join(None)
    shard = Shard(mesh, data, [] if chosen.kind == "greedy" else [STOP], chosen.kind == "greedy")
    await shard.ledger.take_over(lambda group, member: 0)
    until = mesh.clock.monotonic() + START_S
    while shard.engines < chosen.engines:
        if mesh.clock.monotonic() > until:
            raise SystemExit(f"{shard.engines} of {chosen.engines} engines came up")
        await mesh.clock.sleep(LOOK_S)
        await shard.poll_engines()
    return shard


# ---------------------------------------------------------------- measurements


class Lag:
    """Lateness of the loop's due callbacks; `own` is the computation of this process in that
    time.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.own_s: list[float] = []

    async def probe_forever(self) -> None:
        while True:
            due, cpu = time.monotonic() + PROBE_S, time.thread_time()
            await asyncio.sleep(PROBE_S)
            late = max(0.0, time.monotonic() - due)
            self.late_s.append(late)
            self.own_s.append(min(late, time.thread_time() - cpu))

    def clear(self) -> None:
        self.late_s.clear()
        self.own_s.clear()


async def load(shard: Shard, warm_s: float, seconds: float, lag: Lag) -> dict[str, Any]:
    ledger = shard.ledger
    await asyncio.sleep(warm_s)
    print("ready", flush=True)
    before = cpu_s(), time.monotonic(), ledger.bytes_written, shard.written.tokens_written
    lag.clear()
    in_flight = []
    for _ in range(max(1, round(seconds))):
        await asyncio.sleep(seconds / max(1, round(seconds)))
        in_flight.append(shard.opened - shard.ended)
    wall = time.monotonic() - before[1]
    tokens = shard.written.tokens_written - before[3]
    written = ledger.bytes_written - before[2]
    return {
        "service_cores": round((cpu_s() - before[0]) / wall, 3),
        "loop_lag_p99_ms": round(1e3 * float(np.percentile(lag.late_s, 99)), 1),
        "loop_lag_own_p99_ms": round(1e3 * float(np.percentile(lag.own_s, 99)), 1),
        "write_amplification": round(written / (10 * tokens), 3),
        "tokens_per_s": round(tokens / wall),
        "in_flight": min(in_flight),
        "failed": shard.failed,
    }


async def greedy(shard: Shard, seconds: float, out: Path) -> dict[str, Any]:
    """Run for `seconds`, wait for requests in flight, and read the ledger as a successor would."""
    print("ready", flush=True)
    await asyncio.sleep(seconds)
    shard.going = False
    until = time.monotonic() + REST_S
    while shard.ended < shard.opened and time.monotonic() < until:
        await asyncio.sleep(0.1)
    await shard.ledger.write_records()
    shard.written.save(out / "written.npy")
    restored = RestoredGroups()
    for record in iter_records(shard.ledger.directory):
        restored.apply_record(record, lambda group, member: 0)
    ids = [make_trajectory_id(*divmod(n, GROUP)) for n in range(shard.opened)]
    whole = [restored.trajectories[i] for i in ids if i in restored.trajectories]
    finished = [t for t in whole if t.outcome is not None]
    outputs: dict[str, Any] = {str(t.id): t.tokens for t in finished}
    np.savez(out / "outputs.npz", **outputs)
    return {
        "opened": shard.opened,
        "finished": sum(t.outcome is not None and not t.outcome.error for t in whole),
        "failed": shard.failed,
        "in_flight": shard.opened - shard.ended,
        "continued": shard.router.continued_trajectories,
    }


async def serve(chosen: argparse.Namespace) -> None:
    shard = await opened(chosen)
    lag = Lag()
    background = [
        asyncio.create_task(work)
        for work in (shard.look_forever(), shard.ledger.sync_forever(), lag.probe_forever())
    ]
    flights = [
        asyncio.create_task(shard.keep_one(chosen.kind == "greedy"))
        for _ in range(chosen.trajectories)
    ]
    try:
        work = (
            greedy(shard, chosen.seconds, chosen.out)
            if chosen.kind == "greedy"
            else load(shard, chosen.warm, chosen.seconds, lag)
        )
        report = asyncio.create_task(work)
        await asyncio.wait([report, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in (*background, *flights):
            if task.done() and (error := task.exception()) is not None:
                raise error
        print(json.dumps(await report), flush=True)
    finally:
        for task in (*background, *flights):
            task.cancel()
        await asyncio.gather(*background, *flights, return_exceptions=True)
        try:
            await shard.close()
        except MeshError as error:
            shard.mesh.log.warning("closing", error=str(error))
        await shard.mesh.leave()


def main() -> None:
    parser = options(__doc__, warm=0.0, out=Path)
    parser.add_argument("kind", choices=("load", "greedy"))
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--trajectories", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    chosen = parser.parse_args()
    run_service(lambda: serve(chosen))


if __name__ == "__main__":
    main()
