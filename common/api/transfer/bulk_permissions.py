"""Table of the roles that may get chunks from a process's bulk port, and put chunks there. Other
requests are refused; `call_permissions.py` is the same table for calls.

The store keeps chunks of different writers apart: each space is a directory of its own, which no
other role fills. A request names the space of its chunk.
"""

from __future__ import annotations

GET, PUT = "get", "put"
WEIGHTS = ""  # weights and checkpoints, by trainers and their ranks
GROUPS = "groups"  # finished groups, by rollout shards
PUBLISHED = "published"  # files of bundles and checkpoints at the run's home, by the store itself
SPACES = (WEIGHTS, GROUPS, PUBLISHED)  # travel by their numbers


def put_right(space: str) -> str:
    """Return the right to put chunks into a space, as the table names it."""
    return f"{PUT} {space}".rstrip()


_TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    # who loads weights, reads groups and checkpoints, or files of a bundle
    ("weights", GET): ("engine", "hybrid", "node", "rank", "rollout", "scoring", "trainer"),
    ("weights", put_right(WEIGHTS)): ("rank", "trainer"),
    ("weights", put_right(GROUPS)): ("rollout",),
    # who fetches a version that another host has got: its agent serves what lies there
    ("node", GET): ("engine", "hybrid", "rank", "scoring", "trainer"),
    ("hybrid", GET): ("trainer",),  # its gradient
    ("engine", GET): ("engine",),  # on another host: keys and values of a prefix
    ("trainer", GET): ("rank",),  # on another host: its rows of that
}
BULK_PERMISSIONS: dict[tuple[str, str], frozenset[str]] = {
    served: frozenset(roles) for served, roles in _TABLE.items()
}
