"""How long a job has waited, and was paused: while its mesh was up."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.state.events import Event
from meshrl.view.history.held import held_s
from meshrl.view.recording.usage import Tally


def admission(second: int, held: str) -> Event:
    fields = {"job": "a", "held": held, "rule": "r"}
    return Event(f"{second}-0", second * 1000, "admission", fields)


EVENTS = [
    admission(10, "waiting: no worker is free"),
    admission(40, "paused: b goes first"),
    admission(100, ""),
    admission(200, "paused: b goes first"),
]


def test_each_state_lasts_to_the_next_and_the_last_one_to_the_end() -> None:
    assert held_s(EVENTS, "a") == {"waiting": 30.0, "paused": 60.0}
    assert held_s(EVENTS, "a", 230_000) == {"waiting": 30.0, "paused": 90.0}


def test_nobody_waits_while_the_mesh_is_down(tmp_path: Path) -> None:
    tally = Tally()
    for began, last in ((0, 15), (0, 20), (30, 50), (90, 300)):
        tally.see_session(began * 1000, last * 1000)
        tally.write(tmp_path / "usage.json", 0.0)
        tally = Tally.read(tmp_path / "usage.json")
    assert held_s(EVENTS, "a", 230_000, tally.sessions) == {"waiting": 20.0, "paused": 50.0}
