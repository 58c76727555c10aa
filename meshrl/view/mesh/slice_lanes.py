"""Lanes of time slices: which instances compute on a gang's accelerators, and its switches.

A lane comes from the notes that a run's processes write of their own slices, or from a gang's slice
scheduler. Notes of a run name no other job.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshrl.common.api.node import SliceExplanation
from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.common.state.pool.workers.rows import Tier

TRACE_DIRECTORY = "trace"
NOTE_PATTERN = "slices-*.jsonl"
MAX_NOTES = 20_000  # of a process, the last ones: about an hour of an engine's slices
OTHER_JOB = "another job"
MIN_SPAN_S = 0.001  # of switches and other jobs: shorter ones are calls to the scheduler
SLICE, SWITCH, OTHER = "slice", "switch", "other"  # kinds of spans
SliceNote = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Span of a lane; times are seconds of the wall clock."""

    kind: str  # one of SLICE, SWITCH, OTHER
    start_s: float
    end_s: float
    job: str = ""  # empty in a run's own notes
    instance: str = ""
    role: str = ""  # kind of the process; empty in a scheduler's history
    function: str = ""
    loaded_bytes: int = 0  # of a switch
    hidden_bytes: int = 0  # loaded before it, while others computed
    ranks: int = 1  # of the gang; a run's own notes do not have them

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """Short text for people."""
        if self.kind == OTHER:
            return OTHER_JOB
        if self.kind == SWITCH:
            return f"switch to {self.instance}"
        owner = f"{self.job} {self.instance}" if self.job else self.instance
        return f"{self.function} of {owner}"


@dataclass(frozen=True, slots=True)
class GangLane:
    """Spans of one gang in the order of their starts."""

    gang: str
    spans: tuple[LaneSpan, ...]

    @property
    def switch_s(self) -> float:
        """Seconds of switches."""
        return sum(span.duration_s for span in self.spans if span.kind == SWITCH)

    @property
    def hidden_share(self) -> float | None:
        """Share of the loaded bytes that a prefetch had loaded; None: nothing was loaded."""
        return compute_hidden_share(
            sum(span.loaded_bytes for span in self.spans),
            sum(span.hidden_bytes for span in self.spans),
        )

    def clip(self, start_s: float, end_s: float) -> GangLane:
        """Return the part of the lane between two times."""
        return GangLane(
            self.gang,
            tuple(
                replace(span, start_s=max(start_s, span.start_s), end_s=min(end_s, span.end_s))
                for span in self.spans
                if span.end_s > start_s and span.start_s < end_s
            ),
        )


def compute_hidden_share(loaded_bytes: int, hidden_bytes: int) -> float | None:
    """Return the share of loaded bytes that prefetches hid; None: nothing was loaded."""
    total = loaded_bytes + hidden_bytes
    return hidden_bytes / total if total else None


def read_lanes(run_dir: Path) -> list[GangLane]:
    """Return the lanes of a run's gangs from its notes; torn or corrupt lines are skipped."""
    notes: list[SliceNote] = []
    for path in sorted((run_dir / TRACE_DIRECTORY).glob(NOTE_PATTERN)):
        notes += deque(iterate_rows(path), maxlen=MAX_NOTES)
    return build_lanes(notes)


def build_lanes(notes: Iterable[SliceNote]) -> list[GangLane]:
    """Return the lanes of a run's gangs from its slices.

    Where an instance waited for other jobs, and none of the run's computed, one of them did.
    """
    own: defaultdict[str, list[LaneSpan]] = defaultdict(list)
    waits: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for note in notes:
        wait_s, switch_s, slice_s = (float(ms) / 1000 for ms in note["parts"][1::2])
        chosen_s = float(note["at"]) + wait_s
        granted_s = chosen_s + switch_s
        gang = str(note["gang"])
        about = "", str(note["instance"]), str(note["role"]), str(note["function"])
        moved = int(note.get("loaded_bytes", 0)), int(note.get("hidden_bytes", 0))
        if switch_s >= MIN_SPAN_S or any(moved):
            own[gang].append(LaneSpan(SWITCH, chosen_s, granted_s, *about, *moved))
        own[gang].append(LaneSpan(SLICE, granted_s, granted_s + slice_s, *about))
        if float(note.get("other_jobs_s", 0.0)) >= MIN_SPAN_S:
            waits[gang].append((float(note["at"]), chosen_s))
    return [
        GangLane(gang, _sort(spans + _find_other_jobs(waits[gang], spans)))
        for gang, spans in sorted(own.items())
    ]


def _sort(spans: Iterable[LaneSpan]) -> tuple[LaneSpan, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))


def _find_other_jobs(
    waits: Sequence[tuple[float, float]], own: Sequence[LaneSpan]
) -> list[LaneSpan]:
    """Return the waits without a span of the run's own instances at the same time."""
    edges = [(at_s, 1, 0) for at_s, _ in waits] + [(end_s, -1, 0) for _, end_s in waits]
    edges += [(span.start_s, 0, 1) for span in own] + [(span.end_s, 0, -1) for span in own]
    found: list[LaneSpan] = []
    waiting = computing = 0
    began_s: float | None = None
    for at_s, wait_change, own_change in sorted(edges):
        waiting, computing = waiting + wait_change, computing + own_change
        is_other = waiting > 0 and computing == 0
        if is_other and began_s is None:
            began_s = at_s
        elif not is_other and began_s is not None:
            if at_s - began_s >= MIN_SPAN_S:
                found.append(LaneSpan(OTHER, began_s, at_s))
            began_s = None
    return found


def build_lane(explanation: SliceExplanation, now_s: float) -> GangLane:
    """Return the lane of a slice scheduler's gang; slices that go on end `now_s`."""
    spans = []
    for one in explanation.slices:
        loaded = sum(move.size_bytes for move in one.moves if move.target == Tier.ACCELERATOR)
        end_s = one.ended_s or max(now_s, one.granted_s)
        about = one.job, one.instance, "", one.function
        ran = LaneSpan(SLICE, one.granted_s, end_s, *about, ranks=len(one.ranks))
        if one.granted_s - one.chosen_s >= MIN_SPAN_S or loaded or one.hidden_bytes:
            moving = replace(ran, loaded_bytes=loaded, hidden_bytes=one.hidden_bytes)
            spans.append(replace(moving, kind=SWITCH, start_s=one.chosen_s, end_s=one.granted_s))
        spans.append(ran)
    return GangLane(explanation.gang, _sort(spans))
