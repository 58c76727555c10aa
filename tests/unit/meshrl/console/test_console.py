"""The console: what people type and choose, and what is shown to them."""

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
WITHIN_S = 60.0  # on a busy host; it takes half a second


class Told:
    """A process whose output is read line by line."""

    def __init__(self, directory: Path) -> None:
        self.place = MeshPaths(directory)
        self.program = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("told.py")), str(directory)],
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
def told(tmp_path: Path) -> Iterator[Told]:
    logs = MeshPaths(tmp_path).logs
    logs.mkdir(parents=True)
    (logs / "old.log").write_text("of an earlier start\n")
    process = Told(tmp_path)
    yield process
    process.program.kill()
    process.program.communicate()


def test_every_log_is_told_to_its_last_line_as_json_and_nothing_else(told: Told) -> None:
    assert told.next()["event"] == "it begins"
    told.write("planner/0", '{"service": "planner/0", "event": "le')
    told.write("old", "goes on\n")
    assert (said := told.next())["event"] == "goes on" and said["service"] == "old"
    told.write("planner/0", 'ads", "job": "calc"}\n')
    assert (said := told.next())["event"] == "leads" and said["job"] == "calc"
    rest, err = told.end()
    assert {(one["service"], one["event"]) for one in rest} == {
        ("weights", "its last word"),
        ("launcher", "error: it has given up"),
    }
    assert told.program.returncode == 1 and not err
    assert "it has given up" in told.place.log_path("launcher").read_text()


def test_too_many_open_files_are_told_once_and_it_goes_on(told: Told) -> None:
    assert told.next()["event"] == "it begins"
    few = (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    had = resource.prlimit(told.program.pid, resource.RLIMIT_NOFILE, few)
    said = told.next()
    assert said["service"] == "console" and "Too many open files" in said["event"]
    resource.prlimit(told.program.pid, resource.RLIMIT_NOFILE, had)
    told.write("planner/0", "on it goes\n")
    assert told.next()["event"] == "on it goes"


def test_a_log_that_is_gone_is_told_to_its_last_word_and_begun_anew(told: Told) -> None:
    assert told.next()["event"] == "it begins"
    told.write("planner/0", "first\nsecond")
    assert told.next()["event"] == "first"
    told.place.log_path("planner/0").unlink()
    assert told.next()["event"] == "second"
    told.write("planner/0", "another of the same name\n")
    assert told.next()["event"] == "another of the same name"


def test_no_log_is_looked_at_for_ever(tmp_path: Path) -> None:
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


def test_who_hangs_up_or_does_not_read_ends_nothing_and_hinders_no_end(told: Told) -> None:
    assert told.next()["event"] == "it begins"
    told.write("planner/0", "x" * 100 + "\n" + ("y" * 1000 + "\n") * 2000)
    assert told.program.stdin is not None
    told.program.stdin.close()
    told.program.stdin = None
    assert told.program.wait(scaled(WITHIN_S)) == 1  # nobody reads what a pipe does not hold
    assert told.next()["event"] == "x" * 100


def test_a_reader_that_has_gone_is_written_to_no_more(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    following = log_printer.LogPrinter(tmp_path, writes)
    following.start()
    os.close(reads)
    (tmp_path / "0.log").write_text("x\n")
    following.stop()
    assert following.file_count == 1
    os.close(writes)


def test_output_that_takes_nothing_now_is_tried_again(
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


def all_of(file: LogFollower, last: bool = False) -> list[str]:
    found = []
    while True:
        found += [json.loads(one)["event"] for one in file.read_objects(time.monotonic(), "", last)]
        if not file.is_behind:
            return found


def test_a_file_that_is_too_long_starts_again_once_it_was_printed_or_told(tmp_path: Path) -> None:
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
        assert "this log goes on from" in json.loads(lines.readline())["event"]
        following.stop()
    assert (
        log.stat().st_size < 1000 and log.with_name(f"{log.name}.1").stat().st_size > MAX_LOG_BYTES
    )
    os.close(writes)


def test_a_file_that_is_too_long_is_printed_before_it_starts_again(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    log, many = tmp_path / "engine-0.log", 3 * READ_BYTES // 1024
    log.touch()
    os.truncate(log, MAX_LOG_BYTES)
    following = log_printer.LogPrinter(tmp_path, writes)
    with log.open("ab") as file:
        file.write(many * (1023 * b"z" + b"\n"))
    following.start()
    with os.fdopen(reads) as lines:
        told = [json.loads(lines.readline())["event"] for _ in range(many + 1)]
        following.stop()
    assert told[:many] == many * ["z" * 1023] and "this log goes on from" in told[-1]
    os.close(writes)


def test_a_file_that_is_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("some line\n")
    file = LogFollower(path, path.stat().st_size)
    path.write_text("new\n")
    assert [*all_of(file), *all_of(file)] == ["new"]


def test_a_root_that_nobody_may_write_is_a_mistake_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="nothing can be written in"):
        log_printer.start_printing(MeshPaths(tmp_path / "file"), "launcher")


def test_a_log_that_cannot_be_read_is_not_asked_for_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.mkdir()  # has a size, and opens as no file
    assert all_of(LogFollower(path, 0)) == []


NOW = "2026-11-23T12:00:00Z"
TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    1 / 0
ZeroDivisionError: division by zero"""


def objects(*lines: str, service: str = "planner-0") -> list[dict[str, Any]]:
    log = LogLineParser(service)
    found = [text for line in lines for text in log.add_line(line, NOW)]
    return [json.loads(text) for text in [*found, *log.flush(NOW)]]


def test_an_object_stays_as_it_is_and_gets_what_it_lacks() -> None:
    said = {"event": "joined", "job": "calc", "level": "warning", "trace": "5e"}
    assert objects(json.dumps(said)) == [said | {"service": "planner-0", "timestamp": NOW}]


def test_text_is_wrapped_under_the_name_that_the_log_told_last() -> None:
    found = objects('{"service": "planner/0", "event": "x"}', "plain", "error: bad", "", "  ")
    assert [one["service"] for one in found] == ["planner/0"] * 3
    assert [(one["event"], one["level"]) for one in found[1:]] == [
        ("plain", "info"),
        ("error: bad", "error"),
    ]


def test_text_is_wrapped_with_the_job_that_its_process_serves() -> None:
    said = {"service": "rollout/calc/0", "job": "calc", "event": "x"}
    found = objects(json.dumps(said), "printed by an environment", service="rollout-calc-0")
    assert [one["job"] for one in found] == ["calc", "calc"]


def test_a_line_that_nests_too_deep_to_be_read_or_written_is_text() -> None:
    for depth in (*range(900, 1000), 5000):
        line = '{"service": "x", "a": ' + "[" * depth + "]" * depth + "}"
        [said] = objects(line)
        assert said["event"] == line or said["service"] == "x"
    assert said["event"] == line


def test_a_traceback_is_one_object_and_what_follows_another() -> None:
    found = objects("before", *TRACEBACK.splitlines(), "after", "  and more of it")
    assert [(one["event"], one["level"]) for one in found] == [
        ("before", "info"),
        (TRACEBACK, "error"),
        ("after\n  and more of it", "info"),
    ]


def test_redis_says_how_bad_it_is() -> None:
    found = objects("12:M 23 Nov 2026 14:17:14.123 # low memory", "12:M 23 Nov 2026 14:17:14 * up")
    assert [one["level"] for one in found] == ["warning", "info"]


@given(st.lists(st.text(alphabet='a {}"\t:1[]é\x00', max_size=20)))
def test_whatever_comes_each_object_is_whole_and_no_text_is_lost(lines: list[str]) -> None:
    found = objects(*lines)
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
