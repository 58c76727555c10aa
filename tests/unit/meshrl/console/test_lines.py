"""Each line of a log becomes a JSON object, and what belongs together one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshrl.launch.console.console import LogObjects

NOW = "2026-11-23T12:00:00Z"
TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    1 / 0
ZeroDivisionError: division by zero"""


def objects(*lines: str, service: str = "planner-0") -> list[dict[str, Any]]:
    log = LogObjects(service)
    found = [text for line in lines for text in log.take(line, NOW)]
    return [json.loads(text) for text in [*found, *log.rest(NOW)]]


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
