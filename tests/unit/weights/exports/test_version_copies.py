"""Copies of permanently retained versions at the path that their job names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import CorruptData, DeadlineExceeded, NotFound
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.versions_process import copy_versions
from meshrl.services.weights.retention.job_records import JOBS_FOLDER, JobRecords
from meshrl.services.weights.retention.pins import VersionPin, pin_version
from meshrl.services.weights.retention.policy import VersionNumber
from meshrl.services.weights.version_copies import VersionCopier, parse_outcomes
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets
from tests.unit.weights.exports.test_export import CONFIG, Run, logits, model, weights

EVENT_TIMEOUT_S = 100.0  # start of a process and import of torch on a busy host


class CopyBench:
    """Run of four versions on a mesh whose store copies them below `copy_root`."""

    def __init__(self, root: Path, url: str) -> None:
        self.copy_root = root / "there"
        config = replace(CONFIG, weights=replace(CONFIG.weights, keep_every=2, copies=url))
        self.run = Run(root, config)
        self.manifests = [self.run.commit(n, weights(model(n))) for n in range(4)]
        self.clock, self.host = SystemClock(), SystemHost()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[VersionCopier]:
        self.state: StateClient = open_simulated_state(self.clock)
        job_file = json.loads((self.run.directory / "job.json").read_text())
        await jobs.submit(self.state, "j", job_file["document"], str(self.run.directory), "op")
        settings = MeshSettings(redis_url="", run_root=str(self.run.directory), host="here")
        mesh = on_sockets("weights", self.state, self.clock, host=self.host, settings=settings)
        records = JobRecords(self.host, self.run.chunks.directory / JOBS_FOLDER)
        await records.load()
        versions = {m: VersionNumber(0, n) for n, m in enumerate(self.manifests)}
        await records.merge_from_redis("j", str(self.run.directory), versions)
        copier = VersionCopier(mesh, records, self.run.chunks.directory, poll_s=0.05)
        task = asyncio.create_task(copier.run())
        try:
            yield copier
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task
            await self.state.close()

    async def set_current_version(self, number: int) -> None:
        """Make a version the current one."""
        fields = {"version": str(number), "lineage": "0", "manifest": self.manifests[number]}
        pairs = [text for pair in fields.items() for text in pair]
        await self.state.run_command("HSET", "{j}:job", *pairs)

    async def wait_for_events(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Wait for `count` events of a kind and return their fields."""
        async with asyncio.timeout(scaled(EVENT_TIMEOUT_S)):
            while True:
                all_events = await events.read_all(self.state)
                matching = [dict(event.fields) for event in all_events if event.kind == kind]
                if len(matching) >= count:
                    return matching
                await asyncio.sleep(0.05)


@pytest.mark.deep
async def test_permanently_retained_versions_are_copied_as_models(tmp_path: Path) -> None:
    bench = CopyBench(tmp_path, f"file://{tmp_path}/there")
    async with bench.open() as copier:
        await bench.set_current_version(3)
        [first] = await bench.wait_for_events("version_copied", 1)
        assert (first["version"], first["manifest"]) == (2, bench.manifests[2])
        name = f"0-2-{bench.manifests[2][:8]}"
        assert first["url"] == f"file://{tmp_path}/there/j/{name}"
        exported = load_model(bench.copy_root / "j" / name)[1]
        assert torch.equal(logits(exported), logits(model(2)))
        size = sum(path.stat().st_size for path in (bench.copy_root / "j" / name).iterdir())
        assert first["bytes"] == size
        pinned = VersionPin(str(bench.run.directory), 0, 1)
        pin_version(bench.run.chunks, "j", bench.manifests[1], pinned)
        [_, second] = await bench.wait_for_events("version_copied", 2)
        assert second["version"] == 1 and copier.stats()["versions_copied"] == 2
        before = (bench.copy_root / "j" / name / "model.safetensors").stat()
    async with bench.open() as copier:  # another process of the store
        await bench.set_current_version(3)
        # after the end of the run
        assert await copy_versions(bench.run.directory, asyncio.Event()) == ""
        assert sorted(path.name[:3] for path in (bench.copy_root / "j").iterdir()) == [
            *("0-1", "0-2", "0-3")
        ]
        assert (bench.copy_root / "j" / name / "model.safetensors").stat() == before
        assert copier.copied_count == 0


@pytest.mark.deep
async def test_unwritable_copy_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file")
    bench = CopyBench(tmp_path, str(tmp_path / "there"))
    async with bench.open() as copier:
        await bench.set_current_version(3)
        [failure] = await bench.wait_for_events("version_copy_failed", 1)
        assert failure["job"] == "j" and str(tmp_path / "there") in failure["url"]
        assert "j: " in copier.stats()["copies_trouble"]
        assert "some versions are missing at" in await copy_versions(
            bench.run.directory, asyncio.Event()
        )


async def test_run_without_a_copy_path_copies_nothing(tmp_path: Path) -> None:
    bench = CopyBench(tmp_path, "")
    assert await copy_versions(bench.run.directory, asyncio.Event()) == ""


async def test_interrupted_last_copy_reports_missing_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = CopyBench(tmp_path, str(tmp_path / "there"))
    stop = asyncio.Event()
    stop.set()
    assert "the copy was stopped" in await copy_versions(bench.run.directory, stop)
    assert "copying versions to" in capsys.readouterr().out


@pytest.mark.timeout(400)  # several processes in sequence that import torch
async def test_failed_copies_do_not_block_other_versions(tmp_path: Path) -> None:
    bench = CopyBench(tmp_path, str(tmp_path / "there"))
    for number in (0, 1, 3):
        pinned = VersionPin(str(bench.run.directory), 0, number)
        pin_version(bench.run.chunks, "j", bench.manifests[number], pinned)
    ordered = sorted(bench.manifests)
    broken = {
        manifest: bench.run.list_chunks(manifest).pop() for manifest in (ordered[0], ordered[3])
    }
    for chunk in broken.values():
        bench.run.chunks.chunk_path(chunk).rename(tmp_path / chunk)
    async with bench.open() as copier:
        await bench.set_current_version(3)
        copied_events = await bench.wait_for_events("version_copied", 2)
        assert {event["manifest"] for event in copied_events} == set(ordered[1:3])
        failures = await bench.wait_for_events("version_copy_failed", 2)
        assert {event["manifest"] for event in failures} == set(broken)
        for event in failures:
            name = f"0/{bench.manifests.index(event['manifest'])}"
            assert event["version"] == name and broken[event["manifest"]] in event["error"]
            assert f"version {name}: " in copier.stats()["copies_trouble"]
        for chunk in broken.values():
            (tmp_path / chunk).rename(bench.run.chunks.chunk_path(chunk))
        all_copied = await bench.wait_for_events("version_copied", 4)  # after the retry
        assert {event["manifest"] for event in all_copied} == set(ordered)
        assert len(await bench.wait_for_events("version_copy_failed", 2)) == 2, (
            "one event per version"
        )
        assert copier.stats() == {"versions_copied": 4, "copies_trouble": ""}


def test_exit_of_the_copy_process_fails_the_version_in_progress() -> None:
    lines = [
        '{"manifest": "a", "copied": {"bytes": 1}}',
        "a library has said something",
        "17",
        '{"manifest": "b", "error": {"code": "not_found", "text": "it is missing"}}',
        '{"manifest": "c", "cop',
    ]
    outcomes = parse_outcomes(lines, ["a", "b", "c", "d"], has_exited=True)
    assert list(outcomes) == ["a", "b", "c"], "the last version is retried at once"
    assert outcomes["a"] == {"bytes": 1} and isinstance(outcomes["b"], NotFound)
    assert "has exited" in str(outcomes["c"])
    assert isinstance(parse_outcomes([], ["a"], has_exited=False)["a"], DeadlineExceeded)
    with pytest.raises(CorruptData, match=r"job\.json"):
        parse_outcomes(
            ['{"error": {"code": "damaged", "text": "job.json"}}'], ["a"], has_exited=True
        )
