"""What a rank on another host than rank 0 writes of a checkpoint, and does not leave there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.api.ranks import SaveRows
from meshrl.common.base.clock import SystemClock
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.laying import Part
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.saving import RankSaving
from meshrl.sim.redis.state import simulated_state
from tests.meshes import on_sockets

GENERATION = 1


class SecondRank(Rank):
    """Has rows, and no group."""

    def __init__(self) -> None:
        super().__init__(lambda mesh: pytest.fail("it forms no group"), 1, 2, "cpu")

    @property
    def learner(self) -> Any:
        return self

    def saved(self, masters: bool) -> dict[str, Part]:
        return {"moment": Part((4, 2), 2, torch.ones(2, 2))}


async def run(work: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
    return work(*args)


def saving(directory: Path, mesh: Mesh | None = None) -> RankSaving:
    clock = SystemClock()
    mesh = mesh or on_sockets("rank/job/1", simulated_state(clock), clock)
    data = JobData("job", JobConfig(), directory, Path("/elsewhere"), own=directory)
    return RankSaving(mesh, BulkClient(mesh), data, SecondRank(), run)


def order(name: str, number: int = 0, host: str = "elsewhere") -> SaveRows:
    return SaveRows(GENERATION, host, name, False, ["moment"], number)


def scratch(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


async def test_what_rank_0_has_given_up_does_not_stay(tmp_path: Path) -> None:
    rank = saving(tmp_path)
    for number in (0, 1):
        assert not (await rank.save(order("step-000-000001-aa.core", number))).code
    written = tmp_path / "checkpoints/step-000-000001-aa.core.1/state"
    assert len(list(written.iterdir())) == 2  # of one checkpoint
    await rank.save(order("step-000-000002-bb.core"))
    assert scratch(tmp_path) == ["step-000-000002-bb.core.1"]


async def test_a_rank_that_begins_anew_removes_its_own_and_no_other_ranks(tmp_path: Path) -> None:
    await saving(tmp_path).save(order("step-000-000001-aa.core"))
    others = ["step-000-000001-aa", "step-000-000001-aa.core", "step-000-000001-aa.core.11"]
    for name in others:
        (tmp_path / "checkpoints" / name).mkdir()
    await saving(tmp_path).clear()
    assert scratch(tmp_path) == others


async def test_a_disk_that_cannot_be_written_is_an_answer(tmp_path: Path) -> None:
    rank = saving(tmp_path)
    (tmp_path / "checkpoints").write_bytes(b"no directory")
    trouble = await rank.save(order("step-000-000001-aa.core"))
    assert trouble.code == "os_error" and "NotADirectory" in trouble.why
