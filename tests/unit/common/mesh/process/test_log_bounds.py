"""Logs are bounded in length, whoever writes to them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from meshrl.common.mesh.process.output.log_bounds import LOG_BYTES, bound
from meshrl.services.node.log_files import HostLogFiles


def appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def test_long_log_starts_again_and_keeps_the_part_before(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.log", tmp_path / "a.log.1"
    one, other = appending(path), appending(path)
    os.write(one, b"first\n")
    assert not bound(one, 10)
    os.write(one, b"more of it\n")
    assert bound(one, 10) and not bound(other, 200)
    os.write(other, b"second\n")
    assert kept.read_text() == "first\nmore of it\n"
    assert path.read_text().endswith(" 0 bytes before that were deleted]\nsecond\n")
    assert bound(other, 10) and kept.read_text().endswith("second\n")
    assert path.read_text() == (
        "[meshrl: this log goes on from a.log.1; 17 bytes before that were deleted]\n"
    )
    before = kept.stat().st_size
    assert bound(one, 10) and re.search(rf" {17 + before} bytes", path.read_text())
    path.unlink()
    os.write(one, b"x" * 300)
    assert bound(one, 200) and kept.stat().st_size < 200, "of a deleted log nothing is kept"
    for fd in (one, other):
        os.close(fd)


def test_host_bounds_the_logs_of_all_its_processes(tmp_path: Path) -> None:
    log = appending(tmp_path / "trainer.log")
    os.truncate(log, LOG_BYTES)
    os.write(log, b"the last line\n")
    (tmp_path / "short.log").write_text("as it was\n")
    files = HostLogFiles(tmp_path)
    files.bound()
    os.write(log, b"goes on\n")
    assert {file.name: file.bytes < 200 for file in files.listed()} == {
        "short": True,
        "trainer": True,
    }
    assert (tmp_path / "short.log").read_text() == "as it was\n"
    part = files.read("trainer", 0, 1 << 16)
    assert "goes on from trainer.log.1" in part.text and part.text.endswith("goes on\n")
    os.close(log)
