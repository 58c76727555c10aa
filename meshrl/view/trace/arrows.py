"""Arrows of a trace: from the trajectory by which a group was whole to the step that trained it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from meshrl.view.trace.tracks import Event

ABOUT = {"name": "trained", "cat": "trained"}


class Arrows:
    """Sees the spans of a trace as they are made."""

    def __init__(self) -> None:
        self._steps: dict[int, Event] = {}
        self._whole: dict[int, Event] = {}  # by group, its trajectory that ended last

    def steps(self, events: Iterable[Event]) -> Iterator[Event]:
        """Passes the trainer's events on."""
        for event in events:
            if event["ph"] == "X" and event["name"] == f"step {event.get('args', {}).get('step')}":
                self._steps[event["args"]["step"]] = event
            yield event

    def trajectories(self, events: Iterable[Event]) -> Iterator[Event]:
        """Passes a shard's events on."""
        for event in events:
            if event["ph"] == "X" and "group" in event.get("args", {}):
                group = event["args"]["group"]
                before = self._whole.get(group)
                if before is None or _end(event) > _end(before):
                    self._whole[group] = event
            yield event

    def drawn(self, trained: Mapping[int, int]) -> Iterator[Event]:
        """The arrows; `trained` says by group which step took it."""
        for group, source in self._whole.items():
            step = self._steps.get(trained.get(group, -1))
            if step is None or _end(step) <= _end(source):
                continue  # clocks of hosts that differ, or a lineage that was abandoned
            where = {"id": group, "pid": source["pid"], "tid": source["tid"]}
            yield ABOUT | where | {"ph": "s", "ts": max(source["ts"], _end(source) - 1)}
            where = {"id": group, "pid": step["pid"], "tid": step["tid"]}
            yield ABOUT | where | {"ph": "f", "bp": "e", "ts": max(step["ts"], _end(source))}


def _end(span: Event) -> int:
    return int(span["ts"]) + int(span["dur"])
