"""A host that is ephemeral is away from when it was first missed, and in a row."""

from __future__ import annotations

from meshrl.launch.head.admitting import Absences


def test_a_host_is_away_for_long_when_no_look_in_between_has_found_it() -> None:
    absences = Absences(10.0)
    assert absences.look(["a", "b"], ["a"], 100.0) == {}
    assert absences.look(["a", "b"], [], 105.0) == {}
    assert absences.look(["a", "b"], ["b"], 109.0) == {}, "it is back"
    assert absences.look(["a", "b"], [], 116.0) == {"a": 11.0}
    assert absences.look(["b"], [], 126.5) == {"b": 10.5}, (
        "one that is let out is looked at no more"
    )


def test_while_nobody_can_be_found_nobody_is_away() -> None:
    absences = Absences(10.0)
    absences.look(["a"], [], 100.0)
    absences.begin_anew()
    assert absences.look(["a"], [], 200.0) == {}
    assert absences.look(["a"], [], 211.0) == {"a": 11.0}
