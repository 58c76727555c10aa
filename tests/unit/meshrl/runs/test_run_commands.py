"""Commands on an existing run: evaluation, restoration, resumption and sampling."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.errors import ConfigError, CorruptData, MeshError, NotFound, Refused
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.common.state import jobs
from meshrl.common.state.jobs import Phase
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths, read_json, write_json
from meshrl.directory.run_claims import claim_run_directory
from meshrl.job import job_reader
from meshrl.job.bundle import pack_run
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.runs.evaluation import read_result
from meshrl.runs.monitoring.mesh_polling import poll_mesh
from meshrl.runs.resumption import read_run_record, resume_run
from tests.contract.state.state_bench import Server, running_server
from tests.load import scaled
from tests.unit.meshrl.runs.conftest import HeldMesh

WITHIN_S = 60.0


class RecordingListener:
    """Listener that records its messages and the events that a Redis contained."""

    def __init__(self, place: MeshPaths, server: Server) -> None:
        self.place, self.server = place, server
        self.messages: list[str] = []
        self.observations: list[str] = []

    def __enter__(self) -> RecordingListener:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def print_line(self, text: str) -> None:
        self.messages.append(text)
        if self.place.root_marker.exists():
            self.server.start()

    def observe(self, state: StateClient) -> Callable[[], Awaitable[str]]:
        self.observations.append("connected")

        async def poll() -> str:
            self.observations.append(
                str(await state.run_command("INCR", "looks", deadline_s=scaled(5.0)))
            )
            if self.observations[-1] == "2":
                self.server.kill()
            return self.observations[-1]

        return poll


@pytest.mark.parametrize("lives", [True, False], ids=["comes back", "is gone"])
async def test_unreachable_redis_is_polled_again_while_the_mesh_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    place = MeshPaths(tmp_path)
    with running_server(embedded_server.find_server()) as server:
        MeshSettings(redis_url=server.url, run_root=str(tmp_path)).to_file(place.settings)
        if lives:
            write_json(
                place.root_marker, {"pid": os.getpid(), "start_time": read_start_time(os.getpid())}
            )
        heard = RecordingListener(place, server)
        async with asyncio.timeout(scaled(WITHIN_S)):
            found = poll_mesh(place, heard.print_line, heard.observe)
            async with aclosing(found):
                async for observation in found:
                    last = observation
                    if len(heard.observations) > 4:
                        break
    assert heard.messages == ["Redis does not answer; retrying"]
    first = ["connected", "1", "2"]
    assert heard.observations == ([*first, "connected", "3"] if lives else first)
    assert last == ("3" if lives else "2"), "what was seen last"


def run_failing_command(*words: str) -> str:
    found = CliRunner().invoke(app, ["eval", *words])
    assert found.exit_code == 1
    return str(found.exception)


def test_path_without_a_model_is_a_one_line_error(job: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "neither a Hugging Face directory nor a run" in run_failing_command(
        str(tmp_path / "empty"), str(job)
    )
    (tmp_path / "empty/config.json").write_text("{}")
    assert "choose a version of a run" in run_failing_command(
        str(tmp_path / "empty"), str(job), "--step", "2"
    )


def test_evaluation_has_the_length_of_training_from_scratch(job: Path, shape: str) -> None:
    model = job.parent / "model"
    model.mkdir()
    described = json.loads(shape) | {"max_position_embeddings": 256}
    (model / "config.json").write_text(json.dumps(described))
    build_character_tokenizer("0123456789+=", model / "tokenizer.json")
    error = run_failing_command(str(model), str(job))
    assert "rollout.max_tokens = 320 (the default) exceeds the model's 256 positions" in error


def test_first_evaluation_is_the_result(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None
    fields = {"job": "x", "tag": "before", "figures": {"held_out.greedy": 0.5}, "failed": 1}
    rows = [{"kind": "phase", "fields": {}}, {"kind": "evaluation", "fields": fields}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_result(tmp_path) == {"figures": {"held_out.greedy": 0.5}, "failed": 1}


JOB = "sum"


def test_corrupt_job_file_is_restored_from_redis_or_reported(tmp_path: Path) -> None:
    document = JobConfig(name=JOB).to_document()
    path = tmp_path / "job.json"
    write_json(path, {"job": JOB, "document": document})
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(CorruptData, match=r"has no copy of it.*copy of the run"):
        read_run_record(tmp_path)

    async def submit(state: StateClient) -> None:
        await jobs.submit(state, JOB, document, str(tmp_path), "submit")

    asyncio.run(Launcher(MeshPaths(tmp_path), MeshShape()).query_redis(submit))
    assert read_run_record(tmp_path) == {"job": JOB, "document": document}
    assert (tmp_path / "quarantine/job.json").read_bytes() == whole[:-9]
    assert read_json(path)["job"] == JOB
    path.unlink()
    assert read_run_record(tmp_path) == {"job": JOB, "document": document}


DIGITS = Path(__file__).parents[4] / "tests/mesh/jobs/digits.toml"


@pytest.fixture(scope="module")
def packed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    config, base = job_reader.load_config(DIGITS, [f"out={directory}"])
    with claim_run_directory(config, False) as claim:
        pack_run(config, base, claim.directory, {"job": config.name}, DIGITS)
        claim.commit()
    (directory / "metrics.jsonl").write_text("")
    return directory


@pytest.fixture
def run(packed_run: Path) -> Path:
    """Make a run that has committed three steps."""
    step = {"kind": "step", "fields": {"version": 3, "step": 3, "checkpoint": ""}}
    (packed_run / "events.jsonl").write_text(json.dumps(step) + "\n")
    (packed_run / "summary.json").unlink(missing_ok=True)
    return packed_run


def test_runs_of_one_name_have_different_ids(run: Path, tmp_path: Path) -> None:
    config, base = job_reader.load_config(DIGITS, [])
    pack_run(config, base, tmp_path, {"job": config.name}, DIGITS)
    assert read_json(tmp_path / "job.json")["run_id"] != read_json(run / "job.json")["run_id"]


def test_finished_run_names_the_setting_that_extends_it(run: Path) -> None:
    (run / "summary.json").write_text('{"phase": "finished", "steps": 3}')
    with pytest.raises(Refused, match=r"finished, after 3 steps.*--set budget\.steps=N"):
        resume_run(run, [])
    with pytest.raises(Refused, match="finished"):
        resume_run(run, ["optimizer.adamw_lr=0.5"])


def test_run_that_ended_early_names_the_setting_that_continues_it(run: Path) -> None:
    stop = {"step": 2, "best_version": 1, "patience": 1, "reason": "version 1 is the best"}
    write_json(run / "summary.json", {"phase": "finished", "steps": 2, "early_stop": stop})
    expected = r"finished early, after step 2: version 1 is.*--set evaluation\.patience=0"
    for settings in ([], ["optimizer.adamw_lr=0.5"]):
        with pytest.raises(Refused, match=expected):
            resume_run(run, settings)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("seed=3", "seed may not change in a run: random draws"),
        ("rollout.temperature=0.5", "trajectories in flight"),
        ("dataset.prompt=question", "copies of its original files"),
        ("optimizer.muon_lr=0.0", "a change from 0 or to 0 is impossible"),
        ("budget.steps=2", "3 steps are done"),
        ("budget.stepz=2", r"unknown key budget\.stepz"),
        ("optimizer.adamw_lr=-1", "at least 0"),
        ("mesh.workers=0", "at least 1"),
        ("training.ranks=5", r"mesh\.workers = 2 is too low"),
    ],
)
def test_forbidden_change_gives_its_reason(run: Path, setting: str, why: str) -> None:
    before = (run / "job.json").read_bytes()
    with pytest.raises(ConfigError, match=why):
        resume_run(run, [setting])
    assert (run / "job.json").read_bytes() == before and not (run / "mesh").exists()


def test_live_run_is_named(run: Path) -> None:
    place = MeshPaths(run)
    place.directory.mkdir()
    try:
        with place.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(Refused, match=f"the run in {run} is running"):
                resume_run(run, [])
    finally:
        place.lock.unlink()
        place.directory.rmdir()


def test_directory_without_a_run_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no run in"):
        resume_run(tmp_path, [])
    (tmp_path / "job.json").write_text("[]")
    with pytest.raises(MeshError, match=r"job\.json"):
        resume_run(tmp_path, [])


@pytest.fixture
def submitted_mesh(held_mesh: HeldMesh) -> Iterator[HeldMesh]:
    """Submit a job to a mesh whose lock another process holds."""
    record = read_json(held_mesh.run / "job.json")
    record["document"]["bundle"] = {"dir": str(held_mesh.run / "bundle/d"), "digest": "d"}
    write_json(held_mesh.run / "job.json", record)
    with MeshPaths(held_mesh.root).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield held_mesh


def test_stopped_job_resumes_on_its_live_mesh(submitted_mesh: HeldMesh) -> None:
    held_mesh = submitted_mesh
    with pytest.raises(Refused, match=r"already runs on the mesh .*meshrl watch"):
        resume_run(held_mesh.run, [])
    held_mesh.phase(Phase.STOPPED)
    with pytest.raises(Refused, match=r"meshrl down --mesh .* --set"):
        resume_run(held_mesh.run, ["budget.steps=9"])
    stopped = held_mesh.row
    assert stopped.phase == Phase.STOPPED
    assert resume_run(held_mesh.run, []) == 0
    assert held_mesh.row.phase == Phase.QUEUED
    held_mesh.phase(Phase.FINISHED)
    with pytest.raises(Refused, match=r"finished, after 8 steps.*--set budget\.steps=N"):
        resume_run(held_mesh.run, [])


def test_force_replaces_a_terminal_run_of_a_live_mesh(
    submitted_mesh: HeldMesh,
) -> None:
    config = JobConfig(name="tiny", out=str(submitted_mesh.run))
    with (
        pytest.raises(Refused, match=r"is running on the mesh .*meshrl cancel"),
        claim_run_directory(config, True),
    ):
        pass
    assert (submitted_mesh.run / "job.json").is_file()
    submitted_mesh.phase(Phase.STOPPED)
    submitted_mesh.record("stopped")
    with claim_run_directory(config, True) as claim:
        claim.commit()
        claim.delete_replaced_run()
    assert not (submitted_mesh.run / "job.json").exists()
