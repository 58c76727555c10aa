"""A disk without room is said by name, loses no record, and fails nobody who logs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.common.base.files import lines
from meshrl.common.state.registry import Entry
from meshrl.view import storage
from meshrl.view.history.run_snapshot import RunHistory, snapshot
from meshrl.view.live.view import RunLines
from tests.unit.meshrl.view.test_watch import reading

NO_ROOM_THERE = Path("/proc")  # a file system that never has any


def test_a_disk_without_room_is_named_with_what_to_do(tmp_path: Path) -> None:
    assert storage.full([tmp_path, tmp_path / "gone"]) == ""
    text = storage.full([tmp_path, NO_ROOM_THERE])
    assert "disk of /proc is full" in text and "Make room" in text


def test_rows_are_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = f"""
        import resource
        from pathlib import Path
        from meshrl.common.base.errors import StorageFull
        from meshrl.common.base.files.lines import LineFile
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            for step in range(20):
                LineFile(Path({str(path)!r})).append([{{"step": step}}, {{"also": step}}])
        except StorageFull as error:
            print(error.where, step)
    """
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    where, step = said.split()
    assert where == str(path)
    before = path.read_text()
    assert before.endswith("\n") and len(lines.read(path).rows) == 2 * int(step)
    assert lines.read(path).rows[-1] == {"also": int(step) - 1}


def test_a_log_on_a_full_disk_fails_nobody() -> None:
    code = """
        from meshrl.common.mesh.telemetry.logs import Telemetry, log_to_stderr
        log_to_stderr("rollout/0")
        for _ in range(3):
            Telemetry("rollout/0").log.error("ledger: disk full")
        print("goes on")
    """
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True)
    assert said.stdout == "goes on\n"


def test_the_run_says_at_once_who_waits_for_room_and_when_there_is_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = [{"on": "disk", "what": "room for the ledger", "since_ms": 0, "count": 1}]
    full, well = reading(10.0, 0), reading(14.0, 0)
    entry = Entry(name="rollout/0", kind="rollout", alive=True, waits=waits)
    full.mesh = replace(full.mesh, entries=[entry])
    lines, history = RunLines(), RunHistory()
    for look in (full, full, well):
        lines.show(snapshot(look, history), [])
    printed = capsys.readouterr().out
    assert printed.count("a disk is full: rollout/0 waits for room for the ledger. Make room") == 1
    assert printed.count("there is room on the disk again") == 1
