"""A host that has no key floods every port of a mesh over two others, while that trains."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import psutil

from loadtests.hosts.arms import further, training
from loadtests.hosts.flood.growth import between, read
from loadtests.hosts.flood.pouring import Pour, Poured
from loadtests.hosts.plan import Plan
from loadtests.measuring.rounds import Arm
from loadtests.namespaces.host import Host
from loadtests.namespaces.init import HOME
from meshrl.common.mesh.process.peers import listeners

STRANGER = 2  # number of the host that floods
WAVES = 4  # the first fills what is filled once
WAVE_S = 1800.0
SETTLE_S = 35.0  # handshakes that were begun are given up after 30
JAILED = "rlimit="  # in the command line of what a sandbox runs code in, and changes by itself


async def flooded(plan: Plan) -> Arm:
    """Frames from a third host to all ports of two that are not on their loopback."""
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
            waves.append(await poured(hosts[STRANGER], targets, plan.frames // WAVES, number))
            await asyncio.sleep(SETTLE_S)
            readings.append(read(watched))
        grew = between(readings[0], readings[-1])
        await further(mesh, 1)
        told |= {
            "flood_frames": sum(wave.frames for wave in waves),
            "flood_frames_per_s": round(plan.frames / sum(wave.seconds for wave in waves)),
            "flood_ports": len(targets),
            "flood_unheard": sum(wave.unheard for wave in waves),
            **grew.figures(),
        }
    return told


def ports(process: psutil.Process, host: Host) -> list[tuple[str, int]]:
    """Where a process listens that others reach; none for what does not last as long as its job."""
    try:
        taken = set() if JAILED in " ".join(process.cmdline()) else listeners(process.pid)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return []
    return [(host.address, end.port) for end in taken if not end.host.is_loopback]


async def poured(host: Host, targets: list[tuple[str, int]], frames: int, seed: int) -> Poured:
    """A wave from a host."""
    pour = Pour(targets, frames, seed, most_s=WAVE_S)
    host.path(f"{HOME}/pour.json").write_text(json.dumps(asdict(pour)))
    words = f'exec "$0" -m loadtests.hosts.flood.pouring <{HOME}/pour.json'
    ran = await host.run("sh", "-c", words, "python", timeout_s=WAVE_S)
    return Poured(**json.loads(ran.out))
