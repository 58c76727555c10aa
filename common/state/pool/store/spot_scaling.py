"""Plan of the planner for the pool's spot hosts, and the launcher's report on it.

The planner writes the plan with its memory, under its fencing token. All numbers are absolute, so a
plan that is read twice requests nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshrl.common.base.encoding.json_values import from_json_value
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

SCALER_KEY = f"{MESH_PREFIX}:scaler"  # the launcher's report
SCALING_FIELD = "scaling"  # of the planner's memory
RELEASED = "is given back to its provider"  # drain reason of a host that no job wants
SCALED_EVENT, FAILED_EVENT = "scaled", "scaler_failed"


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """Spot hosts that the pool is to have, with what the next pass needs. Times are Redis' ms."""

    hosts: int = 0  # to exist, those of `release` not among them
    present: int = 0  # that are up
    release: tuple[str, ...] = ()  # hosts without instances that may go
    reason: str = ""  # sentence: the jobs' demand, and what limits it
    since_ms: int = 0  # of the first plan of this memory
    surplus_since_ms: int = 0  # since when fewer hosts are wanted; 0: they are not
    idle_since_ms: Mapping[str, int] = field(default_factory=dict)  # by host without instances
    # by job that left spot workers idle: the number that it had, and until when it gets no others
    declined: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScalerReport:
    """Last request of the launcher to the provider of spot hosts, for users."""

    hosts: int  # requested
    present: int  # that are up
    release: tuple[str, ...] = ()  # hosts that drain and go
    reason: str = ""  # see `ScalingPlan`
    dry_run: bool = False
    error: str = ""  # of the last request; empty: it succeeded
    failures: int = 0  # in a row
    retry_ms: int = 0  # wall clock of the next request after a failure


def decode_scaling_plan(memory: Mapping[str, Any]) -> ScalingPlan | None:
    """Return the plan in the planner's memory; None if there is none yet."""
    found = memory.get(SCALING_FIELD)
    return None if found is None else from_json_value(ScalingPlan, found)


async def write_scaler_report(state: StateClient, report: ScalerReport | None) -> None:
    """Replace the launcher's report; None removes it."""
    if report is None:
        await state.run_command("DEL", SCALER_KEY)
    else:
        await state.run_command("SET", SCALER_KEY, json.dumps(asdict(report)))


async def read_scaler_report(state: StateClient) -> ScalerReport | None:
    """Return the launcher's report; None if the mesh has no scaler."""
    text = await state.run_command("GET", SCALER_KEY)
    if not text:
        return None
    row = json.loads(text)
    return ScalerReport(**row | {"release": tuple(row["release"])})
