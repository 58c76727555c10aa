"""Checkpoint files of a rank on another host than rank 0, and their removal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.api.calls.role import KindState, KindStates, MoveKinds, SetTier
from meshrl.common.api.ranks import (
    BeginStep,
    RankFault,
    RankOrder,
    Rendezvous,
    RestoreRows,
    SaveRows,
    SleepOrder,
)
from meshrl.common.api.weights import STORE_NAME, ManifestRequest, Weights
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import CorruptData, Fenced, Refused
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.instances.kind_controller import TensorsOfKind
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.records.checkpoints import compute_file_digests, format_checkpoint_name
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import TensorRows
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_actor import RankActor
from meshrl.services.trainer.ranks.row_tasks import RowRestorer, RowSaver
from meshrl.services.trainer.rows.saved_rows import SavedRows, save_rows
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.meshes import alone, on_sockets
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.base.files.harms import HARMS
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

GENERATION = 1


class SecondRank(Rank):
    """Rank with rows and without a process group."""

    def __init__(self) -> None:
        super().__init__(lambda mesh: pytest.fail("it forms no group"), 1, 2, "cpu")

    @property
    def learner(self) -> Any:
        return self

    def get_checkpoint_rows(self, masters: bool) -> dict[str, TensorRows]:
        return {"moment": TensorRows((4, 2), 2, torch.ones(2, 2))}


async def run(work: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
    return work(*args)


def saving(directory: Path, mesh: Mesh | None = None) -> RowSaver:
    clock = SystemClock()
    mesh = mesh or on_sockets("rank/job/1", open_simulated_state(clock), clock)
    data = JobData("job", JobConfig(), directory, Path("/elsewhere"), local_dir=directory)
    return RowSaver(mesh, BulkClient(mesh), data, SecondRank(), run)


def order(name: str, number: int = 0, host: str = "elsewhere") -> SaveRows:
    return SaveRows(GENERATION, host, name, False, ["moment"], number)


def scratch(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


async def test_files_of_an_abandoned_checkpoint_are_removed(tmp_path: Path) -> None:
    rank = saving(tmp_path)
    for number in (0, 1):
        assert not (await rank.save(order("step-000-000001-aa.core", number))).code
    write_checkpoint = tmp_path / "checkpoints/step-000-000001-aa.core.1/state"
    assert len(list(write_checkpoint.iterdir())) == 2  # of one checkpoint
    await rank.save(order("step-000-000002-bb.core"))
    assert scratch(tmp_path) == ["step-000-000002-bb.core.1"]


async def test_restarted_rank_removes_only_its_own_unfinished_files(tmp_path: Path) -> None:
    await saving(tmp_path).save(order("step-000-000001-aa.core"))
    others = ["step-000-000001-aa", "step-000-000001-aa.core", "step-000-000001-aa.core.11"]
    for name in others:
        (tmp_path / "checkpoints" / name).mkdir()
    await saving(tmp_path).clear_unfinished()
    assert scratch(tmp_path) == others


async def test_unwritable_disk_is_reported_as_a_fault(tmp_path: Path) -> None:
    rank = saving(tmp_path)
    (tmp_path / "checkpoints").write_bytes(b"no directory")
    fault = await rank.save(order("step-000-000001-aa.core"))
    assert fault.code == "os_error" and "NotADirectory" in fault.message


MOMENT = torch.arange(6.0).reshape(6, 1)
WEIGHTS = torch.full((8,), 1.0)  # of version 1, as `StoreBench.stage` has them


class RestoringRank(Rank):
    """Rank 1 of three, with rows and without a process group."""

    def __init__(self, first: int) -> None:
        """Create the rank; `first` is the first of its two moment rows."""
        super().__init__(lambda mesh: pytest.fail("it forms no group"), 1, 3, "cpu")
        self.moment = TensorRows((6, 1), first, torch.zeros(2, 1))
        self.weights = TensorRows((8,), 2, torch.zeros(3))

    @property
    def learner(self) -> Any:
        return self

    def get_meta_tensors(self, optimizer: bool) -> Mapping[str, torch.Tensor]:
        return {}

    def get_rows(
        self, names: Iterable[str], part: int = 0, parts: int = 1
    ) -> dict[str, TensorRows]:
        return {JOB: self.weights}

    def restore(self, saved: SavedRows, fill: Callable[[str, TensorRows], None]) -> None:
        fill(JOB, self.weights)
        saved.fill("moment", self.moment)


async def write_checkpoint(create_bench: StoreBench) -> RestoreRows:
    """Return a checkpoint that three ranks have written, two moment rows each."""
    await create_bench.submit()
    manifest = await create_bench.stage(1)
    name = format_checkpoint_name(0, 1, manifest)
    directory = create_bench.run_dir / "checkpoints" / name
    for rank in range(3):
        part = {"moment": TensorRows((6, 1), 2 * rank, MOMENT[2 * rank : 2 * rank + 2])}
        save_rows(directory / "state", f"part-{rank:05d}-00000.safetensors", part)
    files = compute_file_digests(directory)
    record = {"job": JOB, "lineage": 0, "step": 1, "weights": manifest, "files": files}
    directory.with_name(f"{name}.json").write_bytes(encode_sealed(record))
    return RestoreRows(1, 0, "another", name, files, manifest)


async def restore_rows(create_bench: StoreBench, rank: Rank, order: RestoreRows) -> RankFault:
    data = JobData(
        JOB,
        JobConfig(),
        create_bench.root,
        Path("/elsewhere"),
        local_dir=create_bench.root / "away",
    )
    return (
        await RowRestorer(create_bench.trainer, create_bench.bulk, data, rank, run).restore(order)
    ).fault


@pytest.mark.parametrize("first", [2, 3], ids=["as they were", "otherwise"])
@story_on(on_store, "tmp_path")
async def test_rank_restores_rows_of_any_division(create_bench: StoreBench, first: int) -> None:
    rank = RestoringRank(first)
    assert not (await restore_rows(create_bench, rank, await write_checkpoint(create_bench))).code
    assert torch.equal(rank.moment.rows, MOMENT[first : first + 2])
    assert torch.equal(rank.weights.rows, WEIGHTS[2:5])


@story_on(on_store, "tmp_path")
async def test_corruption_of_a_version_is_reported_as_found(create_bench: StoreBench) -> None:
    """Check that corruption of a version is reported as it was found. After the store's quarantine,
    only the absence of the file could be reported.
    """
    order = await write_checkpoint(create_bench)
    pending = ManifestRequest(order.manifest)
    [tensor] = (
        await create_bench.trainer.ref(STORE_NAME).call(Weights.fetch_manifest, pending)
    ).tensors
    HARMS[0](create_bench.chunks.chunk_path(tensor.chunk), b"")
    assert (await restore_rows(create_bench, RestoringRank(2), order)).code == CorruptData.code


THIRD = 3


class OwnRows(Rank):
    """Rank with 100 bytes of rows, once it has left its earlier group for the next one."""

    def __init__(self) -> None:
        self.rank, self.row_bytes, self.rows = 1, 0, torch.arange(25.0)

    def make_kinds(self) -> dict[str, TensorsOfKind]:
        storages = partial(TensorStorages, {"rows": self.rows})
        return {"parameters": TensorsOfKind(storages, lambda: self.row_bytes)}

    def leave(self) -> None:
        self.row_bytes = 100


def create_bench(
    clock: VirtualClock,
    random: Random,
    root: Path = Path("/nowhere"),
    make_rank: Callable[[], OwnRows] = OwnRows,
    worker: str = "worker/w1",
) -> RankActor:
    settings = MeshSettings(redis_url="simulated", run_root=str(root), worker=worker)
    host = SimulatedHost(clock, random.child("host"))
    mesh = alone("rank/j/1", clock, random, host, settings=settings)
    seat = Placement("g0", "g0.0", "j", 1, core=True, rank=1, ranks=2)
    data = JobData("j", JobConfig(name="j"), root, root)
    return RankActor(mesh, data, seat, make_rank())


def desired_tier(tier: str, epoch: int) -> SetTier:
    return SetTier(tier, epoch, time_sliced=False, segment_owner="", offload_dir="")


def move(tier: str) -> SleepOrder:
    return SleepOrder(THIRD, "move", tier, {"tier": tier})


@story_on(partial(run_virtual, limit_s=10000.0), given=2)
async def test_rank_leaves_after_its_rows_are_gathered(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    rank = create_bench(clock, random)
    assert (await rank.set_tier(desired_tier("absent", 1))).accelerator_bytes == 0, (
        "it is of no group"
    )
    await rank.stand_by(RankOrder(THIRD))
    pending = asyncio.create_task(rank.set_tier(desired_tier("absent", 2)))
    await clock.sleep(60.0)
    assert not pending.done(), "rank 0 has its rows still to gather"
    await rank.execute_sleep_order(move("absent"))
    assert (await pending).accelerator_bytes == 100
    await rank.execute_sleep_order(move("accelerator"))
    await rank.set_tier(desired_tier("accelerator", 3))
    assert rank.collect_stats()["tier"] == Tier.ACCELERATOR


@story_on(partial(run_virtual, limit_s=10000.0), given=2)
async def test_further_rank_moves_its_rows_by_order_until_it_sleeps(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    own = OwnRows()
    rank = create_bench(clock, random, tmp_path, lambda: own, "")
    await rank.stand_by(RankOrder(THIRD))
    sliced = replace(desired_tier("accelerator", 1), time_sliced=True, offload_dir=str(tmp_path))
    assert (await rank.set_tier(sliced)).accelerator_bytes == 100

    async def order(number: int, action: str) -> KindState:
        tier = "" if action == "load" else "disk"
        states: KindStates = await rank.move_kinds(MoveKinds(number, action, ["parameters"], tier))
        return states.kinds[0]

    async def sleep(action: str) -> None:
        await rank.execute_sleep_order(SleepOrder(THIRD, action, "disk", {}))

    async with rank.kinds.use_kinds(["parameters"], changed=["parameters"]):
        own.rows += 1.0
        with pytest.raises(Refused, match="process computes"):
            await order(1, "offload")
    away = await order(2, "offload")
    assert (
        away.accelerator_bytes == 0 < away.disk_bytes and own.rows.untyped_storage().nbytes() == 0
    )
    await sleep("keep")
    with pytest.raises(Refused, match="moves as a whole"):
        await order(3, "load")
    for action in ("release", "take", "discard"):
        await sleep(action)
    assert torch.equal(own.rows, torch.arange(25.0) + 1.0)
    assert (await order(4, "write_back")).accelerator_bytes == 100


@story_on(partial(run_virtual, limit_s=10000.0), given=2)
async def test_order_of_an_earlier_group_ends_while_it_waits_for_a_move(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    begun: list[int] = []

    class BeginningRows(OwnRows):
        def make_kinds(self) -> dict[str, TensorsOfKind]:
            kinds = super().make_kinds()
            return kinds | {"gradients": kinds["parameters"]}

        def begin_step(self, block_rounds: int = 1, gradient_dtype: str = "float32") -> None:
            begun.append(block_rounds)

    rank = create_bench(clock, random, tmp_path, BeginningRows, "")
    await rank.stand_by(RankOrder(THIRD))
    sliced = replace(desired_tier("accelerator", 1), time_sliced=True, offload_dir=str(tmp_path))
    await rank.set_tier(sliced)
    write = rank.move_kinds(MoveKinds(1, "write_back", ["parameters"], "disk"))
    moving = asyncio.create_task(write)
    await clock.sleep(0.0)
    waiting = asyncio.create_task(rank.begin_step(BeginStep(THIRD, 1, "float32")))
    await clock.sleep(0.0)
    assert not moving.done() and not waiting.done()
    await rank.stand_by(RankOrder(THIRD + 1))
    with pytest.raises(Fenced, match=f"this rank has {THIRD + 1}"):
        await waiting
    assert not begun
    await moving


@story_on(partial(run_virtual, limit_s=10000.0), given=2)
async def test_rank_restarted_during_sleep_sleeps_until_the_gang_reforms(
    clock: VirtualClock, random: Random
) -> None:
    rank = create_bench(clock, random)
    usage = await rank.set_tier(desired_tier("disk", 5))
    assert (usage.accelerator_bytes, usage.disk_bytes) == (0, 0)
    assert rank.collect_stats()["tier"] == Tier.DISK
    woken = asyncio.create_task(rank.set_tier(desired_tier("accelerator", 6)))
    await clock.sleep(60.0)
    assert not woken.done(), "rank 0 has yet to form the gang"
    await rank.stand_by(RankOrder(THIRD))
    assert (await woken).accelerator_bytes == 100


@story_on(partial(run_virtual, limit_s=10000.0), given=2)
async def test_rank_rejects_paths_outside_the_rendezvous_directory(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    """Reject paths from a process of any host that claims to be rank 0 or its worker."""
    run, secret = tmp_path / "run", tmp_path / "secret"
    (run / "mesh" / "gangs").mkdir(parents=True)
    secret.write_bytes(bytes(400))
    link = run / "mesh" / "gangs" / "link"
    link.symlink_to(secret)
    rank = create_bench(clock, random, run)
    await rank.stand_by(RankOrder(THIRD))
    around = run / "mesh" / "gangs" / ".." / ".." / ".." / "secret"
    new = tmp_path / "new" / "store"
    for path in (secret, link, around, Path("secret"), new):
        with pytest.raises(Refused, match=r"is not below .*gangs"):
            await rank.form(Rendezvous(THIRD, str(path), 1.0))
    assert not (tmp_path / "new").exists()
    others: tuple[dict[str, Any], ...] = (
        {"offload_dir": str(tmp_path)},
        {"segment_owner": "worker/w2"},
    )
    for other in others:
        with pytest.raises(Refused, match="The request is not from its worker"):
            await rank.set_tier(replace(desired_tier("disk", 1), **other))
