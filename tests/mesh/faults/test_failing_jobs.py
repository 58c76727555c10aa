"""Jobs that fail with a named error by rewards, files or processes, while the others continue."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshrl.commands.status import diagnose_run_stalls
from meshrl.common.base.files import json_lines
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.process.supervision.exit_reports import read_last_exits
from meshrl.common.state import events, jobs
from meshrl.job import bundle, job_reader
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.view.history import sample_files
from tests.load import scaled
from tests.mesh.jobs import digits
from tests.mesh.running import JOB, Run
from tests.unit.docs.test_documents import units

pytestmark = pytest.mark.timeout(300)
HEAD = (MeshShape(workers=2),)
SOON_S = 20.0
ENDS_S = 90.0

Changes = dict[str, dict[str, Any]]


async def submit(
    mesh: Launcher, name: str, changes: Changes, modules: dict[str, str] | None = None
) -> None:
    """Submit the job of digits with other values, and other code in its modules."""
    config, base = job_reader.load_config(JOB, [])
    run_dir = mesh.mesh_paths.root / name
    _, packed = bundle.pack_bundle(config, base, run_dir)
    document = json.loads(json.dumps(packed))
    for section, values in changes.items():
        document[section] |= values
    for file, code in (modules or {}).items():
        (directory,) = run_dir.glob("bundle/*/modules")
        directory.chmod(0o755)
        (directory / file).unlink(missing_ok=True)
        (directory / file).write_text(code)
    document["bundle"]["files"] = bundle_files.list_files(Path(document["bundle"]["dir"]))
    await jobs.submit(mesh.state, name, document, str(run_dir), uuid.uuid4().hex)


async def wait_for_end(mesh: Launcher, name: str, within_s: float) -> jobs.JobRow:
    within_s = scaled(within_s)
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        row = await jobs.read_job(mesh.state, name)
        if row.is_terminal:
            return row
        await asyncio.sleep(0.05)
    last_events = [(e.kind, e.fields) for e in (await events.read_all(mesh.state))[-20:]]
    stalls = await asyncio.to_thread(diagnose_run_stalls, mesh.mesh_paths)
    raise AssertionError(f"{name} is {row.phase} after {within_s:g} s: {last_events} {stalls}")


MISSING = "import os\n\nimport no_such_package\n"
LOST = "ModuleNotFoundError: No module named 'no_such_package'"
CASES: dict[str, tuple[Changes, dict[str, str], list[str]]] = {
    "positions": (
        {"rollout": {"max_tokens": 4000}},
        {},
        ["ConfigError", "4000", "2048 positions", "rollout.max_tokens", "engine-"],
    ),
    "imports": ({}, {"digits.py": MISSING}, [LOST, "digits.py:3"]),
    "stop": (
        {"rollout": {"stop": ["<nothing>"]}},
        {},
        ["ConfigError", "'<nothing>' is not a token", "rollout.stop"],
    ),
    "sglang": (
        {"rollout": {"engine": "sglang", "sglang_python": "/nowhere/python"}},
        {},
        ["there is no interpreter /nowhere/python", "meshrl engine install sglang"],
    ),
    "environment": (
        {"environment": {"use": "game:Game"}},
        {"game.py": MISSING},
        [LOST, "game.py:3", "environment-rollout-environment-0"],
    ),
    "prompts": (
        {"rollout": {"max_tokens": 5}},
        {},
        ["all of the last", "its prompt has 5 tokens", "rollout.max_tokens = 5"],
    ),
}


def list_job_processes(mesh: Launcher) -> set[str]:
    """Return the processes that run for one job alone."""
    return {
        name for name in mesh.process_names.values() if name.startswith(("rollout/", "sandbox/"))
    }


@pytest.mark.deep
async def test_invalid_job_fails_with_a_reason_and_the_next_one_runs(mesh: Launcher) -> None:
    for name, (changes, modules, wanted) in CASES.items():
        await submit(mesh, name, changes, modules)
        row = await wait_for_end(mesh, name, SOON_S)
        assert row.phase == "failed"
        for part in wanted:
            assert part in row.error, (part, row.error)
    await submit(mesh, "unforeseen", {"rollout": {"forced_lengths": ["x"]}})
    row = await wait_for_end(mesh, "unforeseen", ENDS_S)
    assert "rollout/unforeseen/0 exited: TypeError" in row.error
    assert "meshrl logs rollout/unforeseen/0" in row.error
    await submit(mesh, "sound", {"budget": {"steps": 1}})
    row = await wait_for_end(mesh, "sound", ENDS_S)
    assert row.phase == "finished", row.error
    summary_text = [
        e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"
    ]
    tries = [t["times"] for t in summary_text if t["job"] == "unforeseen"]
    assert len(tries) >= 3, "it is tried again"
    assert tries == list(range(1, len(tries) + 1)), "each end is told"
    summary_text = [t for t in summary_text if t["job"] != "unforeseen"]
    assert {t["job"] for t in summary_text} == {"positions", "sglang", "environment"}
    assert all(t["final"] and t["error"]["type"] == "ConfigError" for t in summary_text), (
        json.dumps(summary_text)
    )
    assert {end.job for end in await read_last_exits(mesh.state)} <= {*CASES, "unforeseen"}
    async with asyncio.timeout(scaled(ENDS_S)):
        while list_job_processes(mesh):
            await asyncio.sleep(0.1)


def list_left_processes() -> list[int]:
    """Return the processes that the reward `digits:broken` has left behind."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", str(digits.STAYS_S)]:
            found.append(process.pid)
    return found


@pytest.mark.deep
def test_unscorable_rows_are_dropped_by_type_and_others_train(
    run: Callable[..., Run],
) -> None:
    mesh = run(reward__use="digits:unreliable", budget__steps=3, mesh__workers=1)
    assert mesh.finish() == 0, mesh.output
    assert "a mesh of 1 worker " in mesh.output and "w0:training w0:rollout" in mesh.output
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"]) == ("finished", 3)
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["typed_drops"] >= 4
    summary_text = " ".join(fields["reason"] for fields in mesh.events("dropped"))
    assert "failed" in summary_text
    log = (mesh.directory / "mesh/logs/rollout-digits-0.log").read_text()
    assert "reward: raised: ValueError: no (digits.py:" in log
    assert "reward: timeout: reward took more than 0.3 s" in log
    assert "reward: bad_value: reward returned 'a lot', a str" in log
    assert mesh.audit()["lost"] == 0
    assert "reward raised at digits.py:" in mesh.output
    assert "reward timed out at digits.py:" in mesh.output
    rows = list(json_lines.iterate_rows(mesh.directory / "metrics.jsonl"))
    assert summary["failed_share"] > 0 and any(row["failed_share"] for row in rows)
    documented = units("use/algorithms.md", "## Health of a step")
    assert {key for row in rows for key in row} <= documented.keys()
    kinds = {failure["kind"]: failure["count"] for failure in summary["failures"]}
    assert min(kinds["reward raised"], kinds["reward timed out"]) > 0
    samples = sample_files.read_samples(mesh.directory)
    assert {sample["reward"] is None for sample in samples} == {True, False}
    assert all(sample["turns"][0]["role"] == "model" for sample in samples)


@pytest.mark.rotating(2)
def test_always_raising_reward_fails_the_job_with_its_error(
    run: Callable[..., Run],
) -> None:
    mesh = run(reward__use="digits:broken")
    assert mesh.finish() == 1
    assert not list_left_processes(), "they have outlived their job"
    assert "error: the job failed: all of the last" in mesh.output
    assert "ValueError: cannot judge ?" in mesh.output
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"], summary["trained"]) == ("failed", 0, 0)
    assert summary["lost"] == 0
    assert summary["typed_drops"] > 0
