"""Python program that is killed in mid-run: its mesh follows, and the run continues."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

import meshrl
from meshrl.common.state.events import Event
from meshrl.launch.leftover_processes import find_leftovers
from tests.load import scaled

PROGRAM = Path(__file__).parents[1] / "jobs/python_program.py"
GONE_S = 30.0
MORE_STEPS = 2


def check_fields(event: Event[Any]) -> None:
    """Check that an event of a typed kind has the documented fields, of their types."""
    (fields,) = get_args(type(event).__orig_bases__[0])  # type: ignore[attr-defined]
    TypeAdapter(fields).validate_python(event.fields, strict=True)


@pytest.mark.deep
def test_mesh_follows_a_killed_program_and_its_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    settings = [sys.executable, str(PROGRAM), "budget.steps=100000", "evaluation.after=true"]
    with subprocess.Popen(settings, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        directory = Path(program.stdout.readline().strip())
        while int(program.stdout.readline().split()[0]) < MORE_STEPS:
            pass
        mesh = (directory / "mesh/settings.json").resolve()
        assert find_leftovers(mesh)
        program.kill()
    until = time.monotonic() + scaled(GONE_S)
    while find_leftovers(mesh):
        assert time.monotonic() < until, "processes of the mesh outlived their program"
        time.sleep(0.1)

    # The record may be some steps behind the state.
    with pytest.raises(meshrl.ConfigError, match=r"= 1, but \d+ steps are done") as caught:
        meshrl.resume(directory, ["budget.steps=1"])
    done = int(caught.value.message.split()[4])
    assert done >= meshrl.Run(directory).metrics[-1]["step"] >= MORE_STEPS
    run = meshrl.resume(directory, [f"budget.steps={done + MORE_STEPS}"])
    assert (run.state, run.model) == ("finished", directory / "model")
    assert [row["step"] for row in run.metrics] == list(range(1, done + MORE_STEPS + 1))
    assert 0 < max(sample["reward"] for sample in run.samples) <= 2.0
    assert run.summary["lost"] == 0 and run.summary["steps"] == done + MORE_STEPS
    assert f"step {done + MORE_STEPS}/" in capsys.readouterr().out
    events = list(run.events())
    assert {type(event).__name__ for event in events} >= {"StepEvent", "PhaseEvent", "ReadyEvent"}
    for event in events:
        if type(event) is not Event:
            check_fields(event)
