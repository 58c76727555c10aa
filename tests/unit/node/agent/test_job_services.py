"""Shards and sandboxes of jobs: their placement on a host and their isolation."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, DeadlineExceeded
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.sandbox_request import build_load_request, compute_request_digest
from meshrl.common.job.config import EnvironmentConfig, JobConfig
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.job.isolation.isolation_probe import IsolationTiers
from meshrl.common.job.isolation.tiers import TIER_ORDER
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.exit_reports import read_last_exits
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.state import jobs, leader
from meshrl.common.state.pool.scheduling.decisions import AssignServices
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.services.node.agent import NodeAgent
from meshrl.services.node.gpus.accelerators import list_cpu_slots
from meshrl.services.node.host_isolation import (
    PENDING_REPROBE_S,
    REPROBE_S,
    STABLE_REPROBE_S,
    HostIsolation,
)
from meshrl.services.node.job_services import DOCUMENT_POLL_S
from meshrl.sim.virtual_loop import VirtualClock
from tests.load import scaled
from tests.meshes import alone
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.stories import virtual_test
from tests.unit.node.smallmesh import WHY, SmallMesh, has_exited
from tests.unit.node.test_failing_roles import DOCUMENT


@pytest.mark.deep
async def test_running_services_are_adopted_and_stopped_when_unassigned(
    mesh: SmallMesh,
) -> None:
    agent = mesh.start_agent(workers=0)
    names = ("sandbox/a/0", "sandbox/b/0", "sandbox/changed/0")
    await mesh.write(AssignServices("here", names, WHY))
    before = [await mesh.await_pid(name) for name in names]
    agent.kill()
    await agent.wait(scaled(5))
    document = DOCUMENT | {"bundle": {"dir": "/gone", "digest": "d", "files": {}}}
    await jobs.submit(mesh.state, "changed", document, "/gone", "submit")
    before_it, agent = agent, mesh.start_agent(workers=0)
    await mesh.await_pid("node/here", other_than=before_it.pid)
    await mesh.await_stat("node/here", "adopted_services", 3)
    # a sandbox with the old limits would reject the job's new ones
    await mesh.await_pid(names[2], other_than=before[2])
    os.kill(before[0], signal.SIGKILL)
    again = await mesh.await_pid(names[0], other_than=before[0])
    [end] = await mesh.await_events("process_ended", 1)
    assert (end["name"], end["job"], end["why"]) == (names[0], "a", "signal 9")
    assert await mesh.await_pid(names[1]) == before[1], "it was adopted"

    await mesh.write(AssignServices("here", names[:1], WHY))
    assert await has_exited(before[1])
    assert await mesh.await_pid(names[0]) == again
    agent.terminate()
    assert await agent.wait(scaled(30)) == 0
    assert await has_exited(again)
    assert mesh.processes() == []


@virtual_test(limit_s=3600.0)
async def test_failing_shard_fails_its_own_job_alone(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    started: list[str] = []

    async def shard(arguments: list[str], channel: SimulatedChannel) -> None:
        job = arguments[arguments.index("--job") + 1]
        started.append(job)
        if job == "bad":
            raise ConfigError("no environment of that name")
        await asyncio.Event().wait()

    host = SimulatedHost(clock, random, {"meshrl.services.rollout": shard})
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", clock, random, host, settings=settings)
    (tmp_path / "mesh").mkdir()
    for job in ("bad", "good"):
        await jobs.submit(mesh.state, job, DOCUMENT, str(tmp_path), job)
    led = await leader.campaign(mesh.state, PLANNER_ELECTION, "test", 1_000_000)
    wanted = ("rollout/bad/0", "rollout/good/0", "rollout/good/1")
    await pool.write_decisions(mesh.state, led, "serve", [AssignServices("one", wanted, WHY)], None)
    agent = NodeAgent(mesh, list_cpu_slots(0), [], "w")
    await agent.start()
    await clock.sleep(5.0)
    assert (await jobs.read_job(mesh.state, "bad")).phase == "failed"
    assert "no environment of that name" in (await jobs.read_job(mesh.state, "bad")).error
    assert (await jobs.read_job(mesh.state, "good")).phase == "queued"
    assert started == ["bad", "good", "good"]
    assert [end.job for end in await read_last_exits(mesh.state)] == ["bad"]
    assert agent.stats().services == 2
    await agent.shut_down()
    assert not any(child.poll() is None for child in host.children.values())


async def test_agent_without_a_loop_creates_no_coroutine(tmp_path: Path) -> None:
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", SystemClock(), Random(0), SystemHost(), settings=settings)
    agent = NodeAgent(mesh, [], [], "w")

    def close_killed_process() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError, match="no running event loop"):
                agent.shut_down().send(None)
            gc.collect()  # reports coroutines that were never awaited
        return [str(warning.message) for warning in caught]

    gc.freeze()  # garbage of earlier tests must not be reported here
    try:
        messages = await asyncio.to_thread(close_killed_process)
    finally:
        gc.unfreeze()
    assert not [message for message in messages if "never awaited" in message]


@virtual_test(limit_s=3600.0)
async def test_sandbox_receives_the_loadable_bundle_of_its_job(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    async def sandbox(arguments: list[str], channel: SimulatedChannel) -> None:
        started.append(arguments)
        await asyncio.Event().wait()

    host = SimulatedHost(clock, random, {"meshrl.services.sandbox": sandbox})
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", clock, random, host, settings=settings)
    (tmp_path / "mesh").mkdir()
    bundle = {"dir": str(tmp_path / "bundle"), "digest": "d1", "files": {}}
    config = JobConfig(name="a", environment=EnvironmentConfig(tools={"add": "mine:add"}))
    document = config.to_document() | {"bundle": bundle}
    await jobs.submit(mesh.state, "a", document, str(tmp_path), "a")
    led = await leader.campaign(mesh.state, PLANNER_ELECTION, "test", 1_000_000)
    wanted = ("sandbox/a/0", "sandbox/gone/0")
    await pool.write_decisions(mesh.state, led, "serve", [AssignServices("one", wanted, WHY)], None)
    agent = NodeAgent(mesh, list_cpu_slots(0), [], "w")
    await agent.start()
    await clock.sleep(10.0)
    # a shard's view of the job, on another host and with any worker
    shard = JobData.from_document("a", document, str(tmp_path)).for_device("cuda")
    shard = shard.for_remote_host(tmp_path / "fetched", tmp_path / "own")
    commands = {args[args.index("--name") + 1]: args for args in started}
    digest = compute_request_digest(build_load_request(shard))
    assert commands["sandbox/a/0"][-2:] == ["--load", digest]
    assert commands["sandbox/gone/0"][-2:] == ["--load", "none"], "nothing at all"
    # the job continues with other limits for the code it runs
    document["sandbox"] = document["sandbox"] | {"wall_s": 77.0}
    await jobs.change_document(mesh.state, "a", document, {}, "change")
    await clock.sleep(2 * DOCUMENT_POLL_S)
    changed = compute_request_digest(
        build_load_request(JobData.from_document("a", document, str(tmp_path)))
    )
    [*_, last] = [args for args in started if "sandbox/a/0" in args]
    assert last[-2:] == ["--load", changed] and changed != digest
    assert sum("sandbox/gone/0" in args for args in started) == 1, "nothing is new there"
    await agent.shut_down()


@virtual_test(limit_s=3600.0)
async def test_slow_stop_delays_no_other_service(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    alive: list[str] = []

    async def shard(arguments: list[str], channel: SimulatedChannel) -> None:
        name = arguments[arguments.index("--job") + 1]
        alive.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(6.0)
            alive.remove(name)

    host = SimulatedHost(clock, random, {"meshrl.services.rollout": shard})
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", clock, random, host, settings=settings)
    led = await leader.campaign(mesh.state, PLANNER_ELECTION, "test", 1_000_000)
    (tmp_path / "mesh").mkdir()

    async def serve(*jobs: str) -> None:
        wanted = tuple(f"rollout/{job}/0" for job in jobs)
        decided = [AssignServices("one", wanted, WHY)]
        await pool.write_decisions(mesh.state, led, random.hex_token(), decided, None)

    agent = NodeAgent(mesh, list_cpu_slots(0), [], "w")
    await agent.start()
    await serve("a", "b")
    await clock.sleep(2.0)
    await serve("b", "c")
    await clock.sleep(2.0)
    assert alive == ["a", "b", "c"]
    # requested again while it stops: a new process starts only after the old one has exited
    await serve("a", "b", "c")
    await clock.sleep(2.0)
    assert alive == ["a", "b", "c"]
    await clock.sleep(6.0)
    assert alive == ["b", "c", "a"]
    await agent.shut_down()
    assert alive == []


class ProbedHost(SystemHost):
    """Host whose isolation probes return the given results one after another."""

    def __init__(self, *found: IsolationTiers | DeadlineExceeded) -> None:
        super().__init__()
        self.left = [*found]

    async def run_blocking(self, fn: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
        assert fn is isolation_probe.probe_tiers
        found = self.left.pop(0)
        if isinstance(found, DeadlineExceeded):
            raise found
        return found


class SleepRecorder(SystemClock):
    """Clock that records the published tiers before each sleep; the last sleep never ends."""

    def __init__(self, host: ProbedHost) -> None:
        self.host, self.sleeps = host, list[tuple[list[str], float]]()
        self.own: HostIsolation | None = None
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert self.own is not None
        self.sleeps.append((self.own.tiers or [], seconds))
        if not self.host.left:
            self.over.set()
            await asyncio.Event().wait()


async def run_probes(*found: IsolationTiers | DeadlineExceeded) -> list[tuple[list[str], float]]:
    """Return the published tiers of a host with these probe results, each with the sleep after it
    in seconds. A sleep of 0 means that probing has ended.
    """
    host = ProbedHost(*found)
    clock = SleepRecorder(host)
    mesh = make_mesh(joinable=True)
    mesh.host, mesh.clock = host, clock
    clock.own = HostIsolation(mesh, ["sandboxes"])
    finding, over = asyncio.create_task(clock.own.run()), asyncio.create_task(clock.over.wait())
    await asyncio.wait((finding, over), return_when=asyncio.FIRST_COMPLETED)
    done = [(clock.own.tiers or [], 0.0)] if finding.done() else []
    for task in (finding, over):
        task.cancel()
    await asyncio.gather(finding, over, return_exceptions=True)
    return clock.sleeps + done


def make_mesh(**settings: Any) -> Any:
    return SimpleNamespace(
        settings=MeshSettings(redis_url="", run_root="", host="here", **settings),
        host=SystemHost(),
        clock=SystemClock(),
        telemetry=Telemetry("node/here"),
    )


async def test_host_with_sandboxes_publishes_its_tiers_after_probing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # neither bwrap nor runsc is there
    found = await asyncio.to_thread(isolation_probe.probe_tiers)
    assert found.is_finished and set(found.tiers) < {*TIER_ORDER} - {"bwrap", "cgroup", "runner"}
    own = HostIsolation(make_mesh(joinable=True), ["shards", "sandboxes"])
    assert own.tiers == ["trying"]
    sleeps = await run_probes(*[found] * 3)
    assert sleeps[-1][0] == list(found.tiers) and sleeps[-1][1] >= REPROBE_S, (
        "tried again all the same"
    )


async def test_failed_better_tier_is_probed_again() -> None:
    busy = IsolationTiers(("landlock",), is_conclusive=False)
    assert await run_probes(busy, IsolationTiers(("cgroup",))) == [
        (["landlock", "trying"], PENDING_REPROBE_S),
        (["cgroup"], 0.0),
    ]
    assert await run_probes(busy, busy, busy, IsolationTiers(("bwrap",))) == [
        *[(["landlock", "trying"], PENDING_REPROBE_S)] * 2,
        (["landlock"], REPROBE_S),
        (["bwrap"], 0.0),
    ]


async def test_failed_probe_leaves_known_tiers_unchanged() -> None:
    late = DeadlineExceeded("late")
    assert await run_probes(
        late,
        late,
        IsolationTiers((), is_conclusive=False, is_finished=False),
        IsolationTiers(("bwrap",)),
    ) == [
        *[(["trying"], REPROBE_S)] * 3,
        (["bwrap"], 0.0),
    ]
    sleeps = await run_probes(
        IsolationTiers(("bwrap", "runner"), is_conclusive=False),
        *[IsolationTiers((), is_conclusive=False)] * 2,
    )
    assert sleeps[-1] == (["bwrap", "runner"], REPROBE_S)


async def test_tiers_that_need_a_host_setting_are_reprobed_rarely() -> None:
    assert await run_probes(IsolationTiers(("landlock",))) == [(["landlock"], STABLE_REPROBE_S)]
    assert await run_probes(IsolationTiers(())) == [([], REPROBE_S)]


async def test_single_host_and_host_without_sandboxes_are_not_probed() -> None:
    for own in (
        HostIsolation(make_mesh(), ["sandboxes"]),
        HostIsolation(make_mesh(joinable=True), ["shards"]),
    ):
        await own.run()
        assert own.tiers is None
