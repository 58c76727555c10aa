"""Moves as people see them: what was predicted, what came of it, and why none is made now."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from rich.table import Table

from common.pool.explained import JUDGED, Explained, Judged, judged_of
from common.records import lines
from common.state.events import Event, order
from meshrl.observe.live import printing
from meshrl.observe.recording.recorded import EVENTS, event_of

MOST = 10  # judged moves that are shown, the last ones


def judged(events: Iterable[Event], subject: str = "") -> list[Judged]:
    """The last moves that were judged: of a job, a gang or a resident, or of all, oldest first."""
    found = (judged_of(event.ms, event.fields) for event in events if event.kind == JUDGED)
    return [m for m in found if subject in ("", m.job, m.resident, m.gang)][-MOST:]


def recorded(run_dir: Path) -> list[Event]:
    """What the record of a run on this host tells of judged moves: Redis keeps what has happened
    for some minutes only.
    """
    return [
        event_of(row)
        for row in lines.whole(run_dir / EVENTS, f'"{JUDGED}"')
        if row["kind"] == JUDGED
    ]


def merged(*sources: Iterable[Event]) -> list[Event]:
    """Events of several sources, each once, in their order."""
    found = {event.id: event for source in sources for event in source if event.kind == JUDGED}
    return sorted(found.values(), key=lambda event: order(event.id))


def table(moves: Iterable[Judged]) -> Table:
    """A row a move; times are seconds a step."""
    made = printing.table(*_COLUMNS, wraps=_COLUMNS[-1:])
    for move in moves:
        made.add_row(
            datetime.fromtimestamp(move.ms / 1000).strftime("%H:%M:%S"),
            "" if move.step is None else str(move.step),
            move.gang,
            f"{move.was} -> {move.to}",
            move.policy,
            *map(seconds, (move.before_s, move.expected_s, move.predicted_s, move.observed_s)),
            seconds(move.regret_s),
            outcome(move),
        )
    return made


_COLUMNS = (
    *("judged", "step", "gang", "moved", "rule"),
    *("before", "without", "predicted", "observed", "regret", "outcome"),
)


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
