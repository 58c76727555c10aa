"""`meshrl status --why`: the last decisions about one thing, with rule and figures."""

from __future__ import annotations

from typing import Any

from meshrl.common.state.events import Event
from meshrl.view.history.decisions import MOST, about, told


def event(kind: str, number: int = 1, **fields: Any) -> Event:
    return Event(f"{number}-0", number, kind, fields)


def test_only_decisions_that_concern_it_are_found() -> None:
    events = [
        event("admission", job="a", held="waiting: two workers", rule="share", free=1),
        event("admission", job="b", held=""),
        event("desired", gang="g3", job="a", role="rollout", reason="default"),
        event("gang", gang="g3", workers=["w1", "w2"], formed=True, rule="default"),
        event("services", host="here", services=["rollout/a/0", "sandbox/b/0"]),
        event("step", job="a"),  # no decision
    ]
    assert [e.kind for e in about(events, "a")] == ["admission", "desired", "services"]
    assert [e.kind for e in about(events, "g3")] == ["desired", "gang"]
    assert [e.kind for e in about(events, "worker/w2")] == ["gang"]
    assert about(events, "c") == []


def test_the_last_ones_are_kept() -> None:
    events = [event("admission", n, job="a") for n in range(MOST + 5)]
    assert [e.ms for e in about(events, "a")] == list(range(5, MOST + 5))


def test_a_line_tells_rule_and_figures_and_nothing_that_is_empty() -> None:
    line = told(
        event(
            "admission",
            job="a",
            held="",
            rule="share",
            weight=1 / 3,
            floor=0,
            token=7,
            pinned=False,
        )
    )
    assert line.partition(" ")[2] == "admission, rule share: job a, weight 0.3333, floor 0"


def test_a_wish_is_said_in_words() -> None:
    fields: dict[str, Any] = {"gang": "g3", "resident": "g3.1", "job": "a", "role": "rollout"}
    fields |= {
        "tier": "accelerator",
        "workers": ["w2"],
        "reason": "share",
        "token": 7,
        "generation": 1,
        "epoch": 1,
    }
    line = told(event("desired", entitled=3, **fields))
    assert line.partition(" ")[2] == "a, g3.1: rollout on w2: share (entitled 3)"
