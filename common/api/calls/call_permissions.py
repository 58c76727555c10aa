"""Which roles may call which method: all there is to ask of a process of the mesh.

A role is the kind of a process, and whoever calls has proved it by its key. What is not here nobody
may call, and who may call nothing (an environment process) has no key.
"""

from __future__ import annotations

from collections.abc import Mapping

CallPermissions = Mapping[str, frozenset[str]]

# What runs on a host that has joined; one of them has a planner too. The weight store, the gateway
# and people's commands are the head's alone.
HOST_ROLES = frozenset(
    ["engine", "hybrid", "node", "rank", "rollout", "sandbox", "scoring", "trainer", "worker"]
)
# "person" is a command of the mesh's own user, at its head.
ROLES = HOST_ROLES | {"gateway", "person", "planner", "weights"}
PLANNER_ROLE = "planner"

# Who holds a token, and is no process of the mesh: the gateway's front door alone knows its key.
CLIENT = "client"
# Who holds a host's token: it joins, and asks about itself.
JOINER = "joiner"

# Whoever computes on a gang, and has tensors.
_INSTANCES = ("engine", "hybrid", "rank", "scoring", "trainer")
# Who has files of a job to read, and may be given damaged bytes; for a sandbox its host's agent.
_FILE_READERS = (*_INSTANCES, "node", "rollout")

_TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    # what a worker asks of the role process that it started
    "RoleControl": {"drain set_tier": ("worker",)},
    "Engine": {
        "attach submit abort move_cache": ("rollout",),
        "export_cache": ("engine",),  # one that takes over a session
        "look_up_chunks": ("engine",),  # one of another host, which looks for a prefix
        "notify_change": ("trainer",),  # a step was committed
    },
    "Node": {
        "notify_change": ("planner",),  # the host is to run other shards and sandboxes
        "list_logs read_log": ("person",),
    },
    # whatever else a person may call, and whose jobs it reaches, the gateway decides by the token
    "Gateway": {
        "upload put finish jobs job events stop delete model read versions": (CLIENT,),
        "join leave drain back remaining whereabouts membership": (JOINER,),
    },
    "Ranks": {
        "stand_by form_group begin_step compute_round add_gradient": ("trainer",),
        "update_settings apply_gradient score_bin stage_rows finish_staging": ("trainer",),
        "save_rows finish_saving restore_rows load_weights execute_sleep_order": ("trainer",),
    },
    # code of a job's author and of the model runs there: its shards alone bring any
    "Sandbox": {"load_job run_tools score_trajectories end_sessions": ("rollout",)},
    "Scoring": {"score_sequences judge_texts": ("rollout",)},
    "Trainer": {
        "join_hybrid leave_hybrid lease_round complete_round": ("hybrid",),
        "restage_version": ("engine", "hybrid"),  # who cannot load the current version
        "join_broadcast": ("engine", "hybrid"),  # who loads it on another host than the store's
    },
    "Weights": {
        "stage_version save_checkpoint load_checkpoint assemble_checkpoint": ("trainer",),
        "list_older_checkpoints quarantine_checkpoint": ("trainer",),
        "remove_unfinished_checkpoints": ("trainer",),
        "fetch_manifest assign_sources fetch_deltas": _INSTANCES,  # who loads a version
        "append_lines": ("engine", "rollout", "trainer"),
        "begin_deltas stage_deltas": ("rank", "trainer"),  # who stages a version
        "acknowledge_version": ("engine", "hybrid"),  # who receives one version after the other
        "publish_files verify_chunk": _FILE_READERS,
    },
    "Worker": {
        "notify_change": ("planner",),  # its gang has another record
        # the role processes that it has started keep their tensors there
        "create_segment find_segment delete_segment": _INSTANCES,
        "acquire_slice release_slice": _INSTANCES,  # of rank 0's worker
        "kill_instance": ("worker",),  # rank 0's, where a turn was not given back
    },
}
CALL_PERMISSIONS: CallPermissions = {
    f"{interface}.{method}": frozenset(roles)
    for interface, rows in _TABLE.items()
    for methods, roles in rows.items()
    for method in methods.split()
}
