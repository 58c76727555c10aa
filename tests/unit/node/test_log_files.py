"""Parts of log files, as an agent gives them to who is on another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.services.node.agent import MOST_BYTES, HostLogFiles


def test_a_log_is_read_in_whole_lines_to_its_end_and_on_as_it_grows(tmp_path: Path) -> None:
    path, logs = tmp_path / "engine-g1.log", HostLogFiles(tmp_path)
    path.write_text("one\ntwo\nthr")
    [file] = logs.listed()
    assert (file.name, file.bytes) == ("engine-g1", 11)
    end = logs.read("engine-g1", -5, 100)
    assert (end.text, end.next, end.size) == ("o\nthr", 11, 11)
    part = logs.read("engine-g1", 0, 6)
    assert (part.text, part.next) == ("one\n", 4)
    assert logs.read("engine-g1", part.next, 100).text == "two\n"
    with path.open("a") as log:
        log.write("ee\nfour")
    assert logs.read("engine-g1", 8, 100).text == "three\n"
    assert logs.read("engine-g1", 10_000, 100).text == ""


def test_a_long_line_comes_in_pieces_and_no_part_is_larger_than_the_most(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x" * (3 * MOST_BYTES))
    part = HostLogFiles(tmp_path).read("a", 0, 10 * MOST_BYTES)
    assert part.next == len(part.text) == MOST_BYTES


@pytest.mark.parametrize("name", ["b", "../secret", "/etc/passwd", "", "secret\0"])
def test_only_logs_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.log").write_text("a\n")
    (tmp_path / "secret.log").write_text("hush\n")
    with pytest.raises(NotFound):
        HostLogFiles(tmp_path / "logs").read(name, 0, 10)
