"""States of meshes and runs in plain words: nothing runs, nothing is written, nothing was lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import DatasetConfig, JobConfig, RewardConfig
from meshrl.common.state import jobs
from meshrl.common.state.events import Event
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.mesh_query import query_mesh
from meshrl.launch.up_down import format_stopped_jobs
from meshrl.runs.next_commands import list_next_commands
from meshrl.view.history.lost_hosts import count_lost_hosts
from meshrl.view.history.run_snapshot import NEWS_MS, RunHistory
from meshrl.view.mesh.slow_calls import CALL_WAIT, find_slow_calls

DOCUMENT = {"budget": {"steps": 9}}
ROW = jobs.JobRow(
    *("digits", jobs.Phase.TRAINING, DOCUMENT, "/runs/digits", 0, 3, "", "", 3),
    *(0, 0, 0, 0, 0, 0, 0, 0, ""),
)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeshPaths:
    """Make a mesh that has ended."""
    place = MeshPaths(tmp_path / ".meshrl")
    place.logs.mkdir(parents=True)
    url = f"unix://{place.redis_directory}/redis.sock"
    MeshSettings(redis_url=url, run_root=str(place.root)).to_file(place.settings)
    monkeypatch.chdir(tmp_path)
    return place


@pytest.mark.parametrize("words", ["status", "status --stalled", "workers", "top --once", "hosts"])
def test_command_without_a_mesh_says_so(stopped: MeshPaths, words: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--mesh", str(stopped.root)])
    assert isinstance(result.exception, StateUnavailable)
    assert str(result.exception) == "no mesh runs in .meshrl. `meshrl up` starts a mesh"


def test_mesh_of_a_run_names_its_resumption(stopped: MeshPaths) -> None:
    (stopped.root / "job.json").write_text("{}")
    with pytest.raises(StateUnavailable, match=r"meshrl resume \.meshrl` continues"):
        query_mesh(stopped, jobs.read_jobs, 2.0)


def test_empty_log_says_so(stopped: MeshPaths) -> None:
    stopped.log_path("planner/0").touch()
    words = ["logs", "--mesh", str(stopped.root)]
    assert "the log of planner/0 is empty" in CliRunner().invoke(app, [*words, "planner/0"]).output
    assert "no process has written" in CliRunner().invoke(app, words).output


def test_stopped_mesh_names_its_jobs_and_how_they_continue(stopped: MeshPaths) -> None:
    two = [ROW, replace(ROW, id="b", steps_done=0)]
    lines = format_stopped_jobs(stopped, two)
    assert lines[:2] == ["digits was stopped at step 3 of 9", "b was stopped at step 0 of 9"]
    assert "meshrl up, with" in lines[2]
    assert lines[3].endswith("meshrl resume /runs/digits")
    (stopped.root / "job.json").touch()
    assert format_stopped_jobs(stopped, two)[2:] == ["To resume: meshrl resume .meshrl"]
    assert format_stopped_jobs(stopped, []) == []


def test_phase_is_no_warm_start_without_demonstrations() -> None:
    row = replace(ROW, phase=jobs.Phase.WARM_START)
    assert row.phase_text == "preparing the model"
    warm = {"warm_start": {"demonstrations": "mine:solve"}}
    assert replace(row, document=DOCUMENT | warm).phase_text == "warm start"


@pytest.mark.parametrize(
    "kinds, lost",
    [
        (["host_lost"], 1),
        (["host_lost", "host_back"], 0),
        (["host_lost", "host_back", "host_joined"], 1),
        (["host_lost", "host_joined", "host_back"], 1),
        (["host_joined", "host_lost", "host_back", "host_lost"], 1),
        (["registered", "released", "host_lost"], 0),
        (["registered", "released", "registered", "host_lost"], 1),
    ],
)
def test_host_that_was_only_late_is_not_lost(kinds: list[str], lost: int) -> None:
    fields = {"host": "pc", "name": "node/pc"}
    events = [Event(f"{ms}-0", ms, kind, fields) for ms, kind in enumerate(kinds, 1)]
    assert count_lost_hosts(events) == lost


def test_news_of_the_live_view_are_recent_and_do_not_repeat_why_a_job_waits() -> None:
    history = RunHistory()
    events = [("host_back", {"host": "pc"}), ("admission", {"job": "a", "held": "waiting: it"})]
    history.add_events([Event("1-0", 1, kind, fields) for kind, fields in events])
    assert history.list_news(2) == ("host pc is back",)
    assert history.list_news(1 + NEWS_MS) == ()


def test_finished_run_names_the_next_commands(tmp_path: Path) -> None:
    config = JobConfig(dataset=DatasetConfig(held_out="test.jsonl"))
    content = {"document": replace(config, reward=RewardConfig(use="math")).to_document()}
    content["document"]["bundle"] = {"digest": "0"}  # as a run's record has it
    content["file"] = {"path": "/jobs/sums.toml"}
    assert "chat" not in "".join(list_next_commands(tmp_path, content))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    commands = "\n".join(list_next_commands(tmp_path, content))
    for says in ("chat", f"eval {tmp_path} /jobs/sums.toml", "samples", "resume"):
        assert f"meshrl {says}" in commands
    del content["file"]  # as of a run from Python
    assert "eval" not in "".join(list_next_commands(tmp_path, content))


@pytest.mark.parametrize(
    "on, deadline, says",
    [
        ("reward of x, game.py:53 in reward() (pid 7)", "reward.deadline_s", "returned for 12 s"),
        ("look of x (pid 7)", "environment.tool_deadline_s", "is 10"),
    ],
)
def test_function_that_does_not_return_is_named_once(on: str, deadline: str, says: str) -> None:
    wait = {"on": on, "what": CALL_WAIT, "since_ms": 1_000}
    sandbox = RegistryEntry("sandbox/x/0", "sandbox", alive=True, waits=[wait])
    document: dict[str, dict[str, float]] = {"reward": {}, "environment": {}}
    table, _, key = deadline.partition(".")
    document[table][key] = 10.0
    assert find_slow_calls([sandbox], document, 10_000) == {}
    lines = find_slow_calls([sandbox], document, 13_000)
    history = RunHistory()
    history.add_slow_calls(lines, 13_000)
    history.add_slow_calls(lines, 14_000)
    (alert,) = history.alerts
    assert alert.startswith(on.removesuffix(" (pid 7)")) and says in alert and deadline in alert
