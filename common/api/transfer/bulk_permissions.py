"""Permissions of roles to get chunks from a process's bulk port, and put chunks there.

Other requests are rejected; `call_permissions.py` is the same table for calls. The store keeps
chunks of different writers apart: each space is a directory of its own, which no other role fills.
A request names the space of its chunk.
"""

from __future__ import annotations

GET, PUT = "get", "put"
WEIGHTS = ""  # weights and checkpoints, by trainers and their ranks
GROUPS = "groups"  # finished groups, by rollout shards
PUBLISHED = "published"  # files of bundles and checkpoints on the run host, by the store itself
SPACES = (WEIGHTS, GROUPS, PUBLISHED)  # sent as indices


def put_right(space: str) -> str:
    """Return the right to put chunks into a space, as the table names it."""
    return f"{PUT} {space}".rstrip()


_TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    # processes that load weights, or read groups, checkpoints or files of a bundle
    ("weights", GET): ("engine", "hybrid", "node", "rank", "rollout", "scoring", "trainer"),
    ("weights", put_right(WEIGHTS)): ("rank", "trainer"),
    ("weights", put_right(GROUPS)): ("rollout",),
    # processes that fetch a version from another host, whose agent serves it
    ("node", GET): ("engine", "hybrid", "rank", "scoring", "trainer"),
    ("hybrid", GET): ("rank", "trainer"),  # their rows of its gradient
    ("engine", GET): ("engine",),  # of another host: keys and values of a prefix
}
BULK_PERMISSIONS: dict[tuple[str, str], frozenset[str]] = {
    served: frozenset(roles) for served, roles in _TABLE.items()
}
