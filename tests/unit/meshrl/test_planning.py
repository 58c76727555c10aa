"""`meshrl plan`: a look can be kept, edited and explained, without a mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands import planning
from meshrl.common.state import leader
from meshrl.common.state.pool.placing.snapshot import Snapshot
from meshrl.common.state.pool.store.reading import snapshot_document
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.common.state.redis.keys import PLANNER
from tests.unit.meshrl.run.conftest import JOB, HeldMesh, held

__all__ = ["held"]


def test_a_look_that_was_kept_is_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    snapshot = Snapshot(
        now_ms=10_000_000, workers=(WorkerRow("w0", "here", "cpu:0", 1, alive=False),)
    )
    file = tmp_path / "look.json"
    file.write_text(json.dumps({"snapshot": snapshot_document(snapshot), "memory": None}))
    assert planning.show(file, True, True, None) == 0
    assert set(json.loads(capfd.readouterr().out)) == {"decisions", "memory"}
    file.write_text("{")
    assert planning.show(file, True, False, None) == 2


def test_the_look_of_a_mesh_is_the_leaders(held: HeldMesh) -> None:
    words = ["plan", "--mesh", str(held.root)]
    assert "no planner leads" in str(CliRunner().invoke(app, words).exception)
    held.ask(lambda state: leader.campaign(state, PLANNER, "planner/0.one", 60_000))
    found = json.loads(CliRunner().invoke(app, words).output)
    assert [job["id"] for job in found["snapshot"]["jobs"]] == [JOB]
