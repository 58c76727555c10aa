"""Pages of several processes become one that Prometheus takes."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshrl.launch.outward.outward import Merged

FIRST = """\
# HELP meshrl_tokens tokens
# TYPE meshrl_tokens gauge
meshrl_tokens{service="engine/0",kind="engine",job="a \\"quoted\\" job"} 5.0
# HELP meshrl_late_frames_total late_frames
# TYPE meshrl_late_frames_total counter
meshrl_late_frames_total{service="engine/0",kind="engine",job=""} 2.0
"""
SECOND = """\
# HELP meshrl_tokens what is said only once
# TYPE meshrl_tokens gauge
meshrl_tokens{service="engine/0",kind="engine",job="b"} 7.0
# HELP meshrl_late_frames late_frames
# TYPE meshrl_late_frames gauge
meshrl_late_frames 1.0
"""


def merged() -> str:
    both = Merged()
    both.add_page(FIRST, {"service": "engine/0", "kind": "engine", "job": "a"})
    both.add_page(SECOND, {"service": "engine/1", "kind": "engine", "job": "b"})
    status, kind, body = both.rendered()
    assert status == 200 and kind.startswith("text/plain")
    return body.decode()


def test_each_family_comes_once_with_one_help_and_one_type() -> None:
    heads = re.findall(r"^# (HELP|TYPE) (\S+)", merged(), re.MULTILINE)
    assert len(heads) == len(set(heads))
    assert len(heads) == 2 * 3


def test_each_sample_is_of_the_process_that_was_asked() -> None:
    """Whatever its page claims: two would else be one."""
    found = [
        (s.name, s.labels["service"], s.labels["job"], s.value)
        for family in text_string_to_metric_families(merged())
        for s in family.samples
    ]
    assert sorted(found) == [
        ("meshrl_late_frames", "engine/1", "b", 1.0),
        ("meshrl_late_frames_total", "engine/0", "a", 2.0),
        ("meshrl_tokens", "engine/0", 'a "quoted" job', 5.0),
        ("meshrl_tokens", "engine/1", "b", 7.0),
    ]


def test_one_name_of_two_types_is_of_neither() -> None:
    both = Merged()
    both.add_page("# TYPE x gauge\nx 1\n", {"service": "a"})
    both.add_page("# TYPE x summary\nx 2\n", {"service": "b"})
    assert "# TYPE x untyped" in both.rendered()[2].decode()


@pytest.mark.parametrize("page", ["meshrl_x{ 1", "<html>", "x{a=b} 1", "meshrl_x one"])
def test_what_is_no_page_is_refused_and_adds_nothing(page: str) -> None:
    both = Merged()
    with pytest.raises(ValueError):
        both.add_page("# TYPE y gauge\ny 1\n" + page, {"service": "a"})
    assert both.rendered()[2] == b""
