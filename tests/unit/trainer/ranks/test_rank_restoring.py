"""From what a rank goes on that is on another host than the run is at home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.api.ranks import RestoreRows, Trouble
from meshrl.common.api.weights import STORE, Fetch, Weights
from meshrl.common.base.errors import Damaged
from meshrl.common.base.files.sealed import sealed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.records.checkpoints import checkpoint_name, digests_below
from meshrl.common.weights.layout.laying import Part
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.saving import RankRestoring
from meshrl.services.trainer.rows.saved import SavedRows, save_rows
from tests.unit.common.base.files.harms import HARMS
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

MOMENT = torch.arange(6.0).reshape(6, 1)
WEIGHTS = torch.full((8,), 1.0)  # of version 1, as `StoreBench.stage` has them


class SecondRank(Rank):
    """Of three; it has rows, and no group."""

    def __init__(self, first: int) -> None:
        """`first`: of its two rows of the moment."""
        super().__init__(lambda mesh: pytest.fail("it forms no group"), 1, 3, "cpu")
        self.moment = Part((6, 1), first, torch.zeros(2, 1))
        self.weights = Part((8,), 2, torch.zeros(3))

    @property
    def learner(self) -> Any:
        return self

    def outline(self, optimizer: bool) -> Mapping[str, torch.Tensor]:
        return {}

    def rows(self, names: Iterable[str], part: int = 0, parts: int = 1) -> dict[str, Part]:
        return {JOB: self.weights}

    def restore(self, saved: SavedRows, fill: Callable[[str, Part], None]) -> None:
        fill(JOB, self.weights)
        saved.fill("moment", self.moment)


async def run(work: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
    return work(*args)


async def written(bench: StoreBench) -> RestoreRows:
    """A checkpoint that three ranks have written, two rows of the moment each."""
    await bench.submit()
    manifest = await bench.stage(1)
    name = checkpoint_name(0, 1, manifest)
    directory = bench.run_dir / "checkpoints" / name
    for rank in range(3):
        part = {"moment": Part((6, 1), 2 * rank, MOMENT[2 * rank : 2 * rank + 2])}
        save_rows(directory / "state", f"part-{rank:05d}-00000.safetensors", part)
    files = digests_below(directory)
    about = {"job": JOB, "lineage": 0, "step": 1, "weights": manifest, "files": files}
    directory.with_name(f"{name}.json").write_bytes(sealed(about))
    return RestoreRows(1, 0, "another", name, files, manifest)


async def restored(bench: StoreBench, rank: Rank, order: RestoreRows) -> Trouble:
    data = JobData(JOB, JobConfig(), bench.root, Path("/elsewhere"), own=bench.root / "away")
    return (await RankRestoring(bench.trainer, bench.bulk, data, rank, run).restore(order)).trouble


@pytest.mark.parametrize("first", [2, 3], ids=["as they were", "otherwise"])
def test_it_has_its_rows_however_they_were_cut(tmp_path: Path, first: int) -> None:
    async def story(bench: StoreBench) -> None:
        rank = SecondRank(first)
        assert not (await restored(bench, rank, await written(bench))).code
        assert torch.equal(rank.moment.rows, MOMENT[first : first + 2])
        assert torch.equal(rank.weights.rows, WEIGHTS[2:5])

    on_store(tmp_path, story)


def test_damage_of_the_version_is_said_as_it_was_found(tmp_path: Path) -> None:
    """Once the store has set it aside there would be nothing but its absence to tell of."""

    async def story(bench: StoreBench) -> None:
        order = await written(bench)
        asked = Fetch(order.manifest)
        [tensor] = (await bench.trainer.ref(STORE).call(Weights.manifest, asked)).tensors
        HARMS[0](bench.chunks.path(tensor.chunk), b"")
        assert (await restored(bench, SecondRank(2), order)).code == Damaged.code

    on_store(tmp_path, story)
