"""Durable files, local and below a URL: written whole, synced, and named afterwards."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from meshrl.common.base.errors import ConfigError, CorruptData, MeshError, NotFound
from meshrl.common.base.files.remote_directory import PART_SUFFIX, RemoteDirectory, redact_url
from meshrl.common.mesh.process.host import replace_file
from meshrl.common.records.checkpoints import (
    check_digests,
    compute_file_digests,
    install_checkpoint,
)
from meshrl.common.weights.bulk.port import ChunkStore

Calls = list[tuple[str, Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was asked of the kernel: (fsync, what), (rename, to where)."""
    made: Calls = []
    fsync = os.fsync

    def seen_fsync(descriptor: int) -> None:
        fsync(descriptor)
        made.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    monkeypatch.setattr(os, "fsync", seen_fsync)
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def moved(source: str, target: str, real: Callable[[str, str], None] = real) -> None:
            real(source, target)
            made.append(("rename", Path(target)))

        monkeypatch.setattr(os, name, moved)
    return made


def test_a_file_that_is_replaced_is_synced_before_and_its_directory_after(
    tmp_path: Path, calls: Calls
) -> None:
    replace_file(tmp_path / "file", b"new")
    assert [what for what, _ in calls] == ["fsync", "rename", "fsync"]
    assert calls[1:] == [("rename", tmp_path / "file"), ("fsync", tmp_path)]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_chunk_is_synced_with_every_directory_that_was_made_for_it(
    tmp_path: Path, calls: Calls
) -> None:
    chunks = ChunkStore(tmp_path)
    path = chunks.chunk_path(chunks.write(b"content"))
    renamed = calls.index(("rename", path))
    assert any(what == "fsync" and at.parent == path.parent for what, at in calls[:renamed])
    assert calls[renamed + 1] == ("fsync", path.parent)
    assert ("fsync", tmp_path) in calls


def test_a_checkpoint_that_appears_is_on_the_disk_with_its_name(
    tmp_path: Path, calls: Calls
) -> None:
    scratch, final = tmp_path / "step.scratch", tmp_path / "step"
    (scratch / "state").mkdir(parents=True)
    (scratch / "state" / "shard").write_bytes(b"state")
    (scratch / "config.json").write_bytes(b"{}")
    install_checkpoint(scratch, final)
    renamed = calls.index(("rename", final))
    synced = {path for what, path in calls[:renamed] if what == "fsync"}
    assert synced == {
        scratch,
        scratch / "state",
        scratch / "state" / "shard",
        scratch / "config.json",
    }
    assert calls[renamed + 1 :] == [("fsync", tmp_path)]
    assert (final / "state" / "shard").read_bytes() == b"state"


def test_a_checkpoint_with_a_file_that_is_not_as_it_was_written_is_damaged(tmp_path: Path) -> None:
    (shard := tmp_path / "shard").write_bytes(b"state")
    written = compute_file_digests(tmp_path)
    shard.write_bytes(b"stat")
    with pytest.raises(CorruptData, match="a moment ago") as raised:
        check_digests(tmp_path, compute_file_digests(tmp_path), written)
    assert raised.value.where == str(shard)


def test_a_checkpoint_that_is_there_already_stays_if_it_is_the_same(
    tmp_path: Path, calls: Calls
) -> None:
    scratch, final = tmp_path / "checkpoints/step.scratch", tmp_path / "checkpoints/step"
    for directory in (scratch, final):
        directory.mkdir(parents=True)
        (directory / "who").write_text("the same")
    there = (final / "who").stat().st_ino
    digests = install_checkpoint(scratch, final)
    assert (final / "who").stat().st_ino == there
    assert ("fsync", final.parent) in calls
    (final / "who").write_text("damaged")
    assert install_checkpoint(scratch, final) == digests
    assert (final / "who").read_text() == "the same"
    assert (tmp_path / "quarantine/checkpoints/step/who").read_text() == "damaged"


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_files_appear_are_listed_and_go(kind: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there" if kind == "file" else f"memory://{uuid.uuid4().hex}/there"
    at = RemoteDirectory(url, "out", "it")
    assert at.list_file_sizes() == {} and at.list_names("a") == []
    (tmp_path / "source").write_bytes(b"from a file")
    at.upload_file("a/b/one", tmp_path / "source")
    at.write_file("a/two", b"two")
    at.write_file("a/two", b"second")
    assert at.list_file_sizes() == {"a/b/one": 11, "a/two": 6} and at.list_names("a") == [
        "b",
        "two",
    ]
    assert at.read_file("a/two") == b"second"
    at.fetch_file("a/b/one", tmp_path / "new/one")
    assert (tmp_path / "new/one").read_bytes() == b"from a file"
    at.remove("a/b")
    at.remove("a/b")
    assert at.list_names("a") == ["two"]
    with pytest.raises(NotFound):
        at.read_file("a/b/one")


def test_what_breaks_off_has_not_taken_its_name(tmp_path: Path) -> None:
    at = RemoteDirectory(f"file://{tmp_path}/there", "out", "it")
    at.write_file("one", b"whole")
    with pytest.raises(NotFound):
        at.upload_file("one", tmp_path / "missing")
    assert at.read_file("one") == b"whole"
    assert set(at.list_file_sizes()) <= {"one", f"one{PART_SUFFIX}"}


def test_errors_name_the_place_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeshError, match=f"it cannot be reached: .* \\(at file://{tmp_path}/file/a"):
        RemoteDirectory(f"file://{tmp_path}/file", "out", "it").write_file("a", b"")
    with pytest.raises(ConfigError) as caught:
        RemoteDirectory("nosuch://me:secret@host/path", "out", "it")
    assert "nosuch://host/path" in str(caught.value) and "secret" not in str(caught.value)
    assert redact_url("abfs://box@account/path?sig=secret") == "abfs://account/path"


class Broken(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Lists no folder of this name."""

    protocol = "broken"

    def ls(self, path: str, detail: bool = False, **options: object) -> object:
        if path.endswith("/broken"):
            raise OSError("listings fail here today")
        return super().ls(path, detail, **options)


def test_a_listing_that_fails_is_not_one_of_nothing(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    at = RemoteDirectory(f"broken://{tmp_path}/there", "out", "it")
    at.write_file("a/broken/one", b"1")
    assert at.list_names("a") == ["broken"]
    for listing in (
        lambda: at.list_names("a/broken"),
        at.list_file_sizes,
        RemoteDirectory(f"broken://{tmp_path}/there/a/broken", "out", "it").list_file_sizes,
    ):
        with pytest.raises(MeshError, match="listings fail here today"):
            listing()


class Marking(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Lists a folder as a file in itself, as the console of a bucket makes one."""

    protocol = "marking"

    def ls(self, path: str, detail: bool = False, **options: object) -> object:
        mark = {"name": f"{self._strip_protocol(path)}/", "size": 0, "type": "file"}
        return [mark if detail else mark["name"], *super().ls(path, detail, **options)]


def test_the_mark_of_a_folder_is_no_file(tmp_path: Path) -> None:
    fsspec.register_implementation("marking", Marking, clobber=True)
    at = RemoteDirectory(f"marking://{tmp_path}/there", "out", "it")
    at.write_file("a/one", b"1")
    assert at.list_file_sizes() == {"a/one": 1} and at.list_names("a") == ["one"]


def test_what_cannot_be_removed_is_not_taken_for_gone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeshError, match="it cannot be reached"):
        RemoteDirectory(f"file://{tmp_path}", "out", "it").remove("file/below")


def test_a_chain_of_urls_is_refused_and_shown_to_nobody() -> None:
    with pytest.raises(ConfigError, match="a chain of fsspec's") as caught:
        RemoteDirectory("simplecache::memory://me:secret@host/path", "durable.url", "it")
    assert "secret" not in str(caught.value)
