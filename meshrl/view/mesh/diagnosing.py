"""Looks at a mesh for what stands still in it: everything that `diagnose` needs, from its Redis."""

from __future__ import annotations

from common.process.handle import start_time, usage_of
from common.state import ended, jobs, registry
from common.state.client import State, server_ms
from common.state.keys import MESH
from common.state.registry import Entry
from meshrl.view.mesh.pool import with_services
from meshrl.view.mesh.stalled import Stall, diagnose

PROBE = f"{MESH}:probe"  # a key of a second, which shows whether Redis takes writes


async def stalls(state: State, full: str = "", host: str = "") -> tuple[list[Stall], list[Entry]]:
    """The stalls of a mesh, and all that its processes say. `full`: which disk is full; `host`:
    this one, whose kernel tells which processes a signal has stopped; empty: it is none of them.
    StateUnavailable when Redis takes no writes: without any, everybody seems to be late.
    """
    await state.command("SET", PROBE, 1, "PX", 1000)
    entries = await registry.entries(state)
    found = await with_services(state)
    now_ms = await server_ms(state)
    gone = await ended.ended(state)
    rows = await jobs.jobs(state)
    stopped = [entry.name for entry in entries if host and entry.host == host and _stopped(entry)]
    return diagnose(entries, found, now_ms, gone, rows, full, stopped), entries


def _stopped(entry: Entry) -> bool:
    """True if a signal has stopped a process of this host."""
    usage = usage_of(entry.pid)
    return usage is not None and usage.state == "T" and start_time(entry.pid) == entry.start_time
