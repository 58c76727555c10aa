"""Jobs that cannot run end with the reason within seconds, with their processes, and the mesh goes
on with the next.

Their documents go to the mesh as they are: nothing looks at them before its processes do.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.commands.status import diagnosed
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.process.supervision.ended import ended
from meshrl.common.state import events, jobs
from meshrl.directory.places import MeshPlace
from meshrl.job import bundle, jobfile
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.shape import MeshShape
from tests.load import scaled
from tests.mesh.running import JOB

pytestmark = pytest.mark.timeout(300)
SOON_S = 20.0
ENDS_S = 90.0

Changes = dict[str, dict[str, Any]]


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launcher]:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    launcher = Launcher(MeshPlace(tmp_path / "m"), MeshShape(workers=2))
    await launcher.start()
    yield launcher
    await launcher.stop()


async def submitted(
    mesh: Launcher, name: str, changes: Changes, modules: dict[str, str] | None = None
) -> None:
    """Hands over the job of digits with other values, and other code in its modules."""
    config, base = jobfile.load(JOB, [])
    run_dir = mesh.place.root / name
    _, packed = bundle.pack(config, base, run_dir)
    document = json.loads(json.dumps(packed))
    for section, values in changes.items():
        document[section] |= values
    for file, code in (modules or {}).items():
        (directory,) = run_dir.glob("bundle/*/modules")
        directory.chmod(0o755)
        (directory / file).unlink(missing_ok=True)
        (directory / file).write_text(code)
    document["bundle"]["files"] = bundle_files.listed(Path(document["bundle"]["dir"]))
    await jobs.submit(mesh.state, name, document, str(run_dir), uuid.uuid4().hex)


async def ends(mesh: Launcher, name: str, within_s: float) -> jobs.JobRow:
    within_s = scaled(within_s)
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        row = await jobs.job(mesh.state, name)
        if row.ended:
            return row
        await asyncio.sleep(0.05)
    said = [(e.kind, e.fields) for e in (await events.read_all(mesh.state))[-20:]]
    stalls = await asyncio.to_thread(diagnosed, mesh.place)
    raise AssertionError(f"{name} is {row.phase} after {within_s:g} s: {said} {stalls}")


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
        ["ConfigError", "'<nothing>' is no token", "rollout.stop"],
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


def of_jobs(mesh: Launcher) -> set[str]:
    """The processes that run for one job alone."""
    return {name for name in mesh.pids.values() if name.startswith(("rollout/", "sandbox/"))}


@pytest.mark.deep
async def test_a_job_that_cannot_run_says_why_and_the_next_one_runs(mesh: Launcher) -> None:
    for name, (changes, modules, wanted) in CASES.items():
        await submitted(mesh, name, changes, modules)
        row = await ends(mesh, name, SOON_S)
        assert row.phase == "failed"
        for part in wanted:
            assert part in row.error, (part, row.error)
    await submitted(mesh, "unforeseen", {"rollout": {"lengths": ["x"]}})
    row = await ends(mesh, "unforeseen", ENDS_S)
    assert "rollout/unforeseen/0 ended by TypeError" in row.error
    assert "meshrl logs rollout/unforeseen/0" in row.error
    await submitted(mesh, "sound", {"budget": {"steps": 1}})
    row = await ends(mesh, "sound", ENDS_S)
    assert row.phase == "finished", row.error
    told = [e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"]
    tries = [t["times"] for t in told if t["job"] == "unforeseen"]
    assert len(tries) >= 3, "it is tried again"
    assert tries == list(range(1, len(tries) + 1)), "each end is told"
    told = [t for t in told if t["job"] != "unforeseen"]
    assert {t["job"] for t in told} == {"positions", "sglang", "environment"}
    assert all(t["final"] and t["error"]["type"] == "ConfigError" for t in told), json.dumps(told)
    assert {end.job for end in await ended(mesh.state)} <= {*CASES, "unforeseen"}
    async with asyncio.timeout(scaled(ENDS_S)):
        while of_jobs(mesh):
            await asyncio.sleep(0.1)
