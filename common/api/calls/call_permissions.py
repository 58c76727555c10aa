"""Permissions of roles to call methods of the mesh's processes.

A role is the kind of a process, which the caller proves by its key. Methods that are not listed
cannot be called. A process without permissions (an environment process) has no key.
"""

from __future__ import annotations

from collections.abc import Mapping

CallPermissions = Mapping[str, frozenset[str]]

# Roles on a joined host; one host also has a planner. The weight store, the gateway and users'
# commands run only on the head.
HOST_ROLES = frozenset(
    ["engine", "hybrid", "node", "rank", "rollout", "sandbox", "scoring", "trainer", "worker"]
)
# "person" is a command of the mesh's own user, at its head.
ROLES = HOST_ROLES | {"gateway", "person", "planner", "weights"}
PLANNER_ROLE = "planner"

# Holder of an access token outside the mesh: only the gateway's front listener knows its key.
CLIENT = "client"
# Holder of a host's token, which joins and queries its own membership.
JOINER = "joiner"

# Role processes on a gang, which have tensors.
_INSTANCES = ("engine", "hybrid", "rank", "scoring", "trainer")
# Readers of a job's files, which may receive corrupt bytes; for a sandbox its host's agent.
_FILE_READERS = (*_INSTANCES, "node", "rollout")

_TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    # calls of a worker to the role process that it started
    "RoleControl": {
        "drain set_tier move_kinds cancel_move describe_kinds unmap_segment": ("worker",)
    },
    "Engine": {
        "attach submit abort move_cache": ("rollout",),
        "export_cache": ("engine",),  # an engine that takes over a session
        "look_up_chunks": ("engine",),  # an engine on another host, which looks up a prefix
        "notify_change": ("trainer",),  # a step was committed
    },
    "Node": {
        "notify_change": ("planner",),  # the host's assigned shards and sandboxes have changed
        "list_logs read_log": ("person",),
    },
    # the gateway decides by the token which jobs a client can access
    "Gateway": {
        "upload put finish jobs job events stop delete model read versions": (CLIENT,),
        "join leave drain notice back remaining whereabouts membership": (JOINER,),
    },
    "Ranks": {
        "stand_by form_group create_model begin_step compute_round": ("trainer",),
        "update_settings fetch_gradient add_gradient apply_gradient": ("trainer",),
        "score_bin stage_rows finish_staging save_rows finish_saving": ("trainer",),
        "restore_rows load_weights execute_sleep_order": ("trainer",),
    },
    "Rollout": {"encode_held_out": ("trainer",)},
    # code of a job's author and of the model runs there: only its shards send any
    "Sandbox": {"load_job run_tools score_trajectories end_sessions": ("rollout",)},
    "Scoring": {"score_sequences judge_texts": ("rollout",)},
    "Trainer": {
        "join_hybrid leave_hybrid lease_round complete_block": ("hybrid",),
        "restage_version": ("engine", "hybrid"),  # a process that cannot load the current version
        # a process that loads it on another host than the store's
        "join_broadcast": ("engine", "hybrid"),
    },
    "Weights": {
        "stage_version save_checkpoint load_checkpoint assemble_checkpoint": ("trainer",),
        "list_older_checkpoints quarantine_checkpoint": ("trainer",),
        "remove_unfinished_checkpoints": ("trainer",),
        "fetch_manifest assign_sources fetch_deltas": _INSTANCES,  # processes that load a version
        "append_lines": ("engine", "rollout", "trainer"),
        "begin_deltas stage_deltas": ("rank", "trainer"),  # processes that stage a version
        "acknowledge_version": ("engine", "hybrid"),  # processes that receive every version
        "publish_files verify_chunk": _FILE_READERS,
    },
    "Worker": {
        "notify_change": ("planner",),  # its gang's record has changed
        # its role processes offload their tensors there
        "create_segment commit_segment find_segment discard_segment delete_segment": _INSTANCES,
        # of rank 0's worker; a worker makes room for an instance that starts
        "acquire_slice release_slice": (*_INSTANCES, "worker"),
        "prepare_residency read_residency": ("worker",),  # rank 0's worker
        "explain_slices": ("person",),  # of rank 0's worker
        "kill_instance": ("worker",),  # of rank 0, if a time slice was not released
    },
}
CALL_PERMISSIONS: CallPermissions = {
    f"{interface}.{method}": frozenset(roles)
    for interface, rows in _TABLE.items()
    for methods, roles in rows.items()
    for method in methods.split()
}
