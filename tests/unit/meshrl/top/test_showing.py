"""`meshrl top` and `meshrl status --why` of a mesh whose Redis is real."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.state import events, leader
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.store.explained import JUDGED
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import EVENTS, PLANNER
from meshrl.run.following.top import TopScreen
from meshrl.view.mesh.frames import Frame, JobFrame
from tests.unit.meshrl.run.conftest import JOB, HeldMesh, held

__all__ = ["held"]

NOW = {"step_s": 0.8, "rollout_s": 0.8, "binds": "latency", "verdict": "no split is better"}


def meshrl(*words: str) -> str:
    found = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def judged(step: int) -> dict[str, Any]:
    move = {"job": JOB, "resident": "g1.1", "policy": "stage_time", "step": step}
    times = {"before_s": 0.9, "predicted_s": 0.7, "observed_s": 1.1, "expected_s": 0.9}
    fate = {"regret_s": 0.2, "paid": False, "undone": True, "reason": "it did not pay"}
    return move | {"from": "rollout", "to": "training"} | times | fate


async def explain(state: State) -> None:
    """What a leader that has judged a move leaves behind."""
    token = await leader.campaign(state, PLANNER, "planner/0.one", 60_000)
    assert await pool.write(state, token, "op", [], {"explained": {JOB: NOW}}) == []
    await events.append(state, JUDGED, judged(8))


def test_one_frame_is_printed_without_a_terminal_and_one_document_for_programs(
    held: HeldMesh,
) -> None:
    held.ask(explain)
    words = ["top", "--mesh", str(held.root)]
    for once in ([], ["--once"]):
        shown = " ".join(meshrl(*words, *once).split())
        assert f"{JOB} queued 0/8" in shown and "did not pay, undone: it did not pay" in shown
    found = json.loads(meshrl(*words, "--json"))
    assert [(job["job"], job["now"]["binds"]) for job in found["jobs"]] == [(JOB, "latency")]
    assert [move["step"] for move in found["judged"]] == [8]
    assert json.loads(meshrl("top", str(held.run), "--json"))["jobs"] == found["jobs"]


def test_moves_are_known_that_redis_has_let_go_of(held: HeldMesh) -> None:
    held.ask(explain)
    held.record()
    held.ask(lambda state: state.command("DEL", EVENTS))
    held.ask(lambda state: events.append(state, JUDGED, judged(20)))
    found = json.loads(meshrl("top", "--mesh", str(held.root), "--json"))
    assert [move["step"] for move in found["judged"]] == [8, 20]
    told = json.loads(meshrl("status", "--why", JOB, "--mesh", str(held.root), "--json"))
    assert [move["step"] for move in told["moves"]] == [8, 20]


def test_why_tells_moves_with_their_regret_and_what_binds_now(held: HeldMesh) -> None:
    words = ["status", "--mesh", str(held.root), "--why"]
    assert "Now:" not in meshrl(*words, JOB)
    held.ask(explain)
    shown = " ".join(meshrl(*words, JOB).split())
    assert "8 g1 rollout -> training stage_time 0.9 s 0.9 s 0.7 s 1.1 s 0.2 s did not pay" in shown
    assert shown.endswith(
        "Now: a step is predicted to take 0.8 s: rollout 0.8 s what binds is latency "
        "no split is better"
    )
    found = json.loads(meshrl(*words, "g1", "--json"))
    assert [move["resident"] for move in found["moves"]] == ["g1.1"] and found["now"] is None
    assert json.loads(meshrl(*words, JOB, "--json"))["now"]["verdict"] == NOW["verdict"]


def test_the_last_frame_stays_while_redis_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with TopScreen() as view:
        view.say("no frame yet")
        view.show(Frame("/mesh", (JobFrame("a", "training", "", "", "", 3, 48),)))
        assert "no frame yet" in capsys.readouterr().out
        view.say("redis does not answer; asking again")
        shown = capsys.readouterr().out
        assert "redis does not answer" in shown and "3/48" in shown
        view.show(Frame("/mesh"))
        assert "redis" not in capsys.readouterr().out
