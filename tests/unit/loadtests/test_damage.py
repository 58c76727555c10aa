"""Load test of file corruption: its changes to a file and its classification of trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.damage.__main__ import ALL, summary
from loadtests.damage.files import HARMS, KINDS, harm

CONTENT = bytes(range(64))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize(("at_head", "at"), [(True, 7), (False, 32)])
def test_flip_changes_one_bit(path: Path, at_head: bool, at: int) -> None:
    assert harm("flip", path, None, at_head) == ""
    changed = {place for place, byte in enumerate(path.read_bytes()) if byte != CONTENT[place]}
    assert changed == {at}
    assert (path.read_bytes()[at] ^ CONTENT[at]).bit_count() == 1


def test_truncated_emptied_and_deleted_files_lose_their_content(path: Path) -> None:
    assert harm("truncate", path, None, False) == ""
    assert path.read_bytes() == CONTENT[:32]
    assert harm("empty", path, None, False) == ""
    assert path.read_bytes() == b""
    assert harm("flip", path, None, False)
    assert harm("delete", path, None, False) == ""
    assert not path.exists()


def test_older_copy_must_differ(path: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.write_bytes(CONTENT)
    assert harm("older", path, older, False)
    older.write_bytes(b"before")
    assert harm("older", path, older, False) == ""
    assert path.read_bytes() == older.read_bytes() == b"before"
    assert harm("older", path, None, False)


def test_each_kind_is_tried_twice_with_each_corruption() -> None:
    assert len({trial.name for trial in ALL}) == len(ALL) == 2 * len(KINDS) * len(HARMS)


def test_skipped_trial_is_not_counted() -> None:
    rows = [
        {"name": name, "outcome": name, "lost": 0, "trained_twice": 0}
        for name in ("recovered", "named", "silent", "hung", "skipped")
    ]
    answer = summary(rows)
    assert (answer["trials"], answer["skipped"], answer["recovered"]) == (4, 1, 0.25)
    assert answer["wrong"] == ["silent", "hung"]
