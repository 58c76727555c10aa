"""Output of a root process: logs as JSON lines in the foreground."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.output.log_bounds import MAX_LOG_BYTES
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.console import log_printer
from meshrl.launch.console.log_printer import READ_BYTES, LogFollower, LogLineParser
from tests.load import scaled

ROOT = Path(__file__).parents[4]
WITHIN_S = 60.0  # on a busy host; normally half a second


class ForegroundProcess:
    """Foreground process whose output is read line by line."""

    def __init__(self, directory: Path) -> None:
        self.place = MeshPaths(directory)
        self.program = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("foreground_process.py")),
                str(directory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )

    def write(self, name: str, text: str) -> None:
        with self.place.log_path(name).open("a") as log:
            log.write(text)

    def next(self) -> dict[str, Any]:
        assert self.program.stdout is not None
        found: dict[str, Any] = json.loads(self.program.stdout.readline())
        return found

    def end(self) -> tuple[list[dict[str, Any]], str]:
        out, err = self.program.communicate("", timeout=scaled(WITHIN_S))
        return [json.loads(line) for line in out.splitlines()], err


@pytest.fixture
def foreground(tmp_path: Path) -> Iterator[ForegroundProcess]:
    logs = MeshPaths(tmp_path).logs
    logs.mkdir(parents=True)
    (logs / "old.log").write_text("of an earlier start\n")
    process = ForegroundProcess(tmp_path)
    yield process
    process.program.kill()
    process.program.communicate()


def test_every_log_is_printed_completely_as_json(foreground: ForegroundProcess) -> None:
    assert foreground.next()["event"] == "it begins"
    foreground.write("planner/0", '{"service": "planner/0", "event": "le')
    foreground.write("old", "goes on\n")
    assert (said := foreground.next())["event"] == "goes on" and said["service"] == "old"
    foreground.write("planner/0", 'ads", "job": "calc"}\n')
    assert (said := foreground.next())["event"] == "leads" and said["job"] == "calc"
    rest, err = foreground.end()
    assert {(one["service"], one["event"]) for one in rest} == {
        ("weights", "its last word"),
        ("launcher", "error: it has given up"),
    }
    assert foreground.program.returncode == 1 and not err
    assert "it has given up" in foreground.place.log_path("launcher").read_text()


def test_too_many_open_files_are_reported_once_and_printing_continues(
    foreground: ForegroundProcess,
) -> None:
    assert foreground.next()["event"] == "it begins"
    few = (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    had = resource.prlimit(foreground.program.pid, resource.RLIMIT_NOFILE, few)
    said = foreground.next()
    assert said["service"] == "console" and "Too many open files" in said["event"]
    resource.prlimit(foreground.program.pid, resource.RLIMIT_NOFILE, had)
    foreground.write("planner/0", "on it goes\n")
    assert foreground.next()["event"] == "on it goes"


def test_deleted_log_is_printed_to_its_end_and_its_successor_from_the_start(
    foreground: ForegroundProcess,
) -> None:
    assert foreground.next()["event"] == "it begins"
    foreground.write("planner/0", "first\nsecond")
    assert foreground.next()["event"] == "first"
    foreground.place.log_path("planner/0").unlink()
    assert foreground.next()["event"] == "second"
    foreground.write("planner/0", "another of the same name\n")
    assert foreground.next()["event"] == "another of the same name"


def test_idle_logs_are_closed(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    following = log_printer.LogPrinter(tmp_path, writes)
    following.start()
    for number in range(3):
        (tmp_path / f"{number}.log").write_text("x\n")
    with os.fdopen(reads) as lines:
        assert {json.loads(lines.readline())["service"] for _ in range(3)} == {"0", "1", "2"}
        for log in tmp_path.iterdir():
            log.unlink()
        following.stop()
    assert following.file_count == 0
    os.close(writes)


def test_closed_or_blocked_output_neither_ends_nor_delays_the_process(
    foreground: ForegroundProcess,
) -> None:
    assert foreground.next()["event"] == "it begins"
    foreground.write("planner/0", "x" * 100 + "\n" + ("y" * 1000 + "\n") * 2000)
    assert foreground.program.stdin is not None
    foreground.program.stdin.close()
    foreground.program.stdin = None
    # the reader takes only as much as a pipe holds
    assert foreground.program.wait(scaled(WITHIN_S)) == 1
    assert foreground.next()["event"] == "x" * 100


def test_closed_output_is_not_written_again(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    following = log_printer.LogPrinter(tmp_path, writes)
    following.start()
    os.close(reads)
    (tmp_path / "0.log").write_text("x\n")
    following.stop()
    assert following.file_count == 1
    os.close(writes)


def test_temporarily_full_output_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    refused, write = [True], os.write

    def full_at_first(output: int, content: memoryview) -> int:
        if output == writes and refused:
            refused.clear()
            raise BlockingIOError
        return write(output, content)

    monkeypatch.setattr(os, "write", full_at_first)
    following = log_printer.LogPrinter(tmp_path, writes)
    following.start()
    (tmp_path / "0.log").write_text("x\n")
    following.stop()
    os.close(writes)
    with os.fdopen(reads) as lines:
        assert not refused and json.loads(lines.readline())["event"] == "x"


def read_all(file: LogFollower, last: bool = False) -> list[str]:
    found = []
    while True:
        found += [json.loads(one)["event"] for one in file.read_objects(time.monotonic(), "", last)]
        if not file.is_behind:
            return found


def test_oversized_log_restarts_after_printing_or_reporting_the_rest(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    log = tmp_path / "engine-0.log"
    log.touch()
    following = log_printer.LogPrinter(tmp_path, writes)
    with log.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, MAX_LOG_BYTES + 1)
    following.start()
    with os.fdopen(reads) as lines:
        while (said := json.loads(lines.readline()))["service"] != "console":
            pass
        assert f"bytes of {log.name} were not printed" in said["event"]
        assert "this log continues" in json.loads(lines.readline())["event"]
        following.stop()
    assert (
        log.stat().st_size < 1000 and log.with_name(f"{log.name}.1").stat().st_size > MAX_LOG_BYTES
    )
    os.close(writes)


def test_oversized_log_is_printed_before_it_restarts(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    log, many = tmp_path / "engine-0.log", 3 * READ_BYTES // 1024
    log.touch()
    os.truncate(log, MAX_LOG_BYTES)
    following = log_printer.LogPrinter(tmp_path, writes)
    with log.open("ab") as file:
        file.write(many * (1023 * b"z" + b"\n"))
    following.start()
    with os.fdopen(reads) as lines:
        events = [json.loads(lines.readline())["event"] for _ in range(many + 1)]
        following.stop()
    assert events[:many] == many * ["z" * 1023] and "this log continues" in events[-1]
    os.close(writes)


def test_recreated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("some line\n")
    file = LogFollower(path, path.stat().st_size)
    path.write_text("new\n")
    assert [*read_all(file), *read_all(file)] == ["new"]


def test_unwritable_root_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not writable"):
        log_printer.start_printing(MeshPaths(tmp_path / "file"), "launcher")


def test_unreadable_log_is_not_read_endlessly(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.mkdir()  # a directory has a size but cannot be opened as a file
    assert read_all(LogFollower(path, 0)) == []


NOW = "2026-11-23T12:00:00Z"
TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    1 / 0
ZeroDivisionError: division by zero"""


def to_objects(*lines: str, service: str = "planner-0") -> list[dict[str, Any]]:
    log = LogLineParser(service)
    found = [text for line in lines for text in log.add_line(line, NOW)]
    return [json.loads(text) for text in [*found, *log.flush(NOW)]]


def test_json_line_keeps_its_fields_and_gains_the_missing_ones() -> None:
    said = {"event": "joined", "job": "calc", "level": "warning", "trace": "5e"}
    assert to_objects(json.dumps(said)) == [said | {"service": "planner-0", "timestamp": NOW}]


def test_plain_text_has_the_last_service_of_its_log() -> None:
    found = to_objects('{"service": "planner/0", "event": "x"}', "plain", "error: bad", "", "  ")
    assert [one["service"] for one in found] == ["planner/0"] * 3
    assert [(one["event"], one["level"]) for one in found[1:]] == [
        ("plain", "info"),
        ("error: bad", "error"),
    ]


def test_plain_text_has_the_job_of_its_process() -> None:
    said = {"service": "rollout/calc/0", "job": "calc", "event": "x"}
    found = to_objects(json.dumps(said), "printed by an environment", service="rollout-calc-0")
    assert [one["job"] for one in found] == ["calc", "calc"]


def test_too_deeply_nested_line_is_treated_as_text() -> None:
    for depth in (*range(900, 1000), 5000):
        line = '{"service": "x", "a": ' + "[" * depth + "]" * depth + "}"
        [said] = to_objects(line)
        assert said["event"] == line or said["service"] == "x"
    assert said["event"] == line


def test_traceback_is_one_object() -> None:
    found = to_objects("before", *TRACEBACK.splitlines(), "after", "  and more of it")
    assert [(one["event"], one["level"]) for one in found] == [
        ("before", "info"),
        (TRACEBACK, "error"),
        ("after\n  and more of it", "info"),
    ]


def test_redis_marks_become_levels() -> None:
    found = to_objects(
        "12:M 23 Nov 2026 14:17:14.123 # low memory", "12:M 23 Nov 2026 14:17:14 * up"
    )
    assert [one["level"] for one in found] == ["warning", "info"]


@given(st.lists(st.text(alphabet='a {}"\t:1[]é\x00', max_size=20)))
def test_any_input_yields_complete_objects_without_lost_text(lines: list[str]) -> None:
    found = to_objects(*lines)
    for one in found:
        assert {"service", "event", "level", "timestamp"} <= one.keys()
    plain = [line for line in lines if not _is_object(line)]
    said = "\n".join(one["event"] for one in found if set(one) == set(found[0]))
    for line in plain:
        assert line.strip() in said or not line.strip()


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
