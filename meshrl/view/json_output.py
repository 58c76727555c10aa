"""JSON output of commands: dataclasses as documents, with deprecated keys beside the current ones.

Scripts of users may read the deprecated keys, so both are printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.store.planner_reports import JobPrediction
from meshrl.common.state.pool.workers.rows import ExpertSplit, Gang, Instance, InstanceReport
from meshrl.view.mesh.host_rows import HostRow
from meshrl.view.mesh.mesh_frames import InstanceFrame, JobFrame, MeshFrame, MoveFrame

# Deprecated key of a field, by the field's current name.
DEPRECATED_KEYS: Mapping[type, Mapping[str, str]] = {
    JobRow: {
        "block_reason": "held",
        "blocked_since_ms": "held_ms",
        "created_ms": "since_ms",
        "slowest_progress_ms": "slowest_ms",
    },
    Gang: {"instances": "residents", "next_instance": "placed"},
    Instance: {"time_sliced": "turns", "expert_split": "apart", "desired_since_ms": "changed_ms"},
    InstanceReport: {"phase": "doing", "usage": "held"},
    ExpertSplit: {"attention_ranks": "attention", "hosted_experts": "hosted"},
    JobPrediction: {"bottleneck": "binds", "median_error": "error", "expert_split_reason": "ranks"},
    Credential: {"public_key": "public", "bulk_public_key": "bulk", "process": "name"},
    HostRow: {
        "instances": "residents",
        "accepted_services": "takes",
        "isolation_tiers": "tiers",
        "drain_reason": "draining",
        "redis_round_trip_ms": "trip_ms",
        "clock_offset_ms": "ahead_ms",
    },
    JobFrame: {
        "block_reason": "held",
        "no_progress_reason": "quiet",
        "rollout_tokens_per_s": "rolled_out_s",
        "trained_tokens_per_s": "trained_s",
        "prediction": "now",
    },
    InstanceFrame: {"instance": "resident", "desired_tier": "wanted", "activity": "doing"},
    MoveFrame: {
        "instance": "resident",
        "from_role": "was",
        "to_role": "to",
        "elapsed_s": "since_s",
        "remaining_s": "left_s",
    },
    MeshFrame: {"instances": "residents", "move_outcomes": "judged"},
}


def to_json_document(value: Any) -> Any:
    """Convert dataclasses, also nested ones, to values for `json.dumps`."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {one.name: to_json_document(getattr(value, one.name)) for one in fields(value)}
        deprecated = DEPRECATED_KEYS.get(type(value), {})
        return found | {old: found[name] for name, old in deprecated.items()}
    if isinstance(value, Mapping):
        return {key: to_json_document(one) for key, one in value.items()}
    return [to_json_document(one) for one in value] if isinstance(value, list | tuple) else value
