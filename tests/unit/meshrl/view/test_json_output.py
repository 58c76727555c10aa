"""JSON output of commands, with deprecated keys beside the current ones."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

from meshrl.common.state.pool.workers.rows import (
    ExpertSplit,
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
)
from meshrl.view.json_output import DEPRECATED_KEYS, to_json_document


def test_deprecated_keys_repeat_the_values_of_current_ones_at_any_depth() -> None:
    report = InstanceReport(0, 1, 1, 7, InstancePhase.READY, Tier.MEMORY)
    instance = Instance(
        "g0.0", "job", Role.TRAINING, expert_split=ExpertSplit(1, 2, (3,)), reports={0: report}
    )
    found = json.loads(json.dumps(to_json_document([Gang("g0", ("w0",), 1, (instance,))])))
    [gang] = found
    assert gang["residents"] == gang["instances"] and gang["placed"] == gang["next_instance"]
    [one] = gang["instances"]
    assert (one["turns"], one["role"]) == (False, "training")
    assert one["apart"]["attention"] == one["expert_split"]["attention_ranks"] == 1
    assert one["reports"]["0"]["doing"] == one["reports"]["0"]["phase"] == "ready"
    assert one["reports"]["0"]["held"] == one["reports"]["0"]["usage"]


def test_deprecated_keys_belong_to_fields_and_collide_with_none() -> None:
    for kind, deprecated in DEPRECATED_KEYS.items():
        assert is_dataclass(kind)
        names = {one.name for one in fields(kind)}
        assert deprecated.keys() <= names and not names & set(deprecated.values()), kind
