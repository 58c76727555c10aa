"""Documents and lines with checksums: corruption is detected, reported and quarantined."""

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
        lambda mesh_paths: admitted_hosts.read_hosts(mesh_paths.directory),
        "remove it and joined.json",
    ),
    "owner.json": (
        lambda mesh_paths: owner.read_owner(mesh_paths.directory),
        "`meshrl down`, remove it",
    ),
    "tokens.json": (
        lambda mesh_paths: access_records.read_records(
            mesh_paths.directory / access_records.RECORDS_FILE
        ),
        "or remove it",
    ),
    "gateway.json": (
        lambda mesh_paths: gateway_identity.find_identity(mesh_paths.directory),
        "or remove it",
    ),
    "membership.json": (membership.read_membership, "join from a new directory"),
}
ROWS = [{"n": n, "text": "ab\u00e9" * n} for n in range(5)]


def test_any_flipped_bit_of_a_document_is_detected() -> None:
    encoded = documents.encode(CONTENT)
    assert documents.decode(encoded, "there") == CONTENT
    for position in range(len(encoded) - 1):  # the last byte ends the line
        for bit in range(8):
            changed = bytearray(encoded)
            changed[position] ^= 1 << bit
            try:
                found = documents.decode(bytes(changed), "there")
            except CorruptData:
                continue
            assert found == CONTENT and bytes(changed).split() == encoded.split(), (position, bit)


def test_document_without_checksum_or_layout_is_accepted() -> None:
    assert documents.decode(b'{"share": 1.50, "name": "a"}', "there") == {"share": 1.5, "name": "a"}
    assert documents.decode(b"{}", "there") == {}
    compact = b"".join(documents.encode({"a": [1.25, 2]}).split())
    assert documents.decode(compact, "there") == {"a": [1.25, 2]}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_invalid_document_raises_corrupt_data(content: bytes) -> None:
    with pytest.raises(CorruptData):
        documents.decode(content, "there")


@pytest.mark.parametrize("name", READ)
def test_corrupt_document_error_has_a_fix(tmp_path: Path, name: str) -> None:
    mesh_paths, (read, fix) = MeshPaths(tmp_path), READ[name]
    path = mesh_paths.directory / name
    documents.write(path, {"other": 1})
    other = path.read_bytes()
    for content in (b"", b'{"x":', other.replace(b"1", b"2"), other):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(CorruptData, match=f"{name} is corrupt") as caught:
            read(mesh_paths)
        assert fix in caught.value.fix and caught.value.where == str(path)


def write_rows(directory: Path, rows: list[dict[str, object]] = ROWS) -> Path:
    path = directory / "rows.jsonl"
    LineFile(path).append(rows)
    return path


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_line_file_loses_at_most_one_row(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = write_rows(tmp_path_factory.mktemp("lines"))
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)
    found = read_lines(path)
    assert found.corruption
    missing_rows = [n for n, row in enumerate(ROWS) if row not in found.rows]
    # The bit was in a newline.
    assert len(missing_rows) <= 1 or (
        len(missing_rows) == 2 and missing_rows[1] - missing_rows[0] == 1
    )


@pytest.mark.parametrize(
    ("order", "corruption", "before"),
    [
        ((0, 1, 3, 4), "1 lines before line 3 are missing", 2),
        ((0, 1, 1, 2, 3, 4), "line 3 is a duplicate", 2),
        ((1, 0, 2, 3, 4), "1 lines before line 1 are missing", 0),
    ],
)
def test_missing_and_repeated_lines_are_reported(
    tmp_path: Path, order: tuple[int, ...], corruption: str, before: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(encode_row(ROWS[n], n) for n in order))
    content_found = read_lines(path)
    assert (content_found.corruption, content_found.intact_rows) == (corruption, before)


def test_torn_tail_is_not_corruption_and_is_cut_by_the_next_append(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    with path.open("ab") as file:
        file.write(encode_row({"torn": 1}, 5)[:-4])
    torn = path.read_bytes()
    assert read_lines(path).rows == ROWS and not read_lines(path).corruption
    assert list(iterate_rows(path)) == ROWS and path.read_bytes() == torn
    LineFile(path).append([{"n": 5}])
    assert read_lines(path).rows == [*ROWS, {"n": 5}] and not read_lines(path).corruption


def test_line_file_without_checksums_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\n')
    assert read_lines(path).rows == [{"n": 0}, {"n": 1}] and not read_lines(path).has_checks
    path.write_text('{"n": 0}\n\0\0\n{"n": 1}\n')
    assert (
        read_lines(path).rows == [{"n": 0}, {"n": 1}]
        and read_lines(path).corruption == "line 2 is corrupt"
    )


def test_append_detects_changes_by_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = LineFile(path)
    file.append(ROWS)
    file.append([{"n": 5}])
    os.utime(path, (1, 1))  # only the modification time differs
    file.require_unchanged()
    file.append([{"n": 6}])
    file.replace([*ROWS, {"n": 5}])
    os.utime(path, (1, 1))
    file.require_unchanged()
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptData, match="another process"):
        file.append([{"n": 6}])
    path.unlink()
    with pytest.raises(CorruptData, match="missing"):
        file.append([{"n": 6}])


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_flipped_bit_never_changes_a_document_silently(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("documents") / "job.json"
    content = {"job": "sum", "document": {"seed": 7, "share": 0.25, "names": ["a", "b"]}}
    documents.write(path, content)
    changed = bytearray(path.read_bytes())
    changed[position % len(changed)] ^= 1 << bit
    try:
        found = documents.decode(bytes(changed), str(path))
    except CorruptData as error:
        assert error.where == str(path)
    else:
        extra = found.keys() - content.keys()  # the bit was in the checksum's key
        assert {key: found[key] for key in content} == content and len(extra) <= 1


def test_quarantine_keeps_earlier_quarantined_files(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step.json"
    path.parent.mkdir()
    found = []
    for content in ("first", "second"):
        path.write_text(content)
        found.append(corruption.quarantine(path, tmp_path))
        assert not path.exists()
    assert [path.read_text() for path in found] == ["first", "second"]
    assert found[0] == tmp_path / "quarantine" / "checkpoints" / "step.json"


def test_file_outside_the_run_is_quarantined_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "file"
    path.parent.mkdir()
    path.write_text("content")
    root = tmp_path / "run"
    root.mkdir()
    assert corruption.quarantine(path, root) == root / "quarantine" / "file"


def test_documented_table_matches_the_recovery_policy() -> None:
    page = (Path(__file__).parents[5] / "docs/operate/recovery.md").read_text(encoding="utf-8")
    section = page.split("## Corrupt files")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    table = {kind: then for kind, _, then in rows[2:]}
    assert table == corruption.RECOVERY_BY_KIND


def test_event_description_names_file_problem_and_consequence() -> None:
    path = Path("/run/events.jsonl")
    event_fields = corruption.make_event_fields(
        "events", path, "it is gone", "made again from Redis", job="one"
    )
    assert (
        corruption.describe_event(event_fields)
        == f"{path} is corrupt: it is gone. Made again from Redis."
    )
    quarantined_fields = corruption.make_event_fields(
        "usage", path, "it is empty", "counted anew", quarantined_path=Path("/run/q")
    )
    assert corruption.describe_event(quarantined_fields).endswith(
        "Counted anew. It was moved to /run/q."
    )
