"""Scratch directories are cleared away whatever a program has left there."""

from __future__ import annotations

import os
from pathlib import Path

from services.sandbox.isolation import scratch

DEEP = 2500  # directories in each other: more than a path or Python's recursion has room for


def test_nothing_is_left_of_what_is_deep_closed_linked_or_oddly_named(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "kept").write_text("x")
    place = Path(scratch.made(0))
    (place / "link").symlink_to(outside)
    (place / "closed" / "within").mkdir(parents=True)
    (place / "closed" / "within" / "link").symlink_to(outside)
    for name in (b"\xff\xfe", b"line\nbreak", b"-rf"):
        (place / os.fsdecode(name)).write_text("")
    fd = os.open(place, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    (place / "closed" / "within").chmod(0)
    (place / "closed").chmod(0)
    place.chmod(0)
    assert scratch.cleared(str(place))
    assert not place.exists() and (outside / "kept").read_text() == "x"


def test_what_is_gone_counts_as_cleared_and_what_is_no_directory_does_not(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert scratch.cleared(str(tmp_path / "gone"))
    assert not scratch.cleared(str(tmp_path / "link"))
