"""Count of the hosts that a run has lost."""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.events import Event
from meshrl.common.state.pool.workers.process_names import agent_name

START_MS = 60_000  # the planner may see a started host this long before it reports its start


def count_lost_hosts(events: Iterable[Event]) -> int:
    """Return how often a host was lost: it joined again, or it never came back.

    A host that came back without a new start was only late, such as a busy laptop. A host whose
    agent has stopped in order, as at the end of a mesh, was not lost.
    """
    count, missing, late, stopped = 0, set[str](), dict[str, int](), set[str]()
    for event in events:
        host = event.fields.get("host", "")
        if event.kind == "released":
            stopped.add(event.fields["name"])
        elif event.kind == "registered":
            stopped.discard(event.fields["name"])
        elif event.kind == "host_lost" and agent_name(host) not in stopped:
            missing.add(host)
        elif event.kind == "host_back" and host in missing:
            missing.remove(host)
            late[host] = event.ms
        elif event.kind == "host_joined":
            has_restarted = event.ms - late.pop(host, event.ms - START_MS) < START_MS
            count += host in missing or has_restarted
            missing.discard(host)
    return count + len(missing)
