"""Checked documents and lines: any damage is found, named, and set aside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files import corruption, documents
from meshrl.common.base.files.json_lines import LineFile, encode_row, iterate_rows, read_lines
from meshrl.common.mesh.access import access_records, admitted_hosts, gateway_identity, owner
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.joined_hosts import JoinedHosts
from meshrl.launch.hosts import membership

CONTENT = {"cpu": {"a": {"x": 0.1 + 0.2}}, "wall_s": 1e22, "cached": False, "s": [[1, 2], []]}
READ: dict[str, tuple[Callable[[MeshPaths], Any], str]] = {
    "joined.json": (JoinedHosts.read, "remove it and hosts.json"),
    "hosts.json": (
        lambda place: admitted_hosts.read_hosts(place.directory),
        "remove it and joined.json",
    ),
    "owner.json": (lambda place: owner.read_owner(place.directory), "`meshrl down`, remove it"),
    "tokens.json": (
        lambda place: access_records.read_records(place.directory / access_records.RECORDS_FILE),
        "or remove it",
    ),
    "gateway.json": (lambda place: gateway_identity.find_identity(place.directory), "or remove it"),
    "membership.json": (membership.read_membership, "join from a new directory"),
}
ROWS = [{"n": n, "text": "ab\u00e9" * n} for n in range(5)]


def test_every_flipped_bit_shows() -> None:
    whole = documents.encode(CONTENT)
    assert documents.decode(whole, "there") == CONTENT
    for place in range(len(whole) - 1):  # the last one ends the line
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            try:
                found = documents.decode(bytes(changed), "there")
            except CorruptData:
                continue
            assert found == CONTENT and bytes(changed).split() == whole.split(), (place, bit)


def test_a_document_needs_no_check_and_no_layout() -> None:
    assert documents.decode(b'{"share": 1.50, "name": "a"}', "there") == {"share": 1.5, "name": "a"}
    assert documents.decode(b"{}", "there") == {}
    packed = b"".join(documents.encode({"a": [1.25, 2]}).split())
    assert documents.decode(packed, "there") == {"a": [1.25, 2]}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_what_is_no_document_says_so(content: bytes) -> None:
    with pytest.raises(CorruptData):
        documents.decode(content, "there")


@pytest.mark.parametrize("name", READ)
def test_a_damaged_document_says_what_to_do(tmp_path: Path, name: str) -> None:
    place, (read, fix) = MeshPaths(tmp_path), READ[name]
    path = place.directory / name
    documents.write(path, {"other": 1})
    other = path.read_bytes()
    for content in (b"", b'{"x":', other.replace(b"1", b"2"), other):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(CorruptData, match=f"{name} is damaged") as caught:
            read(place)
        assert fix in caught.value.fix and caught.value.where == str(path)


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
    found = read_lines(path)
    assert found.corruption
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
    path.write_bytes(b"".join(encode_row(ROWS[n], n) for n in order))
    found = read_lines(path)
    assert (found.corruption, found.intact_rows) == (said, before)


def test_a_torn_tail_is_no_damage_and_is_cut_by_who_appends_alone(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("ab") as file:
        file.write(encode_row({"torn": 1}, 5)[:-4])
    torn = path.read_bytes()
    assert read_lines(path).rows == ROWS and not read_lines(path).corruption
    assert list(iterate_rows(path)) == ROWS and path.read_bytes() == torn
    LineFile(path).append([{"n": 5}])
    assert read_lines(path).rows == [*ROWS, {"n": 5}] and not read_lines(path).corruption


def test_a_file_without_checks_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\n')
    assert read_lines(path).rows == [{"n": 0}, {"n": 1}] and not read_lines(path).has_checks
    path.write_text('{"n": 0}\n\0\0\n{"n": 1}\n')
    assert (
        read_lines(path).rows == [{"n": 0}, {"n": 1}]
        and read_lines(path).corruption == "line 2 is damaged"
    )


def test_who_appends_notices_that_another_has_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = LineFile(path)
    file.append(ROWS)
    file.append([{"n": 5}])
    os.utime(path, (1, 1))  # only its time is another
    file.require_unchanged()
    file.append([{"n": 6}])
    file.replace([*ROWS, {"n": 5}])
    os.utime(path, (1, 1))
    file.require_unchanged()
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptData, match="somebody else"):
        file.append([{"n": 6}])
    path.unlink()
    with pytest.raises(CorruptData, match="gone"):
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
    except CorruptData as error:
        assert error.where == str(path)
    else:
        extra = found.keys() - content.keys()  # the check's own name was hit
        assert {key: found[key] for key in content} == content and len(extra) <= 1


def test_set_aside_keeps_what_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step.json"
    path.parent.mkdir()
    found = []
    for content in ("first", "second"):
        path.write_text(content)
        found.append(corruption.quarantine(path, tmp_path))
        assert not path.exists()
    assert [place.read_text() for place in found] == ["first", "second"]
    assert found[0] == tmp_path / "quarantine" / "checkpoints" / "step.json"


def test_what_lies_elsewhere_is_set_aside_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "file"
    path.parent.mkdir()
    path.write_text("content")
    root = tmp_path / "run"
    root.mkdir()
    assert corruption.quarantine(path, root) == root / "quarantine" / "file"


def test_the_table_of_the_documentation_is_the_policy() -> None:
    page = (Path(__file__).parents[5] / "docs/operate/recovery.md").read_text(encoding="utf-8")
    section = page.split("## Corrupt files")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    told = {kind: then for kind, _, then in rows[2:]}
    assert told == corruption.RECOVERY_BY_KIND


def test_an_event_is_a_sentence_that_names_the_file_and_what_follows() -> None:
    path = Path("/run/events.jsonl")
    told = corruption.make_event_fields(
        "events", path, "it is gone", "made again from Redis", job="one"
    )
    assert (
        corruption.describe_event(told) == f"{path} is damaged: it is gone. Made again from Redis."
    )
    aside = corruption.make_event_fields(
        "usage", path, "it is empty", "counted anew", quarantined_path=Path("/run/q")
    )
    assert corruption.describe_event(aside).endswith("Counted anew. It lies in /run/q.")
