"""Arms of the benchmark: a mesh over hosts that trains, and its faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

import psutil

from loadtests.hosts.eye import HostsSnapshot
from loadtests.hosts.flood.frame_sender import FloodResult, FrameFlood
from loadtests.hosts.flood.growth import between, read
from loadtests.hosts.mesh import ROOT, Honest, HostsMesh, Plan, books, mesh_over, step_of
from loadtests.jobs.mesh import greedy
from loadtests.measuring.rounds import Arm
from loadtests.namespaces.host import Host
from loadtests.namespaces.hosts import Hosts
from loadtests.namespaces.init import HOME
from meshrl.common.mesh.process.tcp_sockets import find_listen_addresses

WORKERS = 3  # in all: an engine, a core, and one that the planner gives to either
EACH = (1, 1, 1)
FOREVER = 100_000  # steps of a job that is stopped
BEGUN = 3  # steps after which a job is in its stride
SETTLED_S = 600.0
AGAIN_S = 300.0  # until a job continues after a host was lost
TOKENS_S = 300.0
MATRIX_S = 300.0
RENEWED_S = 2.0  # a lease is renewed every 1.5 s: a disconnected process is late since then at most
STRANGER = 2  # number of the host that floods
WAVES = 4  # the first wave fills buffers, pools and code
WAVE_S = 1800.0
SETTLE_S = 35.0  # handshakes that were begun are given up after 30
JAILED = "rlimit="  # in the command line of what a sandbox runs code in, and changes by itself


async def flooded(plan: Plan) -> Arm:
    """Send frames from a third host to all ports of two hosts that are not on their loopback."""
    async with training(plan, (1, 1), STRANGER + 1) as (hosts, mesh, told):
        listening = {
            (host.number, process.pid): taken
            for host in (hosts[0], hosts[1])
            for process in host.processes()
            if (taken := ports(process, host))
        }
        targets = sorted({place for taken in listening.values() for place in taken})
        watched = [psutil.Process(pid) for _, pid in listening]
        waves, readings = [], []
        for number in range(WAVES):
            waves.append(await send_flood(hosts[STRANGER], targets, plan.frames // WAVES, number))
            await asyncio.sleep(SETTLE_S)
            readings.append(read(watched))
        grew = between(readings[0], readings[-1])
        await further(mesh, 1)
        told |= {
            "flood_frames": sum(wave.frames for wave in waves),
            "flood_frames_per_s": round(plan.frames / sum(wave.seconds for wave in waves)),
            **grew.figures(),
        }
    return told


def ports(process: psutil.Process, host: Host) -> list[tuple[str, int]]:
    """Return the listeners that other hosts can reach, except those of processes that a job
    outlasts.
    """
    try:
        taken = (
            set() if JAILED in " ".join(process.cmdline()) else find_listen_addresses(process.pid)
        )
    except (psutil.NoSuchProcess, FileNotFoundError):
        return []
    return [(host.address, end.port) for end in taken if not end.host.is_loopback]


async def send_flood(
    host: Host, targets: list[tuple[str, int]], frames: int, seed: int
) -> FloodResult:
    """Send a wave of frames from a host."""
    flood = FrameFlood(targets, frames, seed, most_s=WAVE_S)
    host.path(f"{HOME}/flood.json").write_text(json.dumps(asdict(flood)))
    words = f'exec "$0" -m loadtests.hosts.flood.frame_sender <{HOME}/flood.json'
    ran = await host.run("sh", "-c", words, "python", timeout_s=WAVE_S)
    return FloodResult(**json.loads(ran.out))


async def demo(plan: Plan) -> Arm:
    async with plan.hosts() as hosts, mesh_over(hosts, EACH) as mesh:
        honest = Honest(hosts)
        await mesh.submit(plan.job, "demo")
        summary = await mesh.finished("demo")
        told = {"accuracy": greedy(summary), "phase": summary["phase"], "wall_s": summary["wall_s"]}
        return told | books(summary) | honest.get_validity(mesh)


async def paced(plan: Plan, spread: bool) -> Arm:
    """Time a paced job on three workers: of three hosts, or of the head with the same network."""
    async with plan.hosts() as hosts, mesh_over(hosts, EACH if spread else (WORKERS,)) as mesh:
        await mesh.until(lambda snapshot: workers(snapshot) == WORKERS, SETTLED_S)
        honest, started_s = Honest(hosts), time.monotonic()
        await mesh.submit(plan.job, "paced", *plan.paced())
        summary = await mesh.finished("paced")
        took = time.monotonic() - started_s
        told = {"took_s": round(took, 2), "wall_s": summary["wall_s"], "phase": summary["phase"]}
        return told | books(summary) | honest.get_validity(mesh)


@contextlib.asynccontextmanager
async def training(
    plan: Plan, workers: tuple[int, ...] = EACH, count: int = 0, steps: int = FOREVER, *more: str
) -> AsyncIterator[tuple[Hosts, HostsMesh, Arm]]:
    """Yield hosts whose mesh trains a paced job, and a figure for what is found of them.

    The job is in its stride as the block begins; behind it the job ends, and the figure has its
    books, and what tells whether they are worth anything.

    Args:
        plan: What all arms have in common.
        workers: Of each host, the head's first.
        count: Hosts, if there are more than have workers.
        steps: Of the job; one that is to train forever is cancelled.
        more: Further changes to the job.
    """
    async with plan.hosts(count or len(workers)) as hosts, mesh_over(hosts, workers) as mesh:
        honest, told = Honest(hosts), Arm()
        await mesh.submit(plan.job, "paced", *plan.paced(steps), *more)
        await mesh.step("paced", BEGUN)
        yield hosts, mesh, told
        if steps == FOREVER:
            await mesh.meshrl("cancel", "paced", "--mesh", ROOT)
        summary = await mesh.finished("paced")
        told |= {"phase": summary["phase"]} | books(summary) | honest.get_validity(mesh)


async def killed(plan: Plan) -> Arm:
    """Kill a host with a worker and a shard while a paced job trains on three hosts."""
    shards = f"rollout.shards={len(EACH)}"  # one on each
    async with training(plan, EACH, 0, plan.steps, shards) as (hosts, mesh, told):
        started_s = time.time()
        await hosts.kill(1)
        # The next step may have been computed already: the one after it was not.
        again = await further(mesh, 2)
        told |= {"recover_s": round(again.at - started_s, 2)}
    return told


async def partitions(plan: Plan) -> Arm:
    """Cut off and reconnect each host in turn while a paced job trains."""
    async with training(plan) as (hosts, mesh, told):
        named: list[float | None] = []
        for number in range(len(EACH)):
            first, started_s = len(mesh.seen), time.time()
            async with hosts.partition(number):
                await asyncio.sleep(plan.cut_s)
            named.append(named_s(mesh, first, started_s, number))
            await further(mesh, 2)
        times = [seconds for seconds in named if seconds is not None]
        told["stall_named_s"] = max(times) if len(times) == len(EACH) else None
    return told | {"leaders_per_token": max(map(len, mesh.leaders().values()), default=0)}


async def joining(plan: Plan) -> Arm:
    """Join a host while a paced job trains on two, and drain it again."""
    async with training(plan, EACH[:2], len(EACH)) as (_, mesh, told):
        began = await mesh.join(2, 1)
        first, _ = await mesh.until(lambda snapshot: tokens_on(snapshot, mesh.names[2]), TOKENS_S)
        drained = time.time()
        await mesh.meshrl("drain", mesh.names[2], "--wait", "--mesh", ROOT)
        took = time.time() - drained
        await further(mesh, 2)
        told |= {"join_s": round(first.at - began, 2), "drain_s": round(took, 2)}
    return told


async def doors(plan: Plan) -> Arm:
    """Try each role, and callers without a key, at each process while a job trains on two hosts."""
    async with training(plan, EACH[:2]) as (_, mesh, told):
        words = ("python", "-m", "loadtests.doors.matrix", ROOT)
        tried = await mesh.head.run(*words, check=False, timeout_s=MATRIX_S)
        await further(mesh, 1)
        told |= json.loads(tried.out)
    return told


async def further(mesh: HostsMesh, steps: int) -> HostsSnapshot:
    """Return the snapshot at which the paced job has done so many more steps."""
    reached = max(step_of(snapshot, "paced") for snapshot in mesh.seen)
    return await mesh.step("paced", reached + steps, AGAIN_S)


def workers(snapshot: HostsSnapshot) -> int:
    return sum(process["kind"] == "worker" for process in snapshot.processes)


def tokens_on(snapshot: HostsSnapshot, host: str) -> bool:
    engines = [one for one in snapshot.processes if (one["kind"], one["host"]) == ("engine", host)]
    return any(one["stats"].get("tokens") for one in engines)


def named_s(mesh: HostsMesh, first: int, began: float, number: int) -> float | None:
    """Return the seconds from the cut until a process on its other side was named."""
    head = number == 0
    for snapshot in mesh.seen[first:]:
        passed = snapshot.at - began
        for stall in snapshot.stalls:
            if float(stall["since_s"]) > passed + RENEWED_S:
                continue  # of an earlier cut
            if (stall["host"] == mesh.names[number]) != head and stall["host"]:
                return round(passed, 2)
    return None
