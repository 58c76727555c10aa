"""Observation, wait and cancellation of a run by another process than its owner."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshrl.__main__ import main
from meshrl.cli import app
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Refused
from meshrl.common.job.config import AlgorithmConfig, JobConfig
from meshrl.common.state import jobs, steps
from meshrl.common.state.jobs import Phase
from meshrl.common.state.registry import RegistryEntry, register
from meshrl.directory.command_target import RunLocation
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.run_claims import claim_run_directory
from meshrl.runs.monitoring.run_watch import RunObserver
from meshrl.runs.outcome import read_outcome
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.contract.state.state_bench import JOB as STEPPED
from tests.contract.state.state_bench import SHARD, TRAINER, Bench, Seats
from tests.load import scaled
from tests.unit.meshrl.runs.conftest import HOUR_MS, HeldMesh, write_run

PATIENCE_S = 30.0


def meshrl(*words: str) -> Result:
    return CliRunner().invoke(app, [*words], catch_exceptions=True)


def run_beside(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("phases", "status", "said"),
    [
        ([{"phase": "finished", "error": ""}], 0, "tiny has finished its 2 steps (reward 0.500)"),
        ([{"phase": "failed", "error": "no stop token"}], 1, "tiny failed at step 2 of 8"),
        ([{"phase": "training", "error": ""}], 3, "tiny was stopped at step 2 of 8"),
        ([{"phase": "stopped", "error": ""}], 3, "tiny was stopped at step 2 of 8"),
    ],
)
def test_status_of_an_ended_run_comes_from_its_files(
    tmp_path: Path, phases: list[dict[str, str]], status: int, said: str
) -> None:
    run = write_run(tmp_path / "run", phases, [0.25, 0.5])
    torn = (run / "events.jsonl").read_bytes()
    found = meshrl("status", str(run))
    assert found.exit_code == 0 and said in found.stdout, found.output
    assert ("no stop token" in found.stdout) == (status == 1)
    assert (f"meshrl resume {run}" in found.stdout) == (status != 0)
    for command in ("wait", "watch"):
        assert meshrl(command, str(run)).exit_code == status
    document = json.loads(meshrl("status", str(run), "--json").stdout)["run"]
    assert (document["step"], document["steps"], document["reward"]) == (2, 8, 0.5)
    assert (run / "events.jsonl").read_bytes() == torn, "a look changes nothing"


def test_finished_run_that_cannot_have_learned_has_a_status_of_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [])
    rows = Path(__file__).parents[1] / "view/health/recorded/filtered.jsonl"
    (run / "metrics.jsonl").write_text(rows.read_text())
    for command in ("wait", "watch", "status"):
        found = meshrl(command, str(run))
        assert found.exit_code == (0 if command == "status" else 4), found.output
        assert "tiny has finished its 4 steps (reward 0.500), but cannot have" in found.stdout
        assert "no learning (all_filtered)" in found.stdout and "reward.use" in found.stdout
    (told,) = json.loads(meshrl("wait", str(run), "--json").stdout)["health"]
    assert (told["rule"], told["severity"], told["step"]) == ("all_filtered", "failure", 4)


def test_finished_run_with_wrong_accounting_counts_as_failed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.25, 0.5])
    (run / "summary.json").write_text('{"phase": "finished", "lost": 0, "trained_twice": 0}')
    assert meshrl("wait", str(run)).exit_code == 0
    (run / "summary.json").write_text('{"phase": "finished", "lost": 4, "trained_twice": 0}')
    found = meshrl("wait", str(run))
    assert found.exit_code == 1 and "lost = 4" in found.stdout, found.output


def test_corrupt_summary_is_replaced_by_the_events(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.25, 0.5])
    (run / "summary.json").write_bytes(b'{"phase": "finis\0\0')
    for command in ("status", "wait", "watch"):
        found = meshrl(command, str(run))
        assert found.exit_code == 0 and "tiny has finished" in found.stdout, found.output
        assert f"corrupt: {run / 'summary.json'}" in found.stdout
    record = run / "events.jsonl"
    group = {"group": 1, "samples": 4, "scored": 4, "filtered": False, "content": "a"}
    twice = [
        {
            "id": f"{n}-0",
            "ms": n,
            "kind": "step",
            "fields": {"job": "tiny", "step": n, "version": n} | {"lineage": 0, "groups": [group]},
        }
        for n in (3, 4)
    ]
    lines = "".join(json.dumps(event) + "\n" for event in twice)
    record.write_text(record.read_text().rpartition("\n")[0] + "\n" + lines)
    os.utime(record, (1, 1))  # long ago, so that no process counts as writing the summary
    found = meshrl("wait", str(run))
    assert found.exit_code == 1 and "trained_twice = 4" in found.stdout, found.output


def test_outcome_of_a_supervised_run_has_its_loss(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [])
    row = {"step": 1, "reward": 1.0, "loss": 1.5, "model_tokens": 9, "ratio_max": None}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = read_outcome(RunLocation(directory, "tiny", MeshPaths(directory)))
    assert (found.reward, found.loss) == (None, 1.5)
    assert found.format_lines()[0] == "tiny has finished its 1 steps (loss 1.5000)"


@pytest.mark.parametrize(("ends_at", "ended_early"), [(2, True), (1, False), (None, False)])
def test_outcome_of_a_run_that_ended_early_has_the_reason(
    tmp_path: Path, ends_at: int | None, ended_early: bool
) -> None:
    directory = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.25, 0.5])
    fields = {"job": "tiny", "ends_at": ends_at, "best_version": 0, "patience": 1}
    event = json.dumps({"id": "0-1", "ms": 0, "kind": "evaluation", "fields": fields})
    record = directory / "events.jsonl"
    record.write_text(f"{event}\n{record.read_text()}")
    lines = read_outcome(RunLocation(directory, "tiny", MeshPaths(directory))).format_lines()
    steps = "2 of 8 steps" if ended_early else "its 2 steps"
    assert lines[0].startswith(f"tiny has finished {steps}")
    reason = "It ended early: version 0 is the best, and no better one came in the evaluation since"
    assert (reason in lines) is ended_early


def test_outcome_is_readable_without_a_job_file(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [{"phase": "stopped", "error": ""}], [0.25])
    run = RunLocation(directory, "tiny", MeshPaths(directory))
    (directory / "job.json").write_bytes(b'{"job": ')
    found = read_outcome(run)
    assert found.to_document()["steps"] is None
    assert found.format_lines()[0] == "tiny was stopped at step 1 (reward 0.250)"
    assert f"corrupt: {directory / 'job.json'}" in "\n".join(found.format_lines())
    (directory / "job.json").unlink()
    assert read_outcome(run).state == "stopped"


def test_run_of_a_failed_mesh_is_failed_until_it_is_resumed(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run", [{"phase": "training", "error": ""}], [0.25])
    record = run / "events.jsonl"
    error = {"type": "OSError", "text": "no room", "where": "", "fix": ""}
    fields = {"name": "weights", "why": "exit status 1", "error": error, "final": True}
    ended = {"id": "3-0", "ms": 3, "kind": "process_ended", "fields": fields}
    record.write_text(record.read_text().rpartition("\n")[0] + "\n" + json.dumps(ended) + "\n")
    found = meshrl("wait", str(run))
    assert found.exit_code == 1 and "no room" in found.stdout, found.output
    step = {"id": "4-0", "ms": 4, "kind": "step", "fields": {"job": "tiny", "step": 2}}
    with record.open("a") as file:
        file.write(json.dumps(step) + "\n")
    assert meshrl("wait", str(run)).exit_code == 3


def test_wait_ends_with_the_jobs_last_file(held_mesh: HeldMesh) -> None:
    held_mesh.phase(Phase.TRAINING)
    held_mesh.record()
    found = meshrl("wait", str(held_mesh.run), "--timeout", "0.1")
    assert found.exit_code == 124 and "tiny is running: training" in found.stderr
    ends: list[float] = []

    def end() -> None:
        held_mesh.phase(Phase.FINISHED)
        held_mesh.record()
        time.sleep(1.0)  # the model is written in the meantime
        ends.append(time.monotonic())
        held_mesh.record("finished")

    ending = run_beside(end)
    found = meshrl("wait", str(held_mesh.run), "--timeout", str(scaled(PATIENCE_S)), "--json")
    assert time.monotonic() > ends[0]
    ending.join(scaled(PATIENCE_S))
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["state"] == "finished"


@pytest.mark.parametrize("other", [False, True], ids=["no such job", "another run's"])
def test_wait_ends_when_the_mesh_has_lost_the_run(held_mesh: HeldMesh, other: bool) -> None:
    held_mesh.phase(Phase.TRAINING)
    held_mesh.record()
    held_mesh.ask(lambda state: state.run_command("FLUSHALL"))
    run, held_mesh.run = held_mesh.run, held_mesh.run.with_name("other")
    lease = RegistryEntry("planner/0", "planner", incarnation="two", run_root=str(held_mesh.root))
    held_mesh.ask(held_mesh.submit if other else lambda state: register(state, lease, HOUR_MS))
    found = meshrl("wait", str(run), "--timeout", str(scaled(PATIENCE_S)))
    assert found.exit_code == 3 and "was stopped at step 0 of 8" in found.stdout, found.output


def test_finished_run_is_replaced_only_after_its_last_file(held_mesh: HeldMesh) -> None:
    held_mesh.phase(Phase.FINISHED)
    config = replace(JobConfig(), out=str(held_mesh.run))
    with MeshPaths(held_mesh.root).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for written in ("", "stopped"):  # a summary from before the run was resumed
            held_mesh.record(written)
            with (
                pytest.raises(Refused, match="still being written") as caught,
                claim_run_directory(config, True),
            ):
                pass
            assert f"meshrl wait {held_mesh.run}" in str(caught.value)
        held_mesh.record("finished")
        with claim_run_directory(config, True) as claim:
            claim.commit()
    assert not (held_mesh.run / "job.json").exists()


def test_failed_job_exits_with_status_1_and_its_error(held_mesh: HeldMesh) -> None:
    held_mesh.phase(Phase.FAILED, "rollout.stop: '</s>' is not a token")
    held_mesh.record("failed")
    found = meshrl("wait", str(held_mesh.run), "--timeout", str(scaled(PATIENCE_S)))
    assert found.exit_code == 1 and "'</s>' is not a token" in found.stdout
    found = meshrl("cancel", str(held_mesh.run))
    assert found.exit_code == 1 and "cannot be cancelled" in str(found.exception)


def test_cancelled_job_names_the_resume_command(held_mesh: HeldMesh) -> None:
    held_mesh.phase(Phase.TRAINING)

    def stop_cancelled_job() -> None:
        while held_mesh.row.phase != "stopped":
            time.sleep(0.05)
        held_mesh.record("stopped")

    noticing = run_beside(stop_cancelled_job)
    found = meshrl("cancel", str(held_mesh.run))
    noticing.join(scaled(PATIENCE_S))
    assert found.exit_code == 0, found.output
    assert "was stopped" in found.stdout and f"meshrl resume {held_mesh.run}" in found.stdout
    assert held_mesh.row.phase == "stopped"
    assert meshrl("cancel", str(held_mesh.run)).exit_code == 0, "it stands still as was asked"


def test_job_is_found_by_name_and_an_unknown_name_is_a_one_line_error(
    held_mesh: HeldMesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_mesh.phase(Phase.FINISHED)
    held_mesh.record("finished")
    found = meshrl("wait", "tiny", "--mesh", str(held_mesh.root))
    assert found.exit_code == 0, found.output
    assert "in flight" not in found.output
    monkeypatch.setattr("sys.argv", ["meshrl", "wait", "tinny", "--mesh", str(held_mesh.root)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    output = capsys.readouterr().err
    assert "tinny is neither a run directory nor a job" in output and len(output.splitlines()) == 1


def test_watch_shows_a_run_to_its_end_and_writes_nothing(held_mesh: HeldMesh) -> None:
    held_mesh.phase(Phase.TRAINING)
    held_mesh.record()
    before = {path: path.read_bytes() for path in held_mesh.run.iterdir()}

    def end() -> None:
        time.sleep(scaled(1.5))  # the run is shown first
        held_mesh.phase(Phase.FAILED, "the reward is not there")

    ending = run_beside(end)
    found = meshrl("watch", str(held_mesh.run))
    ending.join(scaled(PATIENCE_S))
    assert "training" in found.stdout
    assert found.exit_code == 1 and "failed at step 0 of 8: the reward is not" in found.stdout
    assert {path: path.read_bytes() for path in held_mesh.run.iterdir()} == before
    held_mesh.record("failed")
    found = meshrl("watch", str(held_mesh.run))
    assert found.exit_code == 1 and "the reward is not there" in found.stdout


def test_watch_of_several_jobs_lasts_until_the_last_has_ended(held_mesh: HeldMesh) -> None:
    held_mesh.phase(Phase.TRAINING)
    document = held_mesh.row.document | {"name": "second"}
    run = str(held_mesh.run.with_name("second"))
    held_mesh.ask(lambda state: jobs.submit(state, "second", document, run, "second"))

    def end() -> None:
        time.sleep(scaled(1.5))  # the jobs are shown first
        held_mesh.phase(Phase.FAILED, "the reward is not there")
        held_mesh.ask(lambda state: jobs.cancel(state, "second", "enough"))

    ending = run_beside(end)
    found = meshrl("watch", "--mesh", str(held_mesh.root))
    ending.join(scaled(PATIENCE_S))
    assert found.exit_code == 1 and "tiny: the reward is not there" in found.stdout, found.output
    assert f"second: stopped; {run}" in found.stdout


async def test_each_step_after_a_restored_checkpoint_is_shown_once(
    tmp_path: Path,
) -> None:
    state = open_simulated_state(SystemClock())
    bench = Bench(state, None)
    algorithm = AlgorithmConfig(groups_per_step=2, group_size=2)
    document = replace(JobConfig(), name=STEPPED, algorithm=algorithm).to_document()
    kinds = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "typed_drops")
    saved = {"lineage": 0, "version": 4, "counts": dict.fromkeys(kinds, 0), "in_flight": 0}
    saved |= {"next_group": 8, "cursor": 8, "requeue": [], "manifest": "m0.4"}
    await steps.restore_job(state, STEPPED, document, str(tmp_path), saved)
    seats = Seats(state, await bench.seat(SHARD), await bench.seat(TRAINER))
    onlooker = RunObserver(state, RunLocation(tmp_path, STEPPED, MeshPaths(tmp_path)))
    measured = {"reward": 0.5, "logprob_gap": None, "wall": 1.0, "tokens_trained": 1}
    for step in (5, 6):
        for group in await seats.admit():
            await seats.finish(group)
        taken, manifest = await seats.leased(step), f"m1.{step}"
        names = steps.VersionReferences(manifest, "")
        commit = steps.StepCommit(step, taken, (), names, measured, {"bins": []})
        await steps.commit_step(state, STEPPED, TRAINER, seats.trainer, 1, commit)
        for _ in range(3):
            shot = await onlooker.read_snapshot()
            assert [row["step"] for row in onlooker.rows] == list(range(5, step + 1))
            assert shot.step == step
    await state.close()


def test_commands_accept_a_run_or_a_mesh_directory(held_mesh: HeldMesh) -> None:
    held_mesh.record()
    (held_mesh.root / "mesh/logs").mkdir()
    (held_mesh.root / "mesh/logs/planner-0.log").write_text("one\ntwo\n")
    for place in (held_mesh.run, held_mesh.root):
        assert "tiny" in meshrl("status", str(place)).stdout
        assert meshrl("audit", str(place)).exit_code == 0
        for words in ([str(place), "planner/0"], ["planner/0", str(place)]):
            found = meshrl("logs", *words, "-n", "1")
            assert found.stdout == "two\n", found.output
    document = json.loads(meshrl("status", "--mesh", str(held_mesh.root), "--json").stdout)
    assert [job["id"] for job in document["jobs"]] == ["tiny"]
    assert "Pass only one of them" in str(
        meshrl("status", str(held_mesh.run), "--mesh", str(held_mesh.root)).exception
    )


def test_version_option_prints_the_version() -> None:
    found = meshrl("--version")
    assert found.exit_code == 0 and found.stdout.startswith("meshrl 0.")
