"""What the planner has decided, from its events: what, by which rule, and from which figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.state.events import Event
from common.state.pool.workers.rows import Role, Tier
from meshrl.view.history.held import ADMISSION

# What a decision's event has beside the figures that decided it.
ABOUT = frozenset(
    ("gang", "resident", "job", "role", "core", "tier", "generation", "epoch", "reason", "pinned")
) | {"workers", "from_role", "from_job", "turns", "op", "ranks", "token", "held", "before", "rule"}
SHOWN = 6  # figures of one decision in a line


@dataclass(frozen=True)
class Decision:
    """One decision, with what it came from."""

    ms: int
    job: str
    gang: str
    what: str  # "rollout on w1"
    rule: str
    inputs: Mapping[str, Any]

    @property
    def text(self) -> str:
        """It in a line."""
        said = figures(self.inputs)
        return f"{self.what}: {self.rule or 'no rule is given'}" + (f" ({said})" if said else "")


def figures(named: Mapping[str, Any], most: int = SHOWN) -> str:
    """Figures in a line, the first ones of many."""
    every = list(named.items())
    more = f", and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(f"{name} {_figure(value)}" for name, value in every[:most]) + more


def decisions(events: Iterable[Event], job: str = "", gang: str = "") -> Iterator[Decision]:
    """Those among events, of one job or one gang if asked, in their order."""
    for event in events:
        found = _decision(event)
        if found is not None and job in ("", found.job) and gang in ("", found.gang):
            yield found


def _decision(event: Event) -> Decision | None:
    f = event.fields
    if event.kind == "desired":
        of, gang = str(f.get("job", "")), str(f["gang"])
        return Decision(event.ms, of, gang, _wish(f), str(f["reason"]), _inputs(f))
    if event.kind == ADMISSION:
        what = str(f["held"]) or "it runs"
        return Decision(event.ms, str(f["job"]), "", what, str(f["rule"]), _inputs(f))
    return None


def _inputs(f: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in f.items() if k not in ABOUT and v not in ("", None)}


def _wish(f: Mapping[str, Any]) -> str:
    """What is to be where."""
    on = ", ".join(f["workers"])
    if f["role"] == Role.IDLE:
        return f"{f.get('from_role') or 'what was there'} leaves {on}"
    role = "core" if f.get("core") else str(f["role"])
    tier = f["tier"]
    asleep = {Tier.ACCELERATOR: "", Tier.ABSENT: ", as a checkpoint"}.get(
        tier, f", asleep in {tier}"
    )
    return f"{role} on {on}{asleep}"


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
