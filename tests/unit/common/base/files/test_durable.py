"""What is told to be durable outlives a power cut: its bytes were synced, and then its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.base.errors import Damaged
from meshrl.common.mesh.process.host import replace_file
from meshrl.common.records.checkpoints import appear, check_written, digests_below
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
    path = chunks.path(chunks.write(b"content"))
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
    appear(scratch, final)
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
    written = digests_below(tmp_path)
    shard.write_bytes(b"stat")
    with pytest.raises(Damaged, match="a moment ago") as raised:
        check_written(tmp_path, digests_below(tmp_path), written)
    assert raised.value.where == str(shard)


def test_a_checkpoint_that_is_there_already_stays_if_it_is_the_same(
    tmp_path: Path, calls: Calls
) -> None:
    scratch, final = tmp_path / "checkpoints/step.scratch", tmp_path / "checkpoints/step"
    for directory in (scratch, final):
        directory.mkdir(parents=True)
        (directory / "who").write_text("the same")
    there = (final / "who").stat().st_ino
    digests = appear(scratch, final)
    assert (final / "who").stat().st_ino == there
    assert ("fsync", final.parent) in calls
    (final / "who").write_text("damaged")
    assert appear(scratch, final) == digests
    assert (final / "who").read_text() == "the same"
    assert (tmp_path / "quarantine/checkpoints/step/who").read_text() == "damaged"
