"""What a run has made is at the URL that its job names, and commands take it from there."""

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
from meshrl.run.run_download import download_run
from meshrl.view.recording import audit, output_copy
from meshrl.view.recording.output_copy import OutputCopier
from tests.load import scaled

WEIGHTS = "0123456789abcdef" * 2
PATIENCE_S = 40.0


class Made:
    """A run directory as a run fills it, and the URL."""

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

    def expire(self, name: str) -> None:
        shutil.rmtree(self.home / "checkpoints" / name)
        (self.home / f"checkpoints/{name}.json").unlink()

    def outlet(self) -> OutputCopier:
        return OutputCopier(self.url, self.home, SystemHost(), SystemClock())

    def names(self) -> set[str]:
        return {str(p.relative_to(self.there)) for p in self.there.rglob("*") if p.is_file()}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


class Server(LocalFileSystem):  # type: ignore[misc]
    """A server that has each file, and does not say so before its gate opens."""

    protocol, cachable = "slow", False
    asked = threading.Semaphore(0)
    gate = threading.Event()

    def put_file(self, local: str, there: str, **about: Any) -> None:
        super().put_file(local, there, **about)
        Server.asked.release()
        assert Server.gate.wait(scaled(PATIENCE_S))


@pytest.fixture
def slow(made: Made) -> Iterator[Made]:
    Server.asked, Server.gate = threading.Semaphore(0), threading.Event()
    fsspec.register_implementation("slow", Server, clobber=True)
    made.url = f"slow://{made.there}"
    yield made
    Server.gate.set()


async def test_committed_checkpoints_and_the_record_are_there_and_the_rest_comes_last(
    made: Made,
) -> None:
    first, second = made.checkpoint(1), made.checkpoint(2)
    made.write("model/config.json", "{}")
    outlet = made.outlet()
    outlet.copy_if_due(first)
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert outlet.error == ""
    record = {"job.json", "events.jsonl", "bundle/b/modules/mine.py"}
    assert made.names() == record | {
        f"checkpoints/{first}.json",
        f"checkpoints/{first}/{STATE_FOLDER}/a",
    }
    made.expire(first)
    made.write("events.jsonl", "one\ntwo\n")
    made.write("summary.json", "{}")
    made.write("ledger/rollout/0.seg", "in flight")
    assert await outlet.close(second, asyncio.Event()) == ""
    assert made.names() == record | {
        f"checkpoints/{second}.json",
        f"checkpoints/{second}/{STATE_FOLDER}/a",
        "model/config.json",
        "summary.json",
        "ledger/rollout/0.seg",
    }
    assert (made.there / "events.jsonl").read_text() == "one\ntwo\n"


async def test_another_process_of_the_run_copies_no_checkpoint_twice(made: Made) -> None:
    name = made.checkpoint(1)
    made.write("summary.json", "{}")
    assert await made.outlet().close(name, asyncio.Event()) == ""
    state = made.there / f"checkpoints/{name}/{STATE_FOLDER}/a"
    before = state.stat().st_ino
    half = made.there / "checkpoints/step-000-000000-0aaaaaaa/state"  # of one that was cut off
    half.mkdir(parents=True)
    (half / "a").touch()
    assert await made.outlet().close(name, asyncio.Event()) == ""
    assert state.stat().st_ino == before and not half.exists()


async def test_what_is_in_the_way_is_named_until_it_is_gone(made: Made) -> None:
    made.there.write_text("in the way")
    outlet = made.outlet()
    outlet.copy_if_due("")
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert f"(at file://{made.there}/" in outlet.error
    made.there.unlink()
    made.write("summary.json", "{}")
    assert await outlet.close("", asyncio.Event()) == ""


async def test_a_run_is_brought_back_from_its_url(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = made.checkpoint(1)
    made.write("summary.json", "{}")
    assert await made.outlet().close(name, asyncio.Event()) == ""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_dir = download_run(made.url)
    assert run_dir == tmp_path / "elsewhere/runs/j"
    assert verify_checkpoint(run_dir / f"checkpoints/{name}.json") == read_manifest(
        made.home / f"checkpoints/{name}.json"
    )
    held = documents.decode((run_dir / "job.json").read_bytes(), "job.json")
    assert "mesh" not in held
    bundle_files.check_files(
        Path(held["document"]["bundle"]["dir"]),
        bundle_files.read_file_list(held["document"]),
        read_large=True,
    )
    with pytest.raises(Refused, match="is there already"):
        download_run(made.url)
    with pytest.raises(NotFound, match="no run lies at"):
        download_run(f"{made.url}/nowhere")


async def test_what_home_has_lost_stays_there(made: Made) -> None:
    made.write("summary.json", "{}")
    name = made.checkpoint(1)
    assert await made.outlet().close(name, asyncio.Event()) == ""
    before = made.names()
    shutil.rmtree(made.home / "checkpoints")
    for committed in (name, ""):  # Redis is away: which one it is has not been read
        assert await made.outlet().close(committed, asyncio.Event()) == ""
        assert made.names() == before


async def test_a_run_that_replaces_another_leaves_nothing_of_it_there(made: Made) -> None:
    made.run_id("first")
    name = made.checkpoint(1)
    for left in ("summary.json", "samples-1.jsonl", "model/config.json", "ledger/0.ledger"):
        made.write(left, "{}")
    assert await made.outlet().close(name, asyncio.Event()) == ""
    (made.there / "samples-1.jsonl.0a1b2c3d.part").write_text("a half")
    (made.there / "notes.txt").write_text("not of a run")
    (made.home / "samples-1.jsonl").unlink()  # of this run, which goes on
    outlet = made.outlet()
    outlet.copy_if_due(name)
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert {"samples-1.jsonl", "summary.json", "notes.txt"} < made.names()
    assert not any(name.endswith(".part") for name in made.names())
    for left in ("model", "ledger", "checkpoints"):
        shutil.rmtree(made.home / left)
    (made.home / "summary.json").unlink()
    made.run_id("second")
    outlet = made.outlet()
    outlet.copy_if_due("")
    assert outlet._copy_task is not None
    await outlet._copy_task
    assert outlet.error == ""
    kept = {"job.json", "events.jsonl", "bundle/b/modules/mine.py", "notes.txt"}
    assert made.names() == kept


async def test_a_mesh_that_ends_waits_for_a_slow_server_no_longer_than_it_says(
    slow: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_copy, "STOP_TIMEOUT_S", 0.05)
    stop, copying = asyncio.Event(), slow.outlet()
    copying.copy_if_due("")
    assert await asyncio.to_thread(Server.asked.acquire, timeout=scaled(PATIENCE_S))
    closing = asyncio.create_task(copying.close("", stop))
    assert not (await asyncio.wait([closing], timeout=0.2))[0], "a run that is over waits for it"
    stop.set()
    async with asyncio.timeout(scaled(PATIENCE_S)):
        said = await closing
    assert f"copy {slow.home} to {slow.url} by hand" in said
    Server.gate.set()
    await copying._copy_recording_errors("")
    assert "its copying has ended" in copying.error


async def test_two_copies_of_a_run_at_once_cost_each_other_nothing(slow: Made) -> None:
    one, other = slow.outlet(), slow.outlet()
    for copying in (one, other):
        copying._copied_files = {}  # both have looked there
        copying.copy_if_due("")
    for _ in range(2):  # each has written its first file, which has not taken its name
        assert await asyncio.to_thread(Server.asked.acquire, timeout=scaled(PATIENCE_S))
    Server.gate.set()
    assert one._copy_task is not None and other._copy_task is not None
    await asyncio.gather(one._copy_task, other._copy_task)
    assert (one.error, other.error) == ("", "")
    assert slow.names() == {"job.json", "events.jsonl", "bundle/b/modules/mine.py"}


async def test_a_run_that_goes_on_elsewhere_is_not_accused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"job": "j", "groups": [1], "samples": 4}
    opened = {"id": "1-0", "ms": 1, "kind": "opened", "fields": fields}
    later = {"id": "2-0", "ms": 60_000, "kind": "note", "fields": {"job": "j"}}
    made.write("events.jsonl", f"{json.dumps(opened)}\n{json.dumps(later)}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    outlet = made.outlet()
    outlet.copy_if_due("")
    assert outlet._copy_task is not None
    await outlet._copy_task
    run_dir = download_run(made.url)
    with pytest.raises(Refused, match="had not ended when it was copied last"):
        audit.audit_run(run_dir)
    made.write("in_flight.json", json.dumps({"event": "2-0", "events": 2, "samples": 4}))
    made.write("summary.json", "{}")
    assert await outlet.close("", asyncio.Event()) == ""
    shutil.rmtree(run_dir)
    counted = audit.audit_run(download_run(made.url))
    assert (counted["in_flight"], counted["lost"]) == (4, 0)
