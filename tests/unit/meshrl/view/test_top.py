"""Frames of `meshrl top`, and `meshrl status --why` of a mesh with a real Redis."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.api.node import SliceCandidate, SliceDecision, SliceExplanation
from meshrl.common.base.errors import NotFound
from meshrl.common.state import events, leader
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.planner_reports import (
    MOVE_OUTCOME_EVENT,
    JobPrediction,
    decode_move_outcome,
)
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import EVENTS, PLANNER_ELECTION
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.directory_paths import MeshPaths
from meshrl.runs.monitoring.mesh_top import TopScreen
from meshrl.runs.monitoring.slice_observer import SliceObserver
from meshrl.view.live.slice_tables import make_decisions_table
from meshrl.view.live.top_screen import render_screen, render_tables
from meshrl.view.mesh.mesh_frames import JobFrame, MeshFrame, build_frame
from meshrl.view.mesh.rates import compute_steps_per_min, compute_wait_share
from meshrl.view.mesh.slice_frames import GangSlicesFrame
from tests.load import scaled
from tests.unit.meshrl.runs.conftest import JOB, HeldMesh, held_mesh
from tests.unit.meshrl.view.test_tables import MESH, WAITS, row

NOW_MS = 1_000_000
ENTRIES = [
    RegistryEntry(
        "rollout/a/0",
        "rollout",
        alive=True,
        stats={"tokens": 0, "in_flight": 7, "waiting": 2},
        renewed_ms=NOW_MS,
    ),
    RegistryEntry(
        "engine/g0.1",
        "engine",
        alive=True,
        stats={"job": "a", "running": 31, "waiting": 4, "version": 9, "tensor_parallel": 2},
    ),
    RegistryEntry(
        "node/h0", "node", alive=True, host="h0", stats={"cores": 2.0, "busy_cores": 1.26}
    ),
    RegistryEntry("node/h1", "node", alive=True, host="h1"),
]
MOVE = Move(
    "g4.2",
    "g4",
    NOW_MS - 4_000,
    NOW_MS + 26_000,
    {"job": "b", "role": "training"},
    {"policy": "stage_time", "from": "training", "to": "rollout", "predicted_s": 0.81},
)
MOVE_JUDGED = decode_move_outcome(
    NOW_MS, {"job": "a", "resident": "g0.1", "to": "rollout", "paid": True}
)


def steps(*took_s: float) -> list[dict[str, Any]]:
    """Make rows of steps, the last of which was committed two seconds ago."""
    ends = [NOW_MS - 2_000 - 1000 * sum(took_s[n:]) for n in range(len(took_s) + 1)]
    about = {"reward": 0.5, "tokens_trained": 500, "wait_s": 0.3, "train_s": 0.9}
    return [
        {"step": n, "committed_ms": int(ms), "wall": ms / 1000} | about
        for n, ms in enumerate(ends, 1)
    ]


def make_frame(*rows: Any) -> MeshFrame:
    told = {
        name: JobPrediction(0.8, bottleneck="latency", verdict="no split is better")
        for name in "ab"
    }
    mesh = replace(
        MESH,
        jobs=rows or (row("a"), row("b", WAITS, Phase.QUEUED)),
        entries=ENTRIES,
        now_ms=NOW_MS,
        entitlements={"a": 2, "b": 1},
        predictions=told,
        moves_in_progress=[MOVE],
        steps={"a": steps(3.0, 4.0, 9.0)},
    )
    return build_frame(mesh, {}, "/mesh", [MOVE_JUDGED])


def test_job_has_rates_and_prediction() -> None:
    a, b = make_frame().jobs
    assert (a.job, a.phase, a.step, a.steps) == ("a", "training", 3, 48)
    assert (a.workers, a.entitled, a.in_flight) == (1, 2, 7)
    assert (a.running, a.waiting) == (31, 6)
    assert a.steps_per_min == 15.0 and a.wait_share == 0.25
    assert a.prediction is not None and a.prediction.bottleneck == "latency"
    assert (b.block_reason, b.steps_per_min, b.running, b.prediction) == (WAITS, None, 0, None)
    assert a.rewards and a.loss is None


def test_supervised_job_has_a_loss_and_no_reward() -> None:
    learned = {"model_tokens": 9, "ratio_max": None, "loss": 1.25}
    taught = [one | learned for one in steps(3.0, 4.0)]
    mesh = replace(MESH, jobs=(row("a"),), steps={"a": taught})
    job = build_frame(mesh, {}, "/mesh", []).jobs[0]
    assert (job.reward, job.rewards, job.loss) == (None, (), 1.25)


def test_step_rate_uses_the_median_step_or_the_current_longer_one() -> None:
    ends = [0, 3_000, 7_000, 16_000]
    assert compute_steps_per_min(ends, 17_000) == 15.0
    assert compute_steps_per_min(ends, 28_000) == 5.0
    assert compute_steps_per_min(ends[:2], 28_000) is None
    assert compute_steps_per_min([5, 5, 5], 5) is None


def test_wait_share_uses_only_steps_that_report_it() -> None:
    assert compute_wait_share([]) is None
    assert compute_wait_share([{"step": 1}, {"wait_s": 1.0, "train_s": 3.0}]) == 0.25


def test_frame_has_gangs_instances_hosts_and_moves() -> None:
    found = make_frame()
    core, engine, asleep = found.instances
    assert (core.role, core.gang, core.workers, core.tensor_parallel) == (
        "core",
        "g0",
        ("w0",),
        None,
    )
    assert (engine.role, engine.tier, engine.state) == ("rollout", "accelerator", "ready")
    assert engine.tensor_parallel == 2 and engine.activity == "31 running, version 9"
    assert (asleep.job, asleep.tier, asleep.activity) == ("b", "disk", "asleep")
    assert (found.idle, found.lost) == (("w2",), ("w3",))
    [host] = found.hosts
    assert (host.host, host.cores, host.busy_cores) == ("h0", 2.0, 1.26)
    [move] = found.moves
    assert (move.job, move.from_role, move.to_role, move.rule) == (
        "b",
        "training",
        "rollout",
        "stage_time",
    )
    assert (move.elapsed_s, move.remaining_s, move.predicted_s) == (4.0, 26.0, 0.81)


def render_lines(found: MeshFrame) -> list[str]:
    console = Console(file=StringIO(), width=200, record=True)
    for part in render_tables(found):
        console.print(part)
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_screen_shows_the_frame_and_why_it_is_outdated() -> None:
    lines = render_lines(make_frame())
    for wanted in (
        "a training 3/48 15 0.500 ████ 1/2 0.8 s, latency",
        f"b is {WAITS}",
        "a: no split is better",
        "h0: 1.3 of 2 cores busy",
        "g4 moves from training to rollout (stage_time): 4 s so far, undone in 26 s if "
        "incomplete, predicted 0.81 s a step",
        "g0 w0 a g0.1 rollout accelerator ready 2 31 running, version 9",
        "idle: w2",
        "lost: w3",
    ):
        assert wanted in lines, "\n".join(lines)
    console = Console(file=StringIO(), width=120, record=True)
    console.print(render_screen(make_frame(), stale_reason="Redis does not answer; retrying"))
    assert "Redis does not answer" in console.export_text()


def test_mesh_without_jobs_is_shown_as_such() -> None:
    assert render_lines(MeshFrame("/mesh")) == ["no job is running"]


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.FINISHED])
def test_finished_job_has_no_rate_and_no_prediction(phase: Phase) -> None:
    [job] = make_frame(row("a", phase=phase)).jobs
    assert (job.steps_per_min, job.entitled, job.prediction) == (None, None, None)
    assert job.error == ("it broke" if phase == Phase.FAILED else "")


def test_frame_converts_to_json() -> None:
    document = json.loads(json.dumps(asdict(make_frame())))
    assert document["jobs"][0]["prediction"]["step_s"] == 0.8
    assert document["move_outcomes"][0]["paid"] is True


__all__ = ["held_mesh"]

NOW = {"step_s": 0.8, "rollout_s": 0.8, "bottleneck": "latency", "verdict": "no split is better"}


def meshrl(*words: str) -> str:
    found = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def make_outcome(step: int) -> dict[str, Any]:
    move = {"job": JOB, "resident": "g1.1", "policy": "stage_time", "step": step}
    times = {"before_s": 0.9, "predicted_s": 0.7, "observed_s": 1.1, "expected_s": 0.9}
    fate = {"regret_s": 0.2, "paid": False, "undone": True, "reason": "it did not pay"}
    return move | {"from": "rollout", "to": "training"} | times | fate


async def write_planner_memory(state: StateClient) -> None:
    """Write the predictions and move outcomes of a leader to Redis."""
    token = await leader.campaign(state, PLANNER_ELECTION, "planner/0.one", 60_000)
    assert await pool.write_decisions(state, token, "op", [], {"explained": {JOB: NOW}}) == []
    await events.append(state, MOVE_OUTCOME_EVENT, make_outcome(8))


def test_top_prints_one_frame_without_a_terminal_and_one_json_document(
    held_mesh: HeldMesh,
) -> None:
    held_mesh.ask(write_planner_memory)
    words = ["top", "--mesh", str(held_mesh.root)]
    for once in ([], ["--once"]):
        output = " ".join(meshrl(*words, *once).split())
        assert f"{JOB} queued 0/8" in output and "did not pay, undone: it did not pay" in output
    found = json.loads(meshrl(*words, "--json"))
    assert [(job["job"], job["prediction"]["bottleneck"]) for job in found["jobs"]] == [
        (JOB, "latency")
    ]
    assert [move["step"] for move in found["judged"]] == [8]
    assert json.loads(meshrl("top", str(held_mesh.run), "--json"))["jobs"] == found["jobs"]


def test_moves_and_decisions_trimmed_from_redis_come_from_the_record(held_mesh: HeldMesh) -> None:
    held_mesh.ask(write_planner_memory)
    placed = {"job": JOB, "partner": "other", "rule": "user"}
    held_mesh.ask(lambda state: events.append(state, "place_settled", placed))
    held_mesh.record()
    held_mesh.ask(lambda state: state.run_command("DEL", EVENTS))
    held_mesh.ask(lambda state: events.append(state, MOVE_OUTCOME_EVENT, make_outcome(20)))
    found = json.loads(meshrl("top", "--mesh", str(held_mesh.root), "--json"))
    assert [move["step"] for move in found["judged"]] == [8, 20]
    document = json.loads(meshrl("status", "--why", JOB, "--mesh", str(held_mesh.root), "--json"))
    assert [move["step"] for move in document["moves"]] == [8, 20]
    assert [event["kind"] for event in document["decisions"]] == ["place_settled"]


def test_status_why_shows_moves_with_regret_and_the_bottleneck(held_mesh: HeldMesh) -> None:
    words = ["status", "--mesh", str(held_mesh.root), "--why"]
    assert "Now:" not in meshrl(*words, JOB)
    held_mesh.ask(write_planner_memory)
    output = " ".join(meshrl(*words, JOB).split())
    assert "8 g1 rollout -> training stage_time 0.9 s 0.9 s 0.7 s 1.1 s 0.2 s did not pay" in output
    assert output.endswith(
        "Now: a step is predicted to take 0.8 s: rollout 0.8 s the bottleneck is latency "
        "no split is better"
    )
    found = json.loads(meshrl(*words, "g1", "--json"))
    assert [move["resident"] for move in found["moves"]] == ["g1.1"] and found["now"] is None
    assert json.loads(meshrl(*words, JOB, "--json"))["now"]["verdict"] == NOW["verdict"]


def test_status_why_rejects_an_unknown_name_with_the_known_gangs(held_mesh: HeldMesh) -> None:
    words = ["status", "--mesh", str(held_mesh.root), "--why"]
    assert f"no recent decision about {JOB}" in meshrl(*words, JOB)
    with pytest.raises(NotFound, match="there is no job, gang, worker or host g7") as raised:
        meshrl(*words, "g7")
    assert "The gangs are not formed yet" in raised.value.fix


def test_table_of_slice_decisions_marks_the_chosen_request() -> None:
    candidates = [
        SliceCandidate("g0.1", "train_step", 3.0, 1.0, 0.5, 3.0),
        SliceCandidate("g0.0", "generate", 0.1, 0.2, 0.0, 1.5),
    ]
    decision = SliceDecision(0.0, "hrrs", candidates, "g0.1", "response ratio")
    table = make_decisions_table(SliceExplanation("g0", "hrrs", [decision], []))
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["instance"] == ["g0.1", "g0.0"]
    assert columns["switch"] == ["0.50", "0.00"]
    assert columns["reason"] == ["response ratio", "waits"]


def test_last_frame_stays_while_redis_is_unreachable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with TopScreen() as view:
        view.print_line("no frame yet")
        view.show(MeshFrame("/mesh", (JobFrame("a", "training", "training", "", "", "", 3, 48),)))
        assert "no frame yet" in capsys.readouterr().out
        view.print_line("Redis does not answer; retrying")
        output = capsys.readouterr().out
        assert "Redis does not answer" in output and "3/48" in output
        view.show(MeshFrame("/mesh"))
        assert "redis" not in capsys.readouterr().out


def test_error_of_a_slice_scheduler_is_shown_and_delays_no_view(held_mesh: HeldMesh) -> None:
    gangs = [Gang("g0", ("w0",), 1), Gang("g1", ("w1",), 1)]

    async def watch() -> tuple[GangSlicesFrame, ...]:
        async with SliceObserver(MeshPaths(held_mesh.root)) as slices:
            assert slices.poll_frames(gangs) == (), "nothing is read yet"
            async with asyncio.timeout(scaled(10.0)):
                while not (found := slices.poll_frames(gangs[:1])):
                    await asyncio.sleep(0.01)
            assert slices.poll_frames([]) == (), "the gang is not shared any more"
            return found

    [frame] = asyncio.run(watch())
    assert frame.gang == "g0" and "the settings contain no secret" in frame.error
