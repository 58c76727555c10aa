"""Looks at a mesh for what stands still in it: everything that `diagnose` needs, from its Redis."""

from __future__ import annotations

from common.mesh.process.handle import start_time, usage_of
from common.state.redis.client import State
from common.state.redis.keys import MESH
from common.state.registry import Entry
from meshrl.view.mesh.snapshot import MeshSnapshot, read_mesh, read_troubles

PROBE = f"{MESH}:probe"  # a key of a second, which shows whether Redis takes writes


async def read_writable(state: State) -> MeshSnapshot:
    """Read a mesh with its troubles. StateUnavailable also when Redis takes no writes: without any,
    every process seems to be late.
    """
    await state.command("SET", PROBE, 1, "PX", 1000)
    return await read_troubles(state, await read_mesh(state))


def stopped_here(mesh: MeshSnapshot, host: str) -> list[str]:
    """Return the processes that a signal has stopped, as the kernel of this `host` tells."""
    return [entry.name for entry in mesh.entries if entry.host == host and _is_stopped(entry)]


def _is_stopped(entry: Entry) -> bool:
    usage = usage_of(entry.pid)
    return usage is not None and usage.state == "T" and start_time(entry.pid) == entry.start_time
