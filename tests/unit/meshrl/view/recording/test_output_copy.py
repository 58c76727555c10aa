"""Copies of a run at its job's URL, and commands that fetch a run from there."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.records.checkpoints import (
    STATE_FOLDER,
    compute_file_digests,
    format_checkpoint_name,
    read_manifest,
    verify_checkpoint,
)
from meshrl.runs.run_download import download_run
from meshrl.view.recording import audit, output_copy
from meshrl.view.recording.output_copy import OutputCopier
from tests.load import scaled

WEIGHTS = "0123456789abcdef" * 2
PATIENCE_S = 40.0


class CopiedRun:
    """Run directory with typical files, and the URL of its copy."""

    def __init__(self, root: Path) -> None:
        self.home, self.url = root / "home/runs/j", f"file://{root}/there"
        self.there = root / "there"
        (self.home / "bundle/b/modules").mkdir(parents=True)
        (self.home / "bundle/b/modules/mine.py").write_text("X = 1\n")
        about: dict[str, Any] = {"dir": str(self.home / "bundle/b"), "digest": "b"}
        about |= {"files": bundle_files.list_files(self.home / "bundle/b")}
        held = {"job": "j", "mesh": "/gone", "document": {"bundle": about}}
        documents.write(self.home / "job.json", held)
        self.write("mesh/owner.json", "a secret")
        self.write("events.jsonl", "one\n")

    def run_id(self, number: str) -> None:
        held = documents.decode((self.home / "job.json").read_bytes(), "job.json")
        documents.write(self.home / "job.json", held | {"run_id": number})

    def write(self, name: str, text: str) -> None:
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        (self.home / name).write_text(text)

    def checkpoint(self, step: int) -> str:
        name = format_checkpoint_name(0, step, WEIGHTS)
        self.write(f"checkpoints/{name}/{STATE_FOLDER}/a", f"state {step}")
        files = compute_file_digests(self.home / "checkpoints" / name)
        held = {"lineage": 0, "step": step, "weights": WEIGHTS, "files": files}
        (self.home / f"checkpoints/{name}.json").write_bytes(encode_sealed(held))
        return name

    def delete_checkpoint(self, name: str) -> None:
        shutil.rmtree(self.home / "checkpoints" / name)
        (self.home / f"checkpoints/{name}.json").unlink()

    def outlet(self) -> OutputCopier:
        return OutputCopier(self.url, self.home, SystemHost(), SystemClock())

    def names(self) -> set[str]:
        return {str(p.relative_to(self.there)) for p in self.there.rglob("*") if p.is_file()}


@pytest.fixture
def copied_run(tmp_path: Path) -> CopiedRun:
    return CopiedRun(tmp_path)


class Server(LocalFileSystem):  # type: ignore[misc]
    """Server that stores each file but answers only after its gate opens."""

    protocol, cachable = "slow", False
    requests = threading.Semaphore(0)
    gate = threading.Event()

    def put_file(self, local: str, there: str, **about: Any) -> None:
        super().put_file(local, there, **about)
        Server.requests.release()
        assert Server.gate.wait(scaled(PATIENCE_S))


@pytest.fixture
def slow(copied_run: CopiedRun) -> Iterator[CopiedRun]:
    Server.requests, Server.gate = threading.Semaphore(0), threading.Event()
    fsspec.register_implementation("slow", Server, clobber=True)
    copied_run.url = f"slow://{copied_run.there}"
    yield copied_run
    Server.gate.set()


async def test_committed_checkpoints_and_the_record_are_copied_and_the_rest_at_the_end(
    copied_run: CopiedRun,
) -> None:
    first, second = copied_run.checkpoint(1), copied_run.checkpoint(2)
    copied_run.write("model/config.json", "{}")
    outlet = copied_run.outlet()
    outlet.copy_if_due(first)
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert outlet.error == ""
    record = {"job.json", "events.jsonl", "bundle/b/modules/mine.py"}
    assert copied_run.names() == record | {
        f"checkpoints/{first}.json",
        f"checkpoints/{first}/{STATE_FOLDER}/a",
    }
    copied_run.delete_checkpoint(first)
    copied_run.write("events.jsonl", "one\ntwo\n")
    copied_run.write("summary.json", "{}")
    copied_run.write("ledger/rollout/0.seg", "in flight")
    assert await outlet.close(second, asyncio.Event()) == ""
    assert copied_run.names() == record | {
        f"checkpoints/{second}.json",
        f"checkpoints/{second}/{STATE_FOLDER}/a",
        "model/config.json",
        "summary.json",
        "ledger/rollout/0.seg",
    }
    assert (copied_run.there / "events.jsonl").read_text() == "one\ntwo\n"


async def test_checkpoint_is_not_copied_twice_by_another_process(copied_run: CopiedRun) -> None:
    name = copied_run.checkpoint(1)
    copied_run.write("summary.json", "{}")
    assert await copied_run.outlet().close(name, asyncio.Event()) == ""
    state = copied_run.there / f"checkpoints/{name}/{STATE_FOLDER}/a"
    before = state.stat().st_ino
    # left by an interrupted copy
    half = copied_run.there / "checkpoints/step-000-000000-0aaaaaaa/state"
    half.mkdir(parents=True)
    (half / "a").touch()
    assert await copied_run.outlet().close(name, asyncio.Event()) == ""
    assert state.stat().st_ino == before and not half.exists()


async def test_obstacle_at_the_url_is_reported_until_it_is_removed(copied_run: CopiedRun) -> None:
    copied_run.there.write_text("in the way")
    outlet = copied_run.outlet()
    outlet.copy_if_due("")
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert f"(at file://{copied_run.there}/" in outlet.error
    copied_run.there.unlink()
    copied_run.write("summary.json", "{}")
    assert await outlet.close("", asyncio.Event()) == ""


async def test_run_is_fetched_from_its_url(
    copied_run: CopiedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = copied_run.checkpoint(1)
    copied_run.write("summary.json", "{}")
    assert await copied_run.outlet().close(name, asyncio.Event()) == ""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_dir = download_run(copied_run.url)
    assert run_dir == tmp_path / "elsewhere/runs/j"
    assert verify_checkpoint(run_dir / f"checkpoints/{name}.json") == read_manifest(
        copied_run.home / f"checkpoints/{name}.json"
    )
    held = documents.decode((run_dir / "job.json").read_bytes(), "job.json")
    assert "mesh" not in held
    bundle_files.check_files(
        Path(held["document"]["bundle"]["dir"]),
        bundle_files.read_file_list(held["document"]),
        read_large=True,
    )
    with pytest.raises(Refused, match="already exists"):
        download_run(copied_run.url)
    with pytest.raises(NotFound, match="there is no run at"):
        download_run(f"{copied_run.url}/nowhere")


async def test_copies_of_locally_lost_files_are_kept(copied_run: CopiedRun) -> None:
    copied_run.write("summary.json", "{}")
    name = copied_run.checkpoint(1)
    assert await copied_run.outlet().close(name, asyncio.Event()) == ""
    before = copied_run.names()
    shutil.rmtree(copied_run.home / "checkpoints")
    for committed in (name, ""):  # without Redis the committed checkpoint is unknown
        assert await copied_run.outlet().close(committed, asyncio.Event()) == ""
        assert copied_run.names() == before


async def test_replacing_run_removes_the_previous_runs_copies(copied_run: CopiedRun) -> None:
    copied_run.run_id("first")
    name = copied_run.checkpoint(1)
    for left in ("summary.json", "samples-1.jsonl", "model/config.json", "ledger/0.ledger"):
        copied_run.write(left, "{}")
    assert await copied_run.outlet().close(name, asyncio.Event()) == ""
    (copied_run.there / "samples-1.jsonl.0a1b2c3d.part").write_text("a half")
    (copied_run.there / "notes.txt").write_text("not of a run")
    (copied_run.home / "samples-1.jsonl").unlink()  # a file of this run, which continues
    outlet = copied_run.outlet()
    outlet.copy_if_due(name)
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert {"samples-1.jsonl", "summary.json", "notes.txt"} < copied_run.names()
    assert not any(name.endswith(".part") for name in copied_run.names())
    for left in ("model", "ledger", "checkpoints"):
        shutil.rmtree(copied_run.home / left)
    (copied_run.home / "summary.json").unlink()
    copied_run.run_id("second")
    outlet = copied_run.outlet()
    outlet.copy_if_due("")
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert outlet.error == ""
    kept = {"job.json", "events.jsonl", "bundle/b/modules/mine.py", "notes.txt"}
    assert copied_run.names() == kept


async def test_stopping_mesh_waits_for_a_slow_server_only_for_its_limit(
    slow: CopiedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_copy, "STOP_TIMEOUT_S", 0.05)
    stop, copying = asyncio.Event(), slow.outlet()
    copying.copy_if_due("")
    assert await asyncio.to_thread(Server.requests.acquire, timeout=scaled(PATIENCE_S))
    closing = asyncio.create_task(copying.close("", stop))
    assert not (await asyncio.wait([closing], timeout=0.2))[0], "a run that is over waits for it"
    stop.set()
    async with asyncio.timeout(scaled(PATIENCE_S)):
        said = await closing
    assert f"copy {slow.home} without mesh/ and store/ to {slow.url} manually" in said
    Server.gate.set()
    await copying._copy_recording_errors("")
    assert "the copy has been closed" in copying.error


async def test_concurrent_copies_of_one_run_lose_nothing(slow: CopiedRun) -> None:
    one, other = slow.outlet(), slow.outlet()
    for copying in (one, other):
        copying._copied_files = {}  # both have listed the URL
        copying.copy_if_due("")
    for _ in range(2):  # each has written its first file but not renamed it
        assert await asyncio.to_thread(Server.requests.acquire, timeout=scaled(PATIENCE_S))
    Server.gate.set()
    assert one._copy_task is not None and other._copy_task is not None
    await asyncio.gather(one._copy_task, other._copy_task)
    assert (one.error, other.error) == ("", "")
    assert slow.names() == {"job.json", "events.jsonl", "bundle/b/modules/mine.py"}


async def test_run_that_continues_elsewhere_has_no_lost_groups(
    copied_run: CopiedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"job": "j", "groups": [1], "samples": 4}
    opened = {"id": "1-0", "ms": 1, "kind": "opened", "fields": fields}
    later = {"id": "2-0", "ms": 60_000, "kind": "note", "fields": {"job": "j"}}
    copied_run.write("events.jsonl", f"{json.dumps(opened)}\n{json.dumps(later)}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    outlet = copied_run.outlet()
    outlet.copy_if_due("")
    assert outlet._copy_task is not None
    await outlet._copy_task
    run_dir = download_run(copied_run.url)
    with pytest.raises(Refused, match="had not ended at its last copy"):
        audit.audit_run(run_dir)
    copied_run.write("in_flight.json", json.dumps({"event": "2-0", "events": 2, "samples": 4}))
    copied_run.write("summary.json", "{}")
    assert await outlet.close("", asyncio.Event()) == ""
    shutil.rmtree(run_dir)
    counted = audit.audit_run(download_run(copied_run.url))
    assert (counted["in_flight"], counted["lost"]) == (4, 0)
