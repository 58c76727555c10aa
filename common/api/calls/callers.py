"""Which roles may call which method: all there is to ask of a process of the mesh.

A role is the kind of a process, and whoever calls has proved it by its key. What is not here nobody
may call, and who may call nothing (an environment process) has no key.
"""

from __future__ import annotations

from collections.abc import Mapping

Callers = Mapping[str, frozenset[str]]

# What runs on a host that has joined; one of them has a planner too. The weight store, the gateway
# and people's commands are the head's alone.
HOST_ROLES = frozenset(
    ["engine", "hybrid", "node", "rank", "rollout", "sandbox", "scoring", "trainer", "worker"]
)
# "person" is a command of the mesh's own user, at its head.
ROLES = HOST_ROLES | {"gateway", "person", "planner", "weights"}
PLANNER = "planner"

# Who holds a token, and is no process of the mesh: the gateway's front door alone knows its key.
CLIENT = "client"
# Who holds a host's token: it joins, and asks about itself.
JOINER = "joiner"

# Whoever computes on a gang, and has tensors.
_RESIDENTS = ("engine", "hybrid", "rank", "scoring", "trainer")
# Who has files of a job to read, and may be given damaged bytes; for a sandbox its host's agent.
_READERS = (*_RESIDENTS, "node", "rollout")

_TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    # what a worker asks of the role process that it started
    "Resting": {"drain settle": ("worker",)},
    "Engine": {
        "attach submit abort move": ("rollout",),
        "export": ("engine",),  # one that takes over a session
        "stored": ("engine",),  # one of another host, which looks for a prefix
        "look": ("trainer",),  # a step was committed
    },
    "Node": {
        "look": ("planner",),  # the host is to run other shards and sandboxes
        "logs read_log": ("person",),
    },
    # whatever else a person may call, and whose jobs it reaches, the gateway decides by the token
    "Gateway": {
        "upload put finish jobs job events stop delete model read versions": (CLIENT,),
        "join leave drain back remaining whereabouts membership": (JOINER,),
    },
    "Ranks": {
        "stand_by form begin compute keep adopt apply score stage staged": ("trainer",),
        "save saved restore take rest": ("trainer",),
    },
    # code of a job's author and of the model runs there: its shards alone bring any
    "Sandbox": {"load run score end_sessions": ("rollout",)},
    "Scoring": {"score judge": ("rollout",)},
    "Trainer": {
        "join leave lease_round round_done": ("hybrid",),
        "restage": ("engine", "hybrid"),  # who cannot load the current version
        "gather": ("engine", "hybrid"),  # who loads it on another host than the store's
    },
    "Weights": {
        "stage save load lay_out older set_aside clear": ("trainer",),
        "manifest sources deltas": _RESIDENTS,  # who loads a version
        "keep_lines": ("engine", "rollout", "trainer"),
        "begin_delta stage_delta": ("rank", "trainer"),  # who stages a version
        "received": ("engine", "hybrid"),  # who receives one version after the other
        "publish examine": _READERS,
    },
    "Worker": {
        "look": ("planner",),  # its gang has another record
        # the role processes that it has started keep their tensors there
        "make_segment find_segment drop_segment": _RESIDENTS,
        "take_turn give_back": _RESIDENTS,  # of rank 0's worker
        "end_resident": ("worker",),  # rank 0's, where a turn was not given back
    },
}
CALLERS: Callers = {
    f"{interface}.{method}": frozenset(roles)
    for interface, rows in _TABLE.items()
    for methods, roles in rows.items()
    for method in methods.split()
}
