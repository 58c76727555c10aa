"""Figures of one elastic job: the planner's time over static splits', and what its moves cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.paced.running import Arm, honest, ratio_span

BEST, WORST = 1.05, 0.77  # our time over the best static split's, and over the worst one's
SPAN = 3.0  # T_rollout / T_train must move by so much, or there was nothing to follow
SWITCH_SHARE, PLANNER_CPU_SHARE = 0.035, 0.02
WALL_S = 720.0  # of all arms


def figures(planner: Arm, statics: Sequence[Arm], workers: int, wall_s: float) -> dict[str, Any]:
    """Flat; `ratio_span` is the largest of the static splits': each says at least how far the ratio
    has moved, and most of it where training just binds at first.
    """
    ordered = sorted(statics, key=lambda arm: arm.rl_s)
    span = max(map(ratio_span, statics))
    found = {
        "wall_s": round(wall_s, 1),
        "planner_s": round(planner.rl_s, 1),
        **{f"{arm.name}_s": round(arm.rl_s, 1) for arm in statics},
        "ratio_best_static": round(planner.rl_s / ordered[0].rl_s, 4),
        "ratio_worst_static": round(planner.rl_s / ordered[-1].rl_s, 4),
        "ratio_span": round(span, 2),
        **moved(planner, workers),
        **honest([planner, *statics]),
    }
    found["valid"] = int(bool(found["valid"]) and span >= SPAN and wall_s <= WALL_S)
    return found


def moved(arm: Arm, workers: int) -> dict[str, Any]:
    """What an arm's moves were worth and cost; None where there were none."""
    took, judged = arm.switches_s, arm.judged
    return {
        "moves": len(arm.moves),
        "judged": len(judged),
        "paid": sum(bool(told.get("paid")) for told in judged),
        "undone": sum(bool(told.get("undone")) for told in judged),
        "switch_s": round(statistics.median(took), 2) if took else None,
        "switch_share": round(sum(took) / (workers * arm.rl_s), 4),
        "planner_cpu_share": round(arm.planner_cpu_s / arm.cpu_s, 4),
    }


def good(found: Mapping[str, Any]) -> bool:
    """Whether a valid run reached what is asked."""
    return bool(
        found["valid"]
        and found["moves"] >= 1
        and found["ratio_best_static"] <= BEST
        and found["ratio_worst_static"] <= WORST
        and found["switch_share"] <= SWITCH_SHARE
        and found["planner_cpu_share"] <= PLANNER_CPU_SHARE
    )
