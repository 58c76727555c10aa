"""Runs on a mesh with a real Redis and with leases that the test holds."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import BudgetConfig, JobConfig
from meshrl.common.state import events, jobs
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry, register
from meshrl.directory.directory_paths import write_json
from tests.contract.state.state_bench import running_server

T = TypeVar("T")
HOUR_MS = 3_600_000
JOB = "tiny"


@dataclass
class HeldMesh:
    """Mesh in `root` with one job, whose run is in `run`, and a planner lease of the test."""

    root: Path
    run: Path
    url: str
    token: int = 0

    def ask(self, question: Callable[[StateClient], Awaitable[T]]) -> T:
        async def run_question() -> T:
            state = await StateClient.open(self.url)
            try:
                return await question(state)
            finally:
                await state.close()

        return asyncio.run(run_question())

    async def submit(self, state: StateClient) -> None:
        lease = RegistryEntry("planner/0", "planner", incarnation="one", run_root=str(self.root))
        self.token = await register(state, lease, HOUR_MS)
        document = replace(JobConfig(), name=JOB, budget=BudgetConfig(steps=8)).to_document()
        write_json(
            self.run / "job.json", {"job": JOB, "document": document, "mesh": str(self.root)}
        )
        await jobs.submit(state, JOB, document, str(self.run), "submitted")

    def phase(self, phase: jobs.Phase, error: str = "") -> None:
        self.ask(lambda s: jobs.set_phase(s, JOB, phase, self.token, "planner/0", error))

    def record(self, phase: str = "") -> None:
        """Write the files of a recorder up to now, with a summary if the run is over."""
        found = self.ask(events.read_all)
        lines = [json.dumps(asdict(event)) + "\n" for event in found]
        (self.run / "events.jsonl").write_text("".join(lines))
        if phase:
            write_json(self.run / "summary.json", {"phase": phase})

    @property
    def row(self) -> jobs.JobRow:
        return self.ask(lambda state: jobs.read_job(state, JOB))


@pytest.fixture
def held_mesh(tmp_path: Path) -> Iterator[HeldMesh]:
    with running_server(embedded_server.find_server()) as server:
        mesh = HeldMesh(tmp_path / "mesh-root", tmp_path / "runs" / JOB, server.url)
        settings = MeshSettings(redis_url=server.url, run_root=str(mesh.root))
        (mesh.root / "mesh").mkdir(parents=True)
        settings.to_file(mesh.root / "mesh/settings.json")
        mesh.ask(mesh.submit)
        yield mesh


def write_run(directory: Path, phases: list[dict[str, Any]], rewards: list[float]) -> Path:
    """Write the files of a run that no process continues."""
    document = JobConfig(name=JOB, budget=BudgetConfig(steps=8)).to_document()
    write_json(directory / "job.json", {"job": JOB, "document": document})
    rows = [{"id": "1-0", "ms": 1, "kind": "phase", "fields": {"job": JOB} | f} for f in phases]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "events.jsonl").write_text(
        lines + '{"id": "2-0", "kind": "pha'
    )  # an incomplete line
    steps = [json.dumps({"step": n, "reward": r}) + "\n" for n, r in enumerate(rewards, 1)]
    (directory / "metrics.jsonl").write_text("".join(steps))
    os.utime(
        directory / "events.jsonl", (1, 1)
    )  # long ago, so that no process counts as writing the rest
    return directory
