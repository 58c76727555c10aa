"""Time slices of a mesh's gangs in the last seconds, for `meshrl top`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshrl.common.api.node import SliceExplanation
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.view.mesh.slice_lanes import SLICE, LaneSpan, build_lane

WINDOW_S = 30.0  # of a frame


@dataclass(frozen=True)
class GangSlicesFrame:
    """Time slices of one gang. Times of spans are seconds of the wall clock."""

    gang: str
    policy: str = ""  # of its slice scheduler
    start_s: float = 0.0  # of the window
    end_s: float = 0.0
    # accelerator-seconds in the window: of slices, by job and function, and of switches
    accelerator_s: dict[str, dict[str, float]] | None = None
    switch_s: float = 0.0
    hidden_share: float | None = None  # of loaded bytes; None: nothing was loaded
    spans: tuple[LaneSpan, ...] = ()
    error: str = ""  # why there is nothing


def build_slices_frame(gang: Gang, found: SliceExplanation, now_s: float) -> GangSlicesFrame:
    """Return the frame of a gang from its scheduler's history, with the roles of instances."""
    instances = {instance.id: instance for instance in gang.instances}
    lane = build_lane(found, now_s).clip(now_s - WINDOW_S, now_s)
    accelerator_s: dict[str, dict[str, float]] = {}
    spans, switch_s = [], 0.0
    for span in lane.spans:
        instance = instances.get(span.instance)
        ranks = len(instance.ranks) if instance is not None else 1
        role = str(instance.role) if instance is not None else ""
        spans.append(replace(span, role=role))
        if span.kind == SLICE:
            of = accelerator_s.setdefault(span.job, {})
            seconds = of.get(span.function, 0.0) + ranks * span.duration_s
            of[span.function] = round(seconds, 3)
        else:
            switch_s += ranks * span.duration_s
    return GangSlicesFrame(
        gang.id,
        found.policy,
        now_s - WINDOW_S,
        now_s,
        accelerator_s,
        round(switch_s, 3),
        lane.hidden_share,
        tuple(spans),
    )
