"""Trace events in Chrome's format, as ui.perfetto.dev opens them: processes, tracks and spans.

Simultaneous spans on a track go to lanes of their own, so that spans of a lane nest or follow each
other. Times are whole microseconds from the trace's start, so parts of a span meet.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

TraceEvent = dict[str, Any]
BarPart = tuple[str, float]  # its name, empty for a gap, and its milliseconds


class BarShape(Enum):
    """Shape in which a bar is drawn."""

    NESTED = "nested"  # its parts within a span of its name
    PARTS = "parts"  # its parts alone
    WHOLE = "whole"  # the span alone


@dataclass(frozen=True)
class TraceBar:
    """Span with its consecutive parts from its start."""

    name: str
    start_s: float  # wall
    parts: Sequence[BarPart]
    args: Mapping[str, Any] = field(default_factory=dict)
    category: str = ""
    shape: BarShape = BarShape.NESTED

    @property
    def end_s(self) -> float:
        """Wall time of the end, in seconds."""
        return self.start_s + sum(ms for _, ms in self.parts) / 1000


@dataclass
class TraceProcess:
    """Group of tracks under one name."""

    pid: int
    name: str
    thread_count: int = 0


class TrackWriter:
    """Writer of events for one trace, which begins at `started_s` (wall)."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._processes: dict[str, TraceProcess] = {}

    def open_process(self, name: str) -> tuple[TraceProcess, list[TraceEvent]]:
        """Return the process of that name, and the events that name it if it is new."""
        found = self._processes.get(name)
        if found is not None:
            return found, []
        process = self._processes[name] = TraceProcess(len(self._processes) + 1, name)
        order = {"sort_index": process.pid}
        return process, [
            _make_metadata("process_name", process.pid, 0, {"name": name}),
            _make_metadata("process_sort_index", process.pid, 0, order),
        ]

    def draw_bars(self, process: str, track: str, bars: Sequence[TraceBar]) -> Iterator[TraceEvent]:
        """Yield the events of bars, on as many lanes of a track as they need."""
        of, named = self.open_process(process)
        yield from named
        first, lanes = of.thread_count + 1, 0
        free: list[tuple[int, int]] = []  # when a lane is free again, and its number
        idle: list[int] = []
        for bar in sorted(bars, key=lambda bar: (bar.start_s, bar.name)):
            ms, edges = (
                0.0,
                [self.to_trace_us(bar.start_s)],
            )  # where its parts begin, and the last one ends
            for _, more in bar.parts:
                ms += more
                edges.append(edges[0] + round(1000 * ms))
            while free and free[0][0] <= edges[0]:
                heapq.heappush(idle, heapq.heappop(free)[1])
            if idle:
                lane = heapq.heappop(idle)
            else:
                lane, lanes = lanes, lanes + 1
                of.thread_count += 1
                tid = first + lane
                thread_name = f"{track} {lane + 1}" if lane else track
                yield _make_metadata("thread_name", of.pid, tid, {"name": thread_name})
                yield _make_metadata("thread_sort_index", of.pid, tid, {"sort_index": tid})
            heapq.heappush(free, (edges[-1], lane))
            yield from _draw_bar(bar, edges, of.pid, first + lane)

    def draw_instant(
        self, process: str, tid: int, name: str, at_s: float, args: Mapping[str, Any]
    ) -> Iterator[TraceEvent]:
        """Yield a moment on a track that `draw_bars` has made; 0: of the whole process."""
        of, named = self.open_process(process)
        yield from named
        scope = "t" if tid else "p"
        about = {"name": name, "cat": process, "ph": "i", "s": scope, "ts": self.to_trace_us(at_s)}
        yield about | {"pid": of.pid, "tid": tid, "args": dict(args)}

    def to_trace_us(self, wall_s: float) -> int:
        """Return microseconds from the trace's start."""
        return max(0, round(1e6 * (wall_s - self._started_s)))


def _draw_bar(bar: TraceBar, edges: Sequence[int], pid: int, tid: int) -> Iterator[TraceEvent]:
    args, category = dict(bar.args), bar.category or bar.name
    if bar.shape is not BarShape.PARTS:
        yield _make_span(bar.name, category, edges[0], edges[-1], pid, tid) | {"args": args}
    if bar.shape is BarShape.WHOLE:
        return
    for (name, _), start, end in zip(bar.parts, edges, edges[1:], strict=False):
        if name and end > start:
            span = _make_span(name, category, start, end, pid, tid)
            if bar.shape is BarShape.PARTS:
                span["args"] = args
            yield span


def _make_span(name: str, category: str, start: int, end: int, pid: int, tid: int) -> TraceEvent:
    about: TraceEvent = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start}
    about["pid"], about["tid"] = pid, tid
    return about


def _make_metadata(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> TraceEvent:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": dict(args)}
