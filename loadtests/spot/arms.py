"""Arms of the benchmark: one job with emulated speeds, with spot workers or without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.entry import print_progress
from loadtests.measuring.processes import beside
from loadtests.paced.job import PROMPT, write
from loadtests.sharing.colocation import predict_rollout_s, set_training_speed
from loadtests.spot.hosts import POLL_S, SpotHost, spot_hosts
from meshrl.client.client import JobHandle
from meshrl.common.base.errors import MeshError
from meshrl.common.state import registry
from meshrl.sim.cluster.model.availability import Availability
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.emulated_run import compute_rl_s
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload, constant_drift

JOB = "spot"
RESERVED = 1  # workers of the core, where engines seed each step
RESERVED_PRICE, SPOT_PRICE = 1.0, 0.3  # of an hour of a worker, in any currency
MEDIAN_TOKENS, MAX_TOKENS = 24.0, 80  # few, as the host's processors compute them
GROUPS, GROUP_SIZE = 8, 8
TRAINING_S = 300.0  # until a job trains, at most
RUN_S = 600.0  # of a job, at most
AUDIT_S = 120.0


@dataclass(frozen=True)
class SpotPlan:
    """Job and trace that all arms have in common."""

    seed: int
    most: int  # spot workers
    rollout_s: float  # of a step on one engine
    training_s: float  # of a step
    trace: Availability
    steps: Mapping[str, int]  # of each arm

    def build_workload(self, steps: int) -> EmulatedWorkload:
        job = EmulatedWorkload(
            workers=RESERVED,
            steps=steps,
            groups_per_step=GROUPS,
            group_size=GROUP_SIZE,
            median_tokens=LinearDrift(MEDIAN_TOKENS, MEDIAN_TOKENS),
            log_sigma=constant_drift(0.4),
            engine_speed="1000/8/100000",
            bin_tokens=MAX_TOKENS + 2,
        )
        decode_ms = 1000 * self.rollout_s / predict_rollout_s(job)
        job = EmulatedWorkload(**vars(job) | {"engine_speed": f"{decode_ms:.3f}/8/100000"})
        return set_training_speed(job, self.rollout_s / self.training_s, self.rollout_s)


@dataclass
class MeshObservation:
    """Engines and shards of a mesh over time, by the registry, where they publish every 1.5 s."""

    started_s: dict[str, float] = field(default_factory=dict)  # first engine of a host
    first_token_s: dict[str, float] = field(default_factory=dict)  # by host
    running: dict[str, dict[str, int]] = field(default_factory=dict)  # requests: host, engine
    handovers_s: list[float] = field(default_factory=list)
    handovers: dict[str, int] = field(default_factory=dict)  # by incarnation of a shard

    async def watch(self, mesh: RunningMesh) -> None:
        """Observe until cancelled; times are of the wall clock."""
        while True:
            with contextlib.suppress(MeshError):  # a failed poll is left out
                for entry in await registry.list_entries(mesh.state, "engine"):
                    self._add_engine(entry)
                for entry in await registry.list_entries(mesh.state, "rollout"):
                    self._add_shard(entry)
            await asyncio.sleep(POLL_S)

    def describe_join(self, host: SpotHost) -> LateJoin:
        """Return the times until a host's first token."""
        join_s, token_s = host.joined_s - host.requested_s, self.first_token_s.get(host.name)
        if token_s is None:
            return LateJoin(round(join_s, 2), None, None)
        started_s = self.started_s[host.name]
        return LateJoin(
            round(join_s, 2), round(token_s - host.requested_s, 2), round(token_s - started_s, 2)
        )

    def _add_engine(self, entry: registry.RegistryEntry) -> None:
        if not entry.alive:
            return
        now_s = time.time()
        self.started_s.setdefault(entry.host, now_s)
        held = entry.stats.get("running", 0) + entry.stats.get("waiting", 0)
        self.running.setdefault(entry.host, {})[entry.name] = int(held)
        if entry.stats.get("tokens"):
            self.first_token_s.setdefault(entry.host, now_s)

    def _add_shard(self, entry: registry.RegistryEntry) -> None:
        count = int(entry.stats.get("handovers") or 0)
        if count > self.handovers.get(entry.incarnation, 0):
            self.handovers[entry.incarnation] = count
            self.handovers_s.append(float(entry.stats["handover_s"]))


@dataclass
class LateJoin:
    """Seconds of a host that joined during training until its first token; None: none came."""

    join_s: float  # of the command
    from_join_s: float | None
    from_engine_s: float | None


@dataclass
class SpotArm:
    """Figures of one run."""

    name: str
    summary: dict[str, Any]
    audit: dict[str, Any]
    rl_s: float  # from the start of its training to its last step
    handovers_s: list[float]
    host: dict[str, Any]
    kills: int  # of hosts
    noticed: int  # of these: after a notice
    unsent: int  # requests that ran at killed engines; each may have lost one token
    joined: list[LateJoin]  # during training

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens of a second."""
        return float(self.summary["tokens_trained"]) / self.rl_s

    @property
    def tokens_redone(self) -> int:
        """Tokens that engines generated again because they were lost; see benchmarks.md."""
        trajectories = int(self.summary["trained"]) + int(self.summary["filtered"])
        taken = int(self.summary["tokens_rolled_out"]) - PROMPT * trajectories
        return max(0, int(self.summary["tokens_sampled"]) - taken) + self.unsent

    def describe(self) -> dict[str, Any]:
        return {
            "arm": self.name,
            "rl_s": round(self.rl_s, 1),
            "steps": self.summary["steps"],
            "tokens_per_s": round(self.tokens_per_s, 1),
            "cost_per_million_tokens": self.summary["cost_per_million_tokens"],
            "tokens": {
                key: self.summary[f"tokens_{key}"] for key in ("sampled", "rolled_out", "trained")
            },
            "staleness_max": self.summary["staleness_max"],
            "stale_requeued": self.summary["stale_requeued"],
            "handovers_s": self.handovers_s,
            "kills": self.kills,
            "noticed": self.noticed,
            "unsent": self.unsent,
            "joined": [vars(one) for one in self.joined],
            **self.host,
        }


async def run_arm(name: str, plan: SpotPlan) -> SpotArm:
    """Run the job with the spot workers of an arm; RuntimeError if it does not finish."""
    trace = plan.trace if name == "trace" else ()
    first = {"reserved": 0, "always": plan.most, "trace": plan.trace[0][1]}[name]
    with tempfile.TemporaryDirectory(prefix=f"sp-{name}-") as made:
        folder = Path(made)
        job = plan.build_workload(plan.steps[name])
        path = write(folder / "job", job, plan.seed, MAX_TOKENS)
        prices = {"reserved_price": RESERVED_PRICE, "spot_price": SPOT_PRICE}
        observed = MeshObservation()
        async with (
            mesh_up(folder, RESERVED, "--listen", "127.0.0.1", **prices) as mesh,
            spot_hosts(folder, mesh.root, SPOT_PRICE, plan.seed) as spot,
            beside(observed.watch(mesh)),
        ):
            await spot.join(first)
            changes = ("algorithm.max_staleness=0", "pool.colocate=always")
            handle = await mesh.submit(path, JOB, *job.format_overrides(), *changes)
            await wait_for_training(mesh, handle)
            async with asyncio.timeout(RUN_S), beside(spot.follow(trace)) as following:
                finished = asyncio.create_task(mesh.finished(handle))
                await asyncio.wait({finished, following}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()  # a failed join is no verdict on the job
                summary = await finished
            found = await mesh.events()
            audit = await audit_run(mesh.root / JOB)
            killed = [host for host in spot.hosts if host.killed_s]
            noticed = spot.noticed
        arm = SpotArm(
            name=name,
            summary=summary,
            audit=audit,
            rl_s=compute_rl_s(found),
            handovers_s=observed.handovers_s,
            host=mesh.watched.honest(),
            kills=len(killed),
            noticed=noticed,
            unsent=sum(sum(observed.running.get(one.name, {}).values()) for one in killed),
            joined=[observed.describe_join(one) for one in spot.hosts[first:] if one.name],
        )
        print_progress(arm.describe())
    return arm


async def wait_for_training(mesh: RunningMesh, handle: JobHandle) -> None:
    """Wait until the job trains; TimeoutError."""
    async with asyncio.timeout(TRAINING_S):
        while (await mesh.client.job(handle.name)).phase != "training":
            await asyncio.sleep(POLL_S)


async def audit_run(out: Path) -> dict[str, Any]:
    """Return the account of `meshrl audit`, whatever its exit status."""
    words = (sys.executable, "-m", "meshrl", "audit", str(out), "--json")
    audit = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(AUDIT_S):
        out_bytes, _ = await audit.communicate()
    found: dict[str, Any] = json.loads(out_bytes)
    return found
