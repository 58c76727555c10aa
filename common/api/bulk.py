"""Which roles may get chunks from a process's bulk port, and put chunks there. What is not here
nobody may; `callers.py` says the same of calls.
"""

from __future__ import annotations

GET, PUT = "get", "put"

_TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    # who loads weights, reads groups and checkpoints, or files of a bundle
    ("weights", GET): ("engine", "hybrid", "node", "rank", "rollout", "scoring", "trainer"),
    ("weights", PUT): ("rank", "rollout", "trainer"),  # weights and checkpoints; finished groups
    # who fetches a version that another host has got: its agent serves what lies there
    ("node", GET): ("engine", "hybrid", "rank", "scoring", "trainer"),
    ("hybrid", GET): ("trainer",),  # its gradient
    ("engine", GET): ("engine",),  # on another host: keys and values of a prefix
    ("trainer", GET): ("rank",),  # on another host: its rows of that
}
BULK: dict[tuple[str, str], frozenset[str]] = {
    served: frozenset(roles) for served, roles in _TABLE.items()
}
