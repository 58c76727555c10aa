"""Arm with a hundred hosts that join while others update, in virtual time.

The joining hosts fetch the version that the others have. Then a newer one is committed: the others
update to it, and the joining hosts fetch it instead of theirs. Every host has a link of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loadtests.measuring.rounds import Arm
from loadtests.weights.scene import Plan
from loadtests.weights.swarm_simulation import LINK, SwarmSimulation
from meshrl.services.engine.weights.version_receiver import SUPERSEDED_POLL_S

RUNNING, JOINING, CHUNKS, CHUNK_BYTES = 8, 100, 32, 1 << 20
COMMIT_S = 0.5  # after the joining hosts appear
CROWD = frozenset(range(RUNNING, RUNNING + JOINING))
LINKS: Mapping[str, dict[str, Any]] = {
    "": {},
    "_slow_links": {"link_rates": dict.fromkeys(CROWD, LINK / 4)},
    "_without_uploads": {"no_upload_hosts": CROWD},
}


def tree_s() -> float:
    """Return the seconds of a pipelined relay tree, in which each host sends to two others."""
    depth = math.ceil(math.log2(RUNNING + JOINING))
    return 2 * (CHUNKS + depth) * CHUNK_BYTES / LINK


def simulate(joining: int, *, first: bool = True, **links: Any) -> SwarmSimulation:
    """Run the hosts; without `first`, updates and first versions are served alike."""
    delay_s = {n: SUPERSEDED_POLL_S * (n % 10) / 10 for n in CROWD}
    return SwarmSimulation(
        RUNNING + joining,
        chunks=CHUNKS,
        chunk_bytes=CHUNK_BYTES,
        joiners=CROWD if first else frozenset(),
        first_holders=frozenset(range(RUNNING)),
        next_times={n: COMMIT_S + delay_s.get(n, 0.0) for n in range(RUNNING + joining)},
        **links,
    ).run()


def update_s(run: SwarmSimulation) -> float:
    return max(run.finish_times[n] for n in range(RUNNING)) - COMMIT_S


async def late_joiners(plan: Plan) -> Arm:
    """Measure `running_update_ratio*` (with joining hosts over without), and `joiners_*`."""
    alone_s = update_s(simulate(0))
    answer: Arm = {
        "joining_hosts": JOINING,
        "running_hosts": RUNNING,
        "running_update_s": round(alone_s, 3),
        "tree_s": round(tree_s(), 3),
    }
    for name, links in LINKS.items():
        ours = simulate(JOINING, **links)
        alike = simulate(JOINING, first=False, **links)
        answer[f"running_update_ratio{name}"] = round(update_s(ours) / alone_s, 3)
        answer[f"running_update_ratio{name}_alike"] = round(update_s(alike) / alone_s, 3)
        ended = sorted(ours.finish_times[n] - COMMIT_S for n in CROWD)
        answer[f"joiners_s{name}"] = round(ended[-1], 3)
        answer[f"joiners_last_over_median{name}"] = round(ended[-1] / ended[len(ended) // 2], 3)
        if not name:
            answer["joiners_over_tree"] = round(ended[-1] / tree_s(), 3)
            answer["source_copies_sent_joining"] = round(sum(ours.sent.values()) / CHUNKS, 3)
            answer["tracker_request_us"] = round(1e6 * ours.tracker_s / ours.requests)
            answer["tracker_share"] = round(ours.tracker_s / ours.now, 3)
    return answer
