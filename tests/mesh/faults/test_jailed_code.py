"""Job whose trajectories have sessions of Python, on a mesh whose sandboxes are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from meshrl.common.records.ledger import RecordKind
from tests.mesh.running import Run, slow_pace

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("bwrap")]


@pytest.mark.deep
def test_sessions_survive_killed_sandboxes_or_are_lost_by_type(
    run: Callable[..., Run],
) -> None:
    mesh = run(
        environment__use="digits:notebook",
        environment__tools="{notebook='python_session'}",
        reward__use="",
        reward__parts="[{use='digits:score_session'},"
        " {use='regex', weight=0.5, options={pattern='[0-9]'}}]",
        rollout__stop="['1', '2', '3', '4', '5', '6', '7', '8', '9']",
        # some 25 tokens of 20 ms: unfinished when they are killed
        rollout__pace=slow_pace(20, 64, 100000),
        sandbox__processes=2,
        budget__steps=8,
    )
    mesh.until("tools have answered", lambda: mesh.in_ledger(RecordKind.TOOL), within_s=150.0)
    first, second = mesh.pid("sandbox/digits/0"), mesh.pid("sandbox/digits/1")
    for process in psutil.Process(first).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # jails start and end
            if process.name() == "bwrap":
                process.send_signal(signal.SIGKILL)  # all jails of that sandbox, and the zygote
    os.kill(second, signal.SIGKILL)
    assert mesh.finish() == 0, mesh.output
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"]) == ("finished", 8)
    fates = {key: summary[key] for key in ("lost", "trained_twice", "typed_drops")}
    assert set(fates.values()) == {0}, (fates, mesh.events("dropped"))
    assert mesh.audit()["lost"] == 0
