"""Invariants of every trace for Perfetto."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
NEEDED = {"ph", "ts", "pid", "tid", "name"}


def check_trace(events: Iterable[Event]) -> None:
    """Check that events are complete and spans of each track nest or follow each other.

    The parts of a trajectory must fill its span, one after the other.
    """
    by_track: dict[tuple[int, int], list[Event]] = defaultdict(list)
    arrows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        assert event.keys() >= NEEDED, event
        assert event["ph"] in ("M", "X", "i", "s", "f"), event
        assert isinstance(event["ts"], int) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0, event
            by_track[event["pid"], event["tid"]].append(event)
        if event["ph"] in ("s", "f"):
            arrows[event["id"]].append(event)
    for ends in arrows.values():
        source, target = ends
        assert (source["ph"], target["ph"]) == ("s", "f") and source["ts"] <= target["ts"], ends
        assert all(_is_within(end, by_track[end["pid"], end["tid"]]) for end in ends), ends
    for spans in by_track.values():
        _check_nesting(spans)
        _check_parts([span for span in spans if span["cat"] == "trajectory"])


def _is_within(moment: Event, spans: list[Event]) -> bool:
    return any(span["ts"] <= moment["ts"] <= span["ts"] + span["dur"] for span in spans)


def _check_nesting(spans: list[Event]) -> None:
    open_until: list[int] = []
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        start, end = span["ts"], span["ts"] + span["dur"]
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], span
        open_until.append(end)


def _check_parts(spans: list[Event]) -> None:
    whole = [span for span in spans if "args" in span]
    parts = sorted((span for span in spans if "args" not in span), key=lambda s: s["ts"])
    for one in whole:
        start, end = one["ts"], one["ts"] + one["dur"]
        inside = [p for p in parts if start <= p["ts"] < end]
        at = start
        for part in inside:
            assert part["ts"] == at, (one, part)
            at += part["dur"]
        assert at == end, one


def list_spans(events: Iterable[Event], process: str) -> list[Event]:
    """Return the spans of a process, by its name."""
    every = list(events)
    pids = {
        event["pid"]
        for event in every
        if event["name"] == "process_name" and event["args"]["name"] == process
    }
    return [event for event in every if event["ph"] == "X" and event["pid"] in pids]
