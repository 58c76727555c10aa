"""What `meshrl resume` refuses before a mesh starts, and why."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError, MeshError, NotFound, Refused
from meshrl.common.job.config import JobConfig
from meshrl.common.state.jobs import Phase
from meshrl.directory.claims import claimed
from meshrl.directory.places import MeshPlace, read_json, write_json
from meshrl.job import jobfile
from meshrl.job.bundle import pack_run
from meshrl.run.resuming import resume
from tests.unit.meshrl.run.conftest import HeldMesh

JOB = Path(__file__).parents[4] / "tests/mesh/jobs/digits.toml"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    config, base = jobfile.load(JOB, [f"out={directory}"])
    with claimed(config, False) as claim:
        pack_run(config, base, claim.directory, {"job": config.name}, JOB)
        claim.keep()
    (directory / "metrics.jsonl").write_text("")
    return directory


@pytest.fixture
def run(packed: Path) -> Path:
    """A run that has committed three steps."""
    step = {"kind": "step", "fields": {"version": 3, "step": 3, "checkpoint": ""}}
    (packed / "events.jsonl").write_text(json.dumps(step) + "\n")
    (packed / "summary.json").unlink(missing_ok=True)
    return packed


def test_a_run_is_told_from_others_of_its_name(run: Path, tmp_path: Path) -> None:
    config, base = jobfile.load(JOB, [])
    pack_run(config, base, tmp_path, {"job": config.name}, JOB)
    assert read_json(tmp_path / "job.json")["run_id"] != read_json(run / "job.json")["run_id"]


def test_a_finished_run_says_how_to_extend_it(run: Path) -> None:
    (run / "summary.json").write_text('{"phase": "finished", "steps": 3}')
    with pytest.raises(Refused, match=r"finished, after 3 steps.*--set budget\.steps=N"):
        resume(run, [])
    with pytest.raises(Refused, match="finished"):
        resume(run, ["optimizer.adamw_lr=0.5"])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("seed=3", "seed may not change in a run: what was drawn"),
        ("rollout.temperature=0.5", "trajectories that are under way"),
        ("dataset.prompt=question", "copies of the files"),
        ("optimizer.muon_lr=0.0", "neither from 0 nor to it"),
        ("budget.steps=2", "3 steps are done"),
        ("budget.stepz=2", r"unknown key budget\.stepz"),
        ("optimizer.adamw_lr=-1", "at least 0"),
        ("mesh.workers=1", "at least 2"),
        ("training.ranks=5", r"mesh\.workers = 2 are too few"),
    ],
)
def test_a_change_that_may_not_be_says_why(run: Path, setting: str, why: str) -> None:
    before = (run / "job.json").read_bytes()
    with pytest.raises(ConfigError, match=why):
        resume(run, [setting])
    assert (run / "job.json").read_bytes() == before and not (run / "mesh").exists()


def test_a_run_that_runs_is_named(run: Path) -> None:
    place = MeshPlace(run)
    place.directory.mkdir()
    try:
        with place.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(Refused, match=f"the run in {run} goes on"):
                resume(run, [])
    finally:
        place.lock.unlink()
        place.directory.rmdir()


def test_what_is_no_run_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no run in"):
        resume(tmp_path, [])
    (tmp_path / "job.json").write_text("[]")
    with pytest.raises(MeshError, match=r"job\.json"):
        resume(tmp_path, [])


@pytest.fixture
def submitted(held: HeldMesh) -> Iterator[HeldMesh]:
    """A job on a mesh that runs, whose lock somebody holds."""
    record = read_json(held.run / "job.json")
    record["document"]["bundle"] = {"dir": str(held.run / "bundle/d"), "digest": "d"}
    write_json(held.run / "job.json", record)
    with MeshPlace(held.root).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield held


def test_a_job_that_was_stopped_goes_on_on_its_mesh(submitted: HeldMesh) -> None:
    held = submitted
    with pytest.raises(Refused, match=r"goes on, on the mesh .*meshrl watch"):
        resume(held.run, [])
    held.phase(Phase.STOPPED)
    with pytest.raises(Refused, match=r"meshrl down --mesh .* --set"):
        resume(held.run, ["budget.steps=9"])
    stopped = held.row
    assert stopped.phase == Phase.STOPPED
    assert resume(held.run, []) == 0
    assert held.row.phase == Phase.QUEUED
    held.phase(Phase.FINISHED)
    with pytest.raises(Refused, match=r"finished, after 8 steps.*--set budget\.steps=N"):
        resume(held.run, [])


def test_force_replaces_a_submitted_run_that_its_live_mesh_has_done_with(
    submitted: HeldMesh,
) -> None:
    config = JobConfig(name="tiny", out=str(submitted.run))
    with (
        pytest.raises(Refused, match=r"goes on, on the mesh .*meshrl cancel"),
        claimed(config, True),
    ):
        pass
    assert (submitted.run / "job.json").is_file()
    submitted.phase(Phase.STOPPED)
    submitted.record("stopped")
    with claimed(config, True) as claim:
        claim.keep()
        claim.replace()
    assert not (submitted.run / "job.json").exists()
