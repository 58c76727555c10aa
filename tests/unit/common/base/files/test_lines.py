"""A file of checked lines tells what is wrong with it, and gives what is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files import documents
from meshrl.common.base.files.lines import LineFile, line, read, whole

ROWS = [{"n": n, "text": "ab\u00e9" * n} for n in range(5)]


def written(directory: Path, rows: list[dict[str, object]] = ROWS) -> Path:
    path = directory / "rows.jsonl"
    LineFile(path).append(rows)
    return path


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_and_costs_one_row_at_most(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = written(tmp_path_factory.mktemp("lines"))
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    found = read(path)
    assert found.damage
    gone = [n for n, row in enumerate(ROWS) if row not in found.rows]
    assert len(gone) <= 1 or (len(gone) == 2 and gone[1] - gone[0] == 1)  # a newline was hit


@pytest.mark.parametrize(
    ("order", "said", "before"),
    [
        ((0, 1, 3, 4), "1 lines before line 3 are missing", 2),
        ((0, 1, 1, 2, 3, 4), "line 3 is there twice", 2),
        ((1, 0, 2, 3, 4), "1 lines before line 1 are missing", 0),
    ],
)
def test_lines_that_are_missing_or_there_twice_are_told(
    tmp_path: Path, order: tuple[int, ...], said: str, before: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(line(ROWS[n], n) for n in order))
    found = read(path)
    assert (found.damage, found.before) == (said, before)


def test_a_torn_tail_is_no_damage_and_is_cut_by_who_appends_alone(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("ab") as file:
        file.write(line({"torn": 1}, 5)[:-4])
    torn = path.read_bytes()
    assert read(path).rows == ROWS and not read(path).damage
    assert list(whole(path)) == ROWS and path.read_bytes() == torn
    LineFile(path).append([{"n": 5}])
    assert read(path).rows == [*ROWS, {"n": 5}] and not read(path).damage


def test_a_file_without_checks_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\n')
    assert read(path).rows == [{"n": 0}, {"n": 1}] and not read(path).checked
    path.write_text('{"n": 0}\n\0\0\n{"n": 1}\n')
    assert read(path).rows == [{"n": 0}, {"n": 1}] and read(path).damage == "line 2 is damaged"


def test_who_appends_notices_that_another_has_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = LineFile(path)
    file.append(ROWS)
    file.append([{"n": 5}])
    os.utime(path, (1, 1))  # only its time is another
    file.check()
    file.append([{"n": 6}])
    file.replace([*ROWS, {"n": 5}])
    os.utime(path, (1, 1))
    file.check()
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="somebody else"):
        file.append([{"n": 6}])
    path.unlink()
    with pytest.raises(Damaged, match="gone"):
        file.append([{"n": 6}])


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_document_changes_nothing_in_silence(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("documents") / "job.json"
    content = {"job": "sum", "document": {"seed": 7, "share": 0.25, "names": ["a", "b"]}}
    documents.write(path, content)
    changed = bytearray(path.read_bytes())
    changed[place % len(changed)] ^= 1 << bit
    try:
        found = documents.decode(bytes(changed), str(path))
    except Damaged as error:
        assert error.where == str(path)
    else:
        extra = found.keys() - content.keys()  # the check's own name was hit
        assert {key: found[key] for key in content} == content and len(extra) <= 1
