"""Flood test: a million malformed frames against every listening port of a mesh that trains.

Usage:

    python -m loadtests.hosts.flood [--frames 1000000] [--waves 10]

Starts a mesh on this host (Redis and the gateway at ports, too), and a job on it. Waves of frames
follow each other while it trains; after each, what every process holds is read, `settle_s` later.
The first wave is for what is filled once: buffers, pools, code. `grew_mib`, `grew_descriptors` and
`grew_threads` are from after it to the end, of the process with a port that grew most, beside
`calm_mib` of `--calm-s` without frames. `gone`: processes that have exited. Then the job
is stopped, and another has to finish, with nothing lost and nothing trained twice in either. A
frame is what a connection sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from loadtests.doors.endpoint_inventory import connections, plan_of
from loadtests.hosts.flood.frame_sender import FloodResult, FrameFlood
from loadtests.hosts.flood.growth import Readings, between, read
from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.entry import options, print_progress, report
from meshrl.client.client import JobHandle
from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.directory_paths import MeshPaths

JOB = Path(__file__).parents[3] / "tests" / "mesh" / "jobs" / "digits.toml"
WORKERS = 2
JAILED = "rlimit="  # in the command line of what runs a job's code
FOREVER = 1_000_000  # steps of a job that is stopped
SETTLE_S = 35.0  # handshakes that were begun are given up after 30
CALM_S = 300.0
TRAINS_S = 240.0
WAVE_S = 900.0
OUTCOMES = ("hung_up", "answered", "reset", "held", "unheard", "unconnected")
GROWN_MIB = 8.0  # allowed growth beyond the growth without frames
GROWN_DESCRIPTORS = 8  # jails and connections among themselves come and go


async def trains(handle: JobHandle, steps: int = 1) -> int:
    async with asyncio.timeout(TRAINS_S):
        while (step := (await handle.state()).step) < steps:
            await asyncio.sleep(0.2)
    return step


async def send_flood(ports: list[tuple[str, int]], frames: int, seed: int) -> FloodResult:
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.hosts.flood.frame_sender"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WAVE_S):
        document = asdict(FrameFlood(ports, frames, seed, most_s=WAVE_S))
        out, _ = await sender.communicate(json.dumps(document).encode())
    if sender.returncode:
        raise RuntimeError(f"sender ends with {sender.returncode}")
    return FloodResult(**json.loads(out))


def lasts(pid: int, words: str) -> bool:
    """Return True if a process listens until its job ends; sandboxes replace their code runners
    earlier.
    """
    taken = [one for one in connections(pid) if one.status == psutil.CONN_LISTEN]
    return bool(taken) and JAILED not in words


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="flood-") as made:
        # With a path that is too long for a socket, Redis is at a port.
        async with mesh_up(Path(made) / ("deep" * 24), WORKERS) as mesh:
            endless = await mesh.submit(JOB, "endless", f"budget.steps={FOREVER}")
            await trains(endless)
            return await flooded(mesh, endless, arguments)


async def flooded(
    mesh: RunningMesh, endless: JobHandle, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Send waves to a mesh whose job trains; return the result."""
    place = MeshPaths(mesh.root)
    doors = await plan_of(place, MeshSettings.from_file(place.settings))
    ports = sorted({(port.host, port.port) for port in doors.ports})
    watched = [psutil.Process(pid) for pid, words in doors.pids.items() if lasts(pid, words)]
    waves: list[FloodResult] = []
    readings: list[Readings] = []
    step = 0
    for number in range(arguments.waves):
        waves.append(await send_flood(ports, arguments.frames // arguments.waves, number))
        await asyncio.sleep(arguments.settle_s)
        readings.append(read(watched))
        step = await trains(endless, step + 1)
        told = {"wave": number, **asdict(waves[-1]), **asdict(between(readings[0], readings[-1]))}
        del told["by_kind"]
        print_progress(told)
    await asyncio.sleep(arguments.calm_s)
    readings.append(read(watched))
    grew = between(readings[0], readings[-2])
    calm = between(readings[-2], readings[-1])
    await endless.stop()
    ended = await endless.wait(TRAINS_S)
    last = await mesh.submit(JOB, "last", "budget.steps=5")
    summary = await mesh.finished(last)
    seconds = sum(wave.seconds for wave in waves)
    frames = sum(wave.frames for wave in waves)
    answer: dict[str, Any] = {
        "frames": frames,
        "frames_per_s": round(frames / seconds),
        "ports": len(ports),
        "processes": len(watched),
        **{key: sum(getattr(wave, key) for wave in waves) for key in OUTCOMES},
        **grew.figures(),
        "calm_mib": calm.rss_mib,
        "stopped": ended.phase,
        "finished": summary["phase"],
        **{key: summary[key] + mesh.summary("endless")[key] for key in ("lost", "trained_twice")},
    }
    right = answer["finished"] == "finished" and not answer["gone"]
    books = (answer["lost"], answer["trained_twice"])
    grown = grew.rss_mib - max(0.0, calm.rss_mib)
    opened = grew.descriptors <= GROWN_DESCRIPTORS
    answer["ok"] = int(right and books == (0, 0) and opened and grown <= GROWN_MIB)
    return answer


def main() -> int:
    parser = options(__doc__, frames=1_000_000, waves=10, settle_s=SETTLE_S, calm_s=CALM_S)
    answer = asyncio.run(run(parser.parse_args()))
    report(answer)
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
