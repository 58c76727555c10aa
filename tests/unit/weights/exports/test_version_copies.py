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

PATIENCE_S = 100.0  # a process starts and imports torch, beside others that do


class Copied:
    """Run of four versions on a mesh whose store copies them below `there`."""

    def __init__(self, root: Path, place: str) -> None:
        self.there = root / "there"
        config = replace(CONFIG, weights=replace(CONFIG.weights, keep_every=2, copies=place))
        self.run = Run(root, config)
        self.manifests = [self.run.commit(n, weights(model(n))) for n in range(4)]
        self.clock, self.host = SystemClock(), SystemHost()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[VersionCopier]:
        self.state: StateClient = open_simulated_state(self.clock)
        held = json.loads((self.run.directory / "job.json").read_text())
        await jobs.submit(self.state, "j", held["document"], str(self.run.directory), "op")
        settings = MeshSettings(redis_url="", run_root=str(self.run.directory), host="here")
        mesh = on_sockets("weights", self.state, self.clock, host=self.host, settings=settings)
        records = JobRecords(self.host, self.run.chunks.directory / JOBS_FOLDER)
        await records.load()
        versions = {m: VersionNumber(0, n) for n, m in enumerate(self.manifests)}
        await records.merge_from_redis("j", str(self.run.directory), versions)
        copies = VersionCopier(mesh, records, self.run.chunks.directory, poll_s=0.05)
        task = asyncio.create_task(copies.run())
        try:
            yield copies
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task
            await self.state.close()

    async def at(self, number: int) -> None:
        """Make the version the current one."""
        fields = {"version": str(number), "lineage": "0", "manifest": self.manifests[number]}
        pairs = [text for pair in fields.items() for text in pair]
        await self.state.run_command("HSET", "{j}:job", *pairs)

    async def told(self, kind: str, count: int) -> list[dict[str, Any]]:
        """So many events of a kind, once they are there."""
        async with asyncio.timeout(scaled(PATIENCE_S)):
            while True:
                every = await events.read_all(self.state)
                found = [dict(event.fields) for event in every if event.kind == kind]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.05)


@pytest.mark.deep
async def test_versions_that_stay_are_copied_as_models(tmp_path: Path) -> None:
    bench = Copied(tmp_path, f"file://{tmp_path}/there")
    async with bench.open() as copies:
        await bench.at(3)
        [first] = await bench.told("version_copied", 1)
        assert (first["version"], first["manifest"]) == (2, bench.manifests[2])
        name = f"0-2-{bench.manifests[2][:8]}"
        assert first["url"] == f"file://{tmp_path}/there/j/{name}"
        opened = load_model(bench.there / "j" / name)[1]
        assert torch.equal(logits(opened), logits(model(2)))
        size = sum(path.stat().st_size for path in (bench.there / "j" / name).iterdir())
        assert first["bytes"] == size
        pinned = VersionPin(str(bench.run.directory), 0, 1)
        pin_version(bench.run.chunks, "j", bench.manifests[1], pinned)
        [_, second] = await bench.told("version_copied", 2)
        assert second["version"] == 1 and copies.stats()["versions_copied"] == 2
        before = (bench.there / "j" / name / "model.safetensors").stat()
    async with bench.open() as copies:  # another process of the store
        await bench.at(3)
        assert (
            await copy_versions(bench.run.directory, asyncio.Event()) == ""
        )  # and the run is over
        assert sorted(path.name[:3] for path in (bench.there / "j").iterdir()) == [
            *("0-1", "0-2", "0-3")
        ]
        assert (bench.there / "j" / name / "model.safetensors").stat() == before
        assert copies.copied_count == 0


@pytest.mark.deep
async def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file")
    bench = Copied(tmp_path, str(tmp_path / "there"))
    async with bench.open() as copies:
        await bench.at(3)
        [failed] = await bench.told("version_copy_failed", 1)
        assert failed["job"] == "j" and str(tmp_path / "there") in failed["url"]
        assert "j: " in copies.stats()["copies_trouble"]
        assert "not all versions are at" in await copy_versions(
            bench.run.directory, asyncio.Event()
        )


async def test_a_run_that_names_no_place_copies_nothing(tmp_path: Path) -> None:
    bench = Copied(tmp_path, "")
    assert await copy_versions(bench.run.directory, asyncio.Event()) == ""


async def test_whoever_stops_the_last_copies_is_told_that_some_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Copied(tmp_path, str(tmp_path / "there"))
    stop = asyncio.Event()
    stop.set()
    assert "it was stopped" in await copy_versions(bench.run.directory, stop)
    assert "copying versions to" in capsys.readouterr().out


@pytest.mark.timeout(400)  # several processes that import torch, one after the other
async def test_versions_that_cannot_be_copied_hinder_no_other(tmp_path: Path) -> None:
    bench = Copied(tmp_path, str(tmp_path / "there"))
    for number in (0, 1, 3):
        pinned = VersionPin(str(bench.run.directory), 0, number)
        pin_version(bench.run.chunks, "j", bench.manifests[number], pinned)
    ordered = sorted(bench.manifests)
    broken = {
        manifest: bench.run.chunks_of(manifest).pop() for manifest in (ordered[0], ordered[3])
    }
    for chunk in broken.values():
        bench.run.chunks.chunk_path(chunk).rename(tmp_path / chunk)
    async with bench.open() as copies:
        await bench.at(3)
        there = await bench.told("version_copied", 2)
        assert {one["manifest"] for one in there} == set(ordered[1:3])
        failed = await bench.told("version_copy_failed", 2)
        assert {one["manifest"] for one in failed} == set(broken)
        for one in failed:
            name = f"0/{bench.manifests.index(one['manifest'])}"
            assert one["version"] == name and broken[one["manifest"]] in one["error"]
            assert f"version {name}: " in copies.stats()["copies_trouble"]
        for chunk in broken.values():
            (tmp_path / chunk).rename(bench.run.chunks.chunk_path(chunk))
        every = await bench.told("version_copied", 4)  # when they are tried again
        assert {one["manifest"] for one in every} == set(ordered)
        assert len(await bench.told("version_copy_failed", 2)) == 2, "once for each"
        assert copies.stats() == {"versions_copied": 4, "copies_trouble": ""}


def test_a_process_that_ends_while_it_copies_is_blamed_on_the_version_that_it_was_at() -> None:
    lines = [
        '{"manifest": "a", "copied": {"bytes": 1}}',
        "a library has said something",
        "17",
        '{"manifest": "b", "error": {"code": "not_found", "text": "it is missing"}}',
        '{"manifest": "c", "cop',
    ]
    found = parse_outcomes(lines, ["a", "b", "c", "d"], has_exited=True)
    assert list(found) == ["a", "b", "c"], "the last one is tried at once"
    assert found["a"] == {"bytes": 1} and isinstance(found["b"], NotFound)
    assert "has ended" in str(found["c"])
    assert isinstance(parse_outcomes([], ["a"], has_exited=False)["a"], DeadlineExceeded)
    with pytest.raises(CorruptData, match=r"job\.json"):
        parse_outcomes(
            ['{"error": {"code": "damaged", "text": "job.json"}}'], ["a"], has_exited=True
        )
