"""Moves as people see them: what was predicted, what came of it, and why none is made now."""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.events import Event, order
from meshrl.common.state.pool.store.explained import JUDGED, Explained, Judged, judged_of

MOST = 10  # judged moves that are shown, the last ones


def judged(events: Iterable[Event], subject: str = "") -> list[Judged]:
    """The last moves that were judged: of a job, a gang or a resident, or of all, oldest first."""
    found = (judged_of(event.ms, event.fields) for event in events if event.kind == JUDGED)
    return [m for m in found if subject in ("", m.job, m.resident, m.gang)][-MOST:]


def merged(*sources: Iterable[Event]) -> list[Event]:
    """Events of several sources, each once, in their order."""
    found = {event.id: event for source in sources for event in source if event.kind == JUDGED}
    return sorted(found.values(), key=lambda event: order(event.id))


def seconds(value: float | None) -> str:
    """Three digits of it; a dash where it is not known."""
    return "-" if value is None else f"{value:.3g} s"


def outcome(move: Judged) -> str:
    """Whether it paid, and whether it was undone and why."""
    paid = "paid" if move.paid else "did not pay"
    if not move.undone:
        return paid
    return f"{paid}, undone" + (f": {move.reason}" if move.reason else "")


def line(move: Judged) -> str:
    """What came of a move, as a line of news."""
    times = f"{seconds(move.observed_s)} a step, predicted {seconds(move.predicted_s)}"
    without = "" if move.expected_s is None else f", {seconds(move.expected_s)} without it"
    return f"the move of {move.gang} to {move.to} {outcome(move)}: {times}{without}"


def present(told: Explained) -> list[str]:
    """What is predicted of a job's steps as its workers are divided now, and why nothing moves."""
    parts = {
        "rollout": told.rollout_s,
        "training": told.train_s,
        "the host's cores": told.host_s,
    }
    said = ", ".join(f"{name} {seconds(value)}" for name, value in parts.items() if value)
    found = []
    if told.step_s:
        found.append(f"a step is predicted to take {seconds(told.step_s)}" + (said and f": {said}"))
    if told.binds:
        found.append(f"what binds is {told.binds}")
    if told.error is not None:
        found.append(f"predictions of moves were off by {100 * told.error:.0f} % (median)")
    return found + [said for said in (told.verdict, told.ranks) if said]
