"""Durable files, local and remote: written completely, synced, then renamed."""

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
def file_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record calls to the kernel: (fsync, path) and (rename, target)."""
    recorded: Calls = []
    fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        recorded.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    monkeypatch.setattr(os, "fsync", record_fsync)
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def record_rename(
            source: str, target: str, real: Callable[[str, str], None] = real
        ) -> None:
            real(source, target)
            recorded.append(("rename", Path(target)))

        monkeypatch.setattr(os, name, record_rename)
    return recorded


def test_replaced_file_is_synced_before_its_directory(tmp_path: Path, file_calls: Calls) -> None:
    replace_file(tmp_path / "file", b"new")
    assert [call for call, _ in file_calls] == ["fsync", "rename", "fsync"]
    assert file_calls[1:] == [("rename", tmp_path / "file"), ("fsync", tmp_path)]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_chunk_is_synced_with_all_its_new_directories(tmp_path: Path, file_calls: Calls) -> None:
    chunks = ChunkStore(tmp_path)
    path = chunks.chunk_path(chunks.write(b"content"))
    renamed = file_calls.index(("rename", path))
    assert any(call == "fsync" and at.parent == path.parent for call, at in file_calls[:renamed])
    assert file_calls[renamed + 1] == ("fsync", path.parent)
    assert ("fsync", tmp_path) in file_calls


def test_installed_checkpoint_is_synced_with_its_name(tmp_path: Path, file_calls: Calls) -> None:
    scratch, final = tmp_path / "step.scratch", tmp_path / "step"
    (scratch / "state").mkdir(parents=True)
    (scratch / "state" / "shard").write_bytes(b"state")
    (scratch / "config.json").write_bytes(b"{}")
    install_checkpoint(scratch, final)
    renamed = file_calls.index(("rename", final))
    synced = {path for call, path in file_calls[:renamed] if call == "fsync"}
    assert synced == {
        scratch,
        scratch / "state",
        scratch / "state" / "shard",
        scratch / "config.json",
    }
    assert file_calls[renamed + 1 :] == [("fsync", tmp_path)]
    assert (final / "state" / "shard").read_bytes() == b"state"


def test_changed_checkpoint_file_raises_corrupt_data(tmp_path: Path) -> None:
    (shard := tmp_path / "shard").write_bytes(b"state")
    digests_before = compute_file_digests(tmp_path)
    shard.write_bytes(b"stat")
    with pytest.raises(CorruptData, match="was just written") as raised:
        check_digests(tmp_path, compute_file_digests(tmp_path), digests_before)
    assert raised.value.where == str(shard)


def test_identical_checkpoint_stays_and_a_different_one_is_quarantined(
    tmp_path: Path, file_calls: Calls
) -> None:
    scratch, final = tmp_path / "checkpoints/step.scratch", tmp_path / "checkpoints/step"
    for directory in (scratch, final):
        directory.mkdir(parents=True)
        (directory / "who").write_text("the same")
    inode = (final / "who").stat().st_ino
    digests = install_checkpoint(scratch, final)
    assert (final / "who").stat().st_ino == inode
    assert ("fsync", final.parent) in file_calls
    (final / "who").write_text("damaged")
    assert install_checkpoint(scratch, final) == digests
    assert (final / "who").read_text() == "the same"
    assert (tmp_path / "quarantine/checkpoints/step/who").read_text() == "damaged"


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_remote_files_are_written_listed_and_removed(kind: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there" if kind == "file" else f"memory://{uuid.uuid4().hex}/there"
    remote = RemoteDirectory(url, "out", "it")
    assert remote.list_file_sizes() == {} and remote.list_names("a") == []
    (tmp_path / "source").write_bytes(b"from a file")
    remote.upload_file("a/b/one", tmp_path / "source")
    remote.write_file("a/two", b"two")
    remote.write_file("a/two", b"second")
    assert remote.list_file_sizes() == {"a/b/one": 11, "a/two": 6} and remote.list_names("a") == [
        "b",
        "two",
    ]
    assert remote.read_file("a/two") == b"second"
    remote.fetch_file("a/b/one", tmp_path / "new/one")
    assert (tmp_path / "new/one").read_bytes() == b"from a file"
    remote.remove("a/b")
    remote.remove("a/b")
    assert remote.list_names("a") == ["two"]
    with pytest.raises(NotFound):
        remote.read_file("a/b/one")


def test_failed_upload_does_not_replace_the_file(tmp_path: Path) -> None:
    remote = RemoteDirectory(f"file://{tmp_path}/there", "out", "it")
    remote.write_file("one", b"whole")
    with pytest.raises(NotFound):
        remote.upload_file("one", tmp_path / "missing")
    assert remote.read_file("one") == b"whole"
    assert set(remote.list_file_sizes()) <= {"one", f"one{PART_SUFFIX}"}


def test_errors_contain_the_location_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeshError, match=f"it cannot be reached: .* \\(at file://{tmp_path}/file/a"):
        RemoteDirectory(f"file://{tmp_path}/file", "out", "it").write_file("a", b"")
    with pytest.raises(ConfigError) as caught:
        RemoteDirectory("nosuch://me:secret@host/path", "out", "it")
    assert "nosuch://host/path" in str(caught.value) and "secret" not in str(caught.value)
    assert redact_url("abfs://box@account/path?sig=secret") == "abfs://account/path"


class BrokenListing(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """File system that cannot list folders of this name."""

    protocol = "broken"

    def ls(self, path: str, detail: bool = False, **options: object) -> object:
        if path.endswith("/broken"):
            raise OSError("listings fail here today")
        return super().ls(path, detail, **options)


def test_failed_listing_raises_an_error(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", BrokenListing, clobber=True)
    remote = RemoteDirectory(f"broken://{tmp_path}/there", "out", "it")
    remote.write_file("a/broken/one", b"1")
    assert remote.list_names("a") == ["broken"]
    for listing in (
        lambda: remote.list_names("a/broken"),
        remote.list_file_sizes,
        RemoteDirectory(f"broken://{tmp_path}/there/a/broken", "out", "it").list_file_sizes,
    ):
        with pytest.raises(MeshError, match="listings fail here today"):
            listing()


class FolderMarkers(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """File system that lists a marker file in each folder, as S3 consoles create them."""

    protocol = "marking"

    def ls(self, path: str, detail: bool = False, **options: object) -> object:
        marker = {"name": f"{self._strip_protocol(path)}/", "size": 0, "type": "file"}
        return [marker if detail else marker["name"], *super().ls(path, detail, **options)]


def test_folder_markers_are_not_listed_as_files(tmp_path: Path) -> None:
    fsspec.register_implementation("marking", FolderMarkers, clobber=True)
    remote = RemoteDirectory(f"marking://{tmp_path}/there", "out", "it")
    remote.write_file("a/one", b"1")
    assert remote.list_file_sizes() == {"a/one": 1} and remote.list_names("a") == ["one"]


def test_failed_removal_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeshError, match="it cannot be reached"):
        RemoteDirectory(f"file://{tmp_path}", "out", "it").remove("file/below")


def test_chained_urls_are_rejected_without_revealing_secrets() -> None:
    with pytest.raises(ConfigError, match="an fsspec chain") as caught:
        RemoteDirectory("simplecache::memory://me:secret@host/path", "durable.url", "it")
    assert "secret" not in str(caught.value)
