"""Figures of all arms."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from loadtests.spot.arms import SpotArm

HOST_KEYS = ("late_share", "host_cores", "mesh_cores", "steal_cores", "load")


def compare(arms: Sequence[SpotArm]) -> dict[str, Any]:
    """Return flat figures; those of an arm that did not run are null."""
    by_name = {arm.name: arm for arm in arms}
    trace = by_name.get("trace")
    late = trace.joined if trace else []
    handovers = [seconds for arm in arms for seconds in arm.handovers_s]
    sampled = int(trace.summary["tokens_sampled"]) if trace else 0
    return {
        "ratio_reserved": divide_rates(trace, by_name.get("reserved")),
        "ratio_always": divide_rates(trace, by_name.get("always")),
        **{term: sum(int(arm.audit[term]) for arm in arms) for term in ("lost", "trained_twice")},
        "staleness_max": max(int(arm.summary["staleness_max"] or 0) for arm in arms),
        "tokens_redone": trace.tokens_redone if trace else None,
        "tokens_redone_share": round(trace.tokens_redone / sampled, 5) if trace else None,
        **describe_spread("first_token_s", [one.from_join_s for one in late]),
        **describe_spread("engine_first_token_s", [one.from_engine_s for one in late]),
        **describe_spread("join_s", [one.join_s for one in late]),
        "late_joiners": len(late),
        "handover_s": max(handovers, default=None),
        "handover_s_median": round(median(handovers), 4) if handovers else None,
        "handovers": len(handovers),
        "kills": trace.kills if trace else None,
        "kills_noticed": trace.noticed if trace else None,
        **{f"tokens_per_s_{arm.name}": round(arm.tokens_per_s, 2) for arm in arms},
        **{
            f"cost_per_million_tokens_{arm.name}": arm.summary["cost_per_million_tokens"]
            for arm in arms
        },
        **{f"run_s_{arm.name}": round(arm.rl_s, 1) for arm in arms},
        **{key: max(float(arm.host.get(key) or 0.0) for arm in arms) for key in HOST_KEYS},
        "valid": min(int(arm.host["valid"]) for arm in arms),
    }


def divide_rates(over: SpotArm | None, under: SpotArm | None) -> float | None:
    """Return the ratio of trained tokens per second; None without both arms."""
    if over is None or under is None:
        return None
    return round(over.tokens_per_s / under.tokens_per_s, 3)


def describe_spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the median and the maximum of the known values; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return {f"{name}_median": None, f"{name}_max": None}
    return {f"{name}_median": round(median(known), 2), f"{name}_max": round(max(known), 2)}
