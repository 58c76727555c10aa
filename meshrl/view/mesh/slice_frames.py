"""Time slices of a mesh's gangs in the last seconds, for `meshrl top` and the live views."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshrl.common.api.node import RETAINED_SLICES, SliceCandidate, SliceExplanation
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.view.mesh.slice_lanes import SLICE, LaneSpan, build_lane

WINDOW_S = 30.0  # of a frame


@dataclass(frozen=True)
class InstanceUse:
    """Use of a gang's accelerators by one instance."""

    instance: str
    job: str
    role: str  # empty: the instance has left the gang
    accelerator_s: dict[str, float]  # accelerator-seconds of its slices, by function


@dataclass(frozen=True)
class GangSlicesFrame:
    """Time slices of one gang. Times of spans are seconds of the wall clock."""

    gang: str
    policy: str = ""  # of its slice scheduler
    start_s: float = 0.0  # of the window, which lasts WINDOW_S or has all retained slices
    end_s: float = 0.0
    workers: int = 1
    switch_s: float = 0.0  # accelerator-seconds of switches
    hidden_share: float | None = None  # of loaded bytes; None: nothing was loaded
    uses: tuple[InstanceUse, ...] = ()  # of instances in time slices, by id
    spans: tuple[LaneSpan, ...] = ()
    waiting: tuple[SliceCandidate, ...] = ()  # requests at the end of the window, best first
    error: str = ""  # why there is nothing


def build_slices_frame(gang: Gang, found: SliceExplanation, now_s: float) -> GangSlicesFrame:
    """Return the frame of a gang from its scheduler's history, with the roles of instances."""
    start_s = now_s - WINDOW_S
    if len(found.slices) >= RETAINED_SLICES:
        start_s = max(start_s, found.slices[0].chosen_s)
    lane = build_lane(found, now_s).clip(start_s, now_s)
    sliced = sorted((one for one in gang.instances if one.time_sliced), key=lambda one: one.id)
    uses = {one.id: InstanceUse(one.id, one.job, str(one.role), {}) for one in sliced}
    spans, switch_s = [], 0.0
    for span in lane.spans:
        use = uses.setdefault(span.instance, InstanceUse(span.instance, span.job, "", {}))
        spans.append(replace(span, role=use.role))
        seconds = span.ranks * span.duration_s
        if span.kind == SLICE:
            seconds += use.accelerator_s.get(span.function, 0.0)
            use.accelerator_s[span.function] = seconds
        else:
            switch_s += seconds
    return GangSlicesFrame(
        *(gang.id, found.policy, start_s, now_s, len(gang.workers), switch_s, lane.hidden_share),
        *(tuple(uses.values()), tuple(spans), tuple(found.waiting)),
    )
