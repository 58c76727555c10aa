"""Everything of a run is killed at once: the record that is left accounts for each trajectory."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl import leftovers
from tests.mesh.running import Run

pytestmark = [pytest.mark.timeout(150), pytest.mark.xdist_group("mesh")]


def test_an_audit_after_a_crash_finds_all_trajectories(run: Callable[..., Run]) -> None:
    mesh = run(budget__steps=500, rollout__max_tokens=200)
    mesh.until("four steps in the record", lambda: recorded(mesh.directory, '"step"') >= 4)
    mesh.program.send_signal(signal.SIGKILL)
    mesh.program.wait(10.0)
    assert not (mesh.directory / "in_flight.json").exists()
    found = mesh.audit()
    assert (found["lost"], found["trained_twice"]) == (0, 0), found
    assert found["trained"] + found["filtered"] >= 4 * 2 * 4
    assert found["in_flight"] > 0
    end_mesh((mesh.directory / "mesh/settings.json").resolve())


def recorded(directory: Path, kind: str) -> int:
    path = directory / "events.jsonl"
    return path.read_text().count(f'"kind": {kind}') if path.exists() else 0


def end_mesh(settings: Path) -> None:
    """Ends what waits for an agent that will not come: workers give it a minute."""
    asyncio.run(leftovers.end_all(settings, 5.0))
    assert leftovers.belonging_to(settings) == []
