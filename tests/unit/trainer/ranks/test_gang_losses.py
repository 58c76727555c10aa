"""Errors of a gang: the core waits for a lost rank and does not repeat a rejected order."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.api.calls.role import TierUsage
from meshrl.common.api.ranks import (
    STATE_TRANSFER_TIMEOUT_S,
    BinScores,
    RankFault,
    Ranks,
    Rendezvous,
    RestoreResult,
    RoundStats,
    SavingResult,
    StagingResult,
    StandbyAnswer,
    rank_name,
)
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import (
    BadMessage,
    ConfigError,
    CorruptData,
    Fenced,
    MeshError,
    NotFound,
    PeerLost,
    RankLost,
    Refused,
    RemoteFailure,
    StorageFull,
)
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.layout.chunk_builder import StagingOptions
from meshrl.common.weights.transports.rendezvous import NoRendezvousPort
from meshrl.services.trainer.compute.gradient_transfer import GradientOutbox, make_hybrid_name
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.gang.rank_group import RankGroup
from meshrl.services.trainer.gang.state_writers import GangStateWriter, LocalStateWriter
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.ranks.rank import Rank, join_group
from meshrl.services.trainer.sharding.learners import FsdpLearner
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets
from tests.unit.trainer.ranks.batches_under_test import OPTIMIZER, VARIANTS, bins_of_step
from tests.unit.trainer.ranks.rows_under_test import sharded_learner

JOB, HYBRID = "job", "g1"


class FirstRank(Rank):
    """Rank 0 of two whose process group has rank 0 alone; the other rank only answers."""

    def join(
        self, rendezvous: Rendezvous, interface: str = "lo", listener: socket.socket | None = None
    ) -> None:
        mesh = join_group(rendezvous, 0, 1, "cpu", interface, listener)
        self._formed = mesh, rendezvous


class OtherRank(Actor):
    """Rank that answers an order from `answers`, or raises the error in `raises`."""

    interface = Ranks

    def __init__(self) -> None:
        self.raises: dict[str, Exception] = {}
        self.ordered: dict[str, list[Any]] = defaultdict(list)
        self.answers: dict[str, Any] = {
            "stand_by": StandbyAnswer("", ""),
            "compute_round": RoundStats([asdict(BinStats(tokens=1))]),
            "fetch_gradient": RankFault(),
            "apply_gradient": 0.0,
            "score_bin": lambda part: BinScores(np.zeros(len(part.bin["tokens"]), np.float32)),
            "finish_staging": StagingResult(),
            "save_rows": RankFault(),
            "finish_saving": SavingResult(),
            "restore_rows": RestoreResult(),
            "set_tier": TierUsage(0, 0, 0),
            "drain": None,
        }

    def answer(self, name: str, order: Any) -> Any:
        self.ordered[name].append(order)
        found = self.answers.get(name)
        found = found(order) if callable(found) else found
        name = f"rest {order.action}" if name == "execute_sleep_order" else name
        if name in self.raises:
            raise self.raises[name]
        return found

    @property
    def list_sleep_actions(self) -> list[str]:
        return [order.action for order in self.ordered["execute_sleep_order"]]


def make_handler(name: str, method: Any) -> Any:
    def answer(self: OtherRank, order: Any) -> Any:
        return self.answer(name, order)

    return call(method)(answer)


for order, method in Ranks.methods.items():
    setattr(OtherRank, order, make_handler(order, method))


def make_learner(group: Any) -> FsdpLearner:
    return sharded_learner("plain", group)


class Gang:
    """Gang of two ranks of a core."""

    def __init__(
        self, mesh: Mesh, other: OtherRank, directory: Path, outbox: GradientOutbox
    ) -> None:
        self.mesh, self.other, self.directory, self.outbox = mesh, other, directory, outbox
        self.rank = FirstRank(make_learner, 0, 2, "cpu")
        self.compute = GangCompute(
            mesh, JOB, self.rank, rendezvous_dir=directory, collective_timeout_s=scaled(20.0)
        )
        self.compute.kinds.set_targets("", str(directory / "kept"))

    def make_gradient(self) -> torch.Tensor:
        return torch.arange(self.compute.parameter_count, dtype=torch.float32)

    async def send_gradient(self, block: int, gradient: torch.Tensor) -> None:
        """Send a gradient as a hybrid does."""
        chunks = await self.outbox.put(gradient, self.compute.list_owned_ranges())
        await self.compute.add_gradient(block, make_hybrid_name(HYBRID), chunks)

    @property
    def has_group(self) -> bool:
        try:
            return self.rank.learner is not None
        except Refused:
            return False


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    clock = SystemClock()
    state = open_simulated_state(clock)

    def mesh(name: str) -> Mesh:
        return on_sockets(
            name, state, clock, settings=MeshSettings(state.url, str(tmp_path), host="")
        )

    core, elsewhere = mesh(f"trainer/{JOB}"), mesh(rank_name(JOB, 1))
    hybrid, other = mesh(make_hybrid_name(HYBRID)), OtherRank()
    outbox = GradientOutbox(hybrid, HYBRID)
    await elsewhere.join(other)
    await core.join(None)
    await hybrid.join(None, bulk_address=outbox.address)
    made = Gang(core, other, tmp_path, outbox)
    await made.compute.form_group()
    yield made
    made.rank.leave()
    outbox.close()
    await hybrid.leave()
    await core.leave()
    await elsewhere.leave()
    await state.close()


def a_round() -> list[Any]:
    return bins_of_step(0)[:2]


async def test_lost_rank_ends_the_group_and_a_new_group_continues(gang: Gang) -> None:
    for lost in (Fenced("an order of an earlier generation"), RankLost("a collective failed")):
        gang.other.raises["compute_round"] = lost
        with pytest.raises(RankLost, match=str(lost)):
            await gang.compute.compute_round(0, a_round())
        assert not gang.has_group
        with pytest.raises(RankLost, match=str(lost)):  # until it is formed again
            await gang.compute.begin_step()
        gang.other.raises.clear()
        await gang.compute.form_group()
        await gang.compute.begin_step()
        stats = await gang.compute.compute_round(0, a_round())
        assert stats.tokens == a_round()[0].loss_mask.sum() + 1


async def test_error_of_another_rank_is_raised_with_its_type(gang: Gang) -> None:
    gang.other.raises["compute_round"] = TypeError("not a tensor")
    with pytest.raises(RemoteFailure, match="TypeError: not a tensor"):
        await gang.compute.compute_round(0, a_round())
    assert not gang.has_group
    gang.other.raises = {"form_group": TypeError("not a path")}
    with pytest.raises(RemoteFailure, match="not a path"):  # immediately, without a repetition
        await gang.compute.form_group()


async def test_next_group_discards_work_of_a_lost_group(gang: Gang, tmp_path: Path) -> None:
    names = list(gang.compute.meta_tensors)[:2]
    staging = gang.compute.create_staging(StagingOptions("F32", 1 << 20), "a version")
    saving = gang.compute.create_saver(tmp_path / "scratch/state", include_masters=False)
    await staging.copy(names, 0, 1)
    await saving.copy(list(saving.meta_tensors)[:2], 0)
    assert gang.other.ordered["stage_rows"][0].tensor_names == names
    await gang.compute.form_group()
    for training in (
        staging.copy(names, 0, 1),
        staging.finish(),
        saving.copy(list(saving.meta_tensors)[:2], 1),
        saving.finish(),
    ):
        with pytest.raises(RankLost, match="formed again"):
            await training
    await staging.close()
    assert gang.has_group
    await gang.compute.begin_step()


@pytest.mark.parametrize("order", ["stage_rows", "finish_staging"])
async def test_rank_lost_during_staging_ends_the_group_and_staging_restarts(
    gang: Gang, order: str
) -> None:
    names = list(gang.compute.meta_tensors)

    async def staged() -> None:
        staging = gang.compute.create_staging(
            StagingOptions("BF16", 1 << 20, write_chunks=False), "a version"
        )
        try:
            await staging.copy(names, 0, 1)
            await staging.wait_until_written()
            own, _ = await staging.finish()
        finally:
            await staging.close()
        assert {piece.name for piece in own.pieces} == own.masters_parts.keys() == set(names)

    await staged()
    gang.other.raises[order] = PeerLost("the rank was killed")
    with pytest.raises(RankLost, match="was killed"):
        await staged()
    assert not gang.has_group
    gang.other.raises.clear()
    await gang.compute.form_group()
    await staged()


async def test_recoverable_rank_error_keeps_its_type_and_the_group(
    gang: Gang, tmp_path: Path
) -> None:
    """Check that a rank's error is reported by its kind, and that the same group recovers."""
    saving = gang.compute.create_saver(tmp_path / "scratch/state", include_masters=True)
    await saving.copy(list(saving.meta_tensors), 0)
    await saving.finish()
    about = "step-000-000001-00000000", {"state/part": "digest"}, "manifest"
    for kind in (CorruptData, NotFound):
        gang.other.answers["restore_rows"] = RestoreResult(
            RankFault(kind.code, "a chunk is gone", "/somewhere")
        )
        with pytest.raises(kind, match="a chunk is gone") as error_info:
            await gang.compute.restore(*about, tmp_path / "scratch/state")
        assert error_info.value.where == "/somewhere" and gang.has_group
    gang.other.answers["restore_rows"] = RestoreResult()
    await gang.compute.restore(*about, tmp_path / "scratch/state")


async def test_corrupt_checkpoint_is_reported_and_an_older_one_restored(
    gang: Gang, tmp_path: Path
) -> None:
    whole, cut_short = tmp_path / "whole/state", tmp_path / "cut/state"
    for path in (whole, cut_short):
        saving = gang.compute.create_saver(path, include_masters=True)
        await saving.copy(list(saving.meta_tensors), 0)
        await saving.finish()
    (part,) = cut_short.iterdir()
    os.truncate(part, part.stat().st_size - 8)
    about = "step-000-000001-00000000", {"state/part": "digest"}, "manifest"
    with pytest.raises(CorruptData, match="truncated"):
        await gang.compute.restore(*about, cut_short)
    assert gang.has_group
    await gang.compute.restore(*about, whole)


async def test_failed_checkpoint_write_keeps_the_group(gang: Gang, tmp_path: Path) -> None:
    def saving(name: str) -> LocalStateWriter | GangStateWriter:
        return gang.compute.create_saver(tmp_path / name / "state", include_masters=True)

    first, *rest = list(saving("names").meta_tensors)
    (tmp_path / "own").write_bytes(b"no directory")
    with pytest.raises(OSError, match=r"NotADirectoryError.*own"):
        await saving("own").copy([first], 0)
    full = RankFault(StorageFull.code, "no room for a checkpoint", "/there", "free some")
    gang.other.answers["save_rows"] = full
    with pytest.raises(StorageFull, match="no room") as error_info:
        await saving("full").copy([first], 0)
    assert error_info.value.where == "/there" and error_info.value.fix == "free some"
    gang.other.answers["save_rows"] = RankFault()
    gang.other.answers["finish_saving"] = SavingResult(
        fault=RankFault("os_error", "OSError: [Errno 5]")
    )
    unread = saving("unread")
    await unread.copy([first], 0)
    with pytest.raises(OSError, match="Errno 5"):
        await unread.finish()
    saving_results = [SavingResult(), *[SavingResult(in_progress=True)] * 2]
    gang.other.answers["finish_saving"] = lambda order: saving_results.pop()
    whole = saving("whole")
    await whole.copy([first], 0)
    await whole.copy(rest, 1)
    await whole.finish()
    assert gang.has_group and not saving_results


@pytest.mark.parametrize(
    "name", ["../../id", "/etc/x", "part-00000-00000.safetensors", "part-00001-00000.safetensors/x"]
)
async def test_rank_saves_only_files_of_its_own(gang: Gang, tmp_path: Path, name: str) -> None:
    saving = gang.compute.create_saver(tmp_path / "scratch/state", include_masters=False)
    await saving.copy(list(saving.meta_tensors), 0)
    before = files_of(tmp_path)
    gang.other.answers["finish_saving"] = SavingResult({name: "0" * 64})
    with pytest.raises(BadMessage, match="not the name of a file of rank 1's rows"):
        await saving.finish()
    assert files_of(tmp_path) == before and gang.has_group


async def test_late_error_of_an_earlier_group_is_ignored(gang: Gang) -> None:
    was_requested, failed = asyncio.Event(), asyncio.Event()

    async def order() -> None:
        was_requested.set()
        await failed.wait()
        raise PeerLost("the rank was killed")

    group = gang.compute._group
    late = asyncio.create_task(group.run_guarded(order()))
    await was_requested.wait()
    await gang.compute.form_group()
    failed.set()
    with pytest.raises(RankLost, match="was killed"):
        await late
    assert gang.has_group
    await gang.compute.begin_step()


async def test_gang_over_hosts_without_a_rendezvous_port_fails_at_once(tmp_path: Path) -> None:
    clock = SystemClock()
    state = open_simulated_state(clock)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        settings = MeshSettings(state.url, "", host="here", bind=bind, interface="lo")
        core = on_sockets(f"trainer/{JOB}", state, clock, settings=settings)
        elsewhere = on_sockets(rank_name(JOB, 1), state, clock)
        other = OtherRank()
        other.answers["stand_by"] = StandbyAnswer("elsewhere", "127.0.0.1")
        await elsewhere.join(other)
        await core.join(None)
        rank = FirstRank(make_learner, 0, 2, "cpu")

        group = RankGroup(core, JOB, rank, tmp_path, scaled(20.0), on_loss=lambda: None)
        async with asyncio.timeout(scaled(60.0)):
            with pytest.raises(NoRendezvousPort, match=bind.rpartition(":")[2]):
                await group.form()
        assert len(other.ordered["stand_by"]) == 1 and not group.generation
    await core.leave()
    await elsewhere.leave()
    await state.close()


async def test_error_of_rank_0_ends_the_group_and_a_job_error_does_not(gang: Gang) -> None:
    first, second = a_round()
    gang.other.raises["compute_round"] = ConfigError("the job cannot be")
    with pytest.raises(ConfigError):
        await gang.compute.compute_round(0, [first, second])
    assert gang.has_group
    gang.other.raises.clear()
    wrong = replace(first, tokens=first.tokens + 10_000)  # outside the vocabulary
    with pytest.raises(IndexError):
        await gang.compute.compute_round(1, [wrong, second])
    assert not gang.has_group


async def test_each_rank_fetches_its_rows_of_a_hybrids_gradient(gang: Gang) -> None:
    gradient = gang.make_gradient()
    await gang.compute.begin_step()
    await gang.send_gradient(0, gradient)
    norm = await gang.compute.apply_gradient(1, 1.0, 1.0)
    assert norm == pytest.approx(float(gradient.double().norm()))
    [fetch], [use] = gang.other.ordered["fetch_gradient"], gang.other.ordered["add_gradient"]
    # The process group of this test has rank 0 alone, which owns all rows.
    assert (fetch.hybrid, fetch.element_count, fetch.chunks) == ("hybrid/g1", 0, [])
    assert (use.transfer_id, use.block) == (fetch.transfer_id, 0)


async def test_gradient_that_a_rank_cannot_fetch_is_added_by_none(gang: Gang) -> None:
    gradient = gang.make_gradient()
    gang.other.answers["fetch_gradient"] = RankFault("peer_lost", "hybrid/g1 has exited")
    with pytest.raises(PeerLost, match="has exited"):
        await gang.send_gradient(0, gradient)
    await gang.outbox.clear()
    gang.other.answers["fetch_gradient"] = RankFault()
    chunks = [["0" * 64], []]
    with pytest.raises(NotFound):
        await gang.compute.add_gradient(0, make_hybrid_name(HYBRID), chunks)
    assert [order.block for order in gang.other.ordered["add_gradient"]] == [-1, -1]
    assert gang.has_group
    with pytest.raises(BadMessage, match="rows of 1 ranks for 2"):
        await gang.compute.add_gradient(0, make_hybrid_name(HYBRID), [[]])
    await gang.send_gradient(0, gradient)
    norm = await gang.compute.apply_gradient(1, 1.0, 1.0)
    assert norm == pytest.approx(float(gradient.double().norm()))


async def test_gradient_of_an_earlier_step_is_not_added(gang: Gang) -> None:
    await gang.compute.begin_step()
    chunks = await gang.outbox.put(gang.make_gradient(), gang.compute.list_owned_ranges())
    async with gang.compute.runner.gradient_lock:
        late = asyncio.create_task(gang.compute.add_gradient(0, make_hybrid_name(HYBRID), chunks))
        while not gang.other.ordered["fetch_gradient"]:
            await asyncio.sleep(0.001)
        await gang.compute.begin_step()
    with pytest.raises(Refused, match="has ended"):
        await late
    assert not gang.other.ordered["add_gradient"]


async def test_changed_settings_apply_to_all_ranks_until_the_gang_reforms(gang: Gang) -> None:
    algorithm = replace(VARIANTS["plain"].algorithm, clip_high=0.5)
    await gang.compute.update_settings(algorithm, replace(OPTIMIZER, muon_lr=0.25))
    [order] = gang.other.ordered["update_settings"]
    assert (order.algorithm["clip_high"], order.optimizer["muon_lr"]) == (0.5, 0.25)
    assert gang.has_group


@pytest.mark.parametrize(
    ("order", "raised", "error_info"),
    [
        ("fetch_gradient", Fenced("another generation"), RankLost),
        ("add_gradient", TypeError("no rows"), RemoteFailure),
    ],
)
async def test_failure_of_a_rank_with_a_gradient_ends_the_group(
    gang: Gang, order: str, raised: Exception, error_info: type[MeshError]
) -> None:
    gang.other.raises[order] = raised
    with pytest.raises(error_info, match=str(raised)):
        await gang.send_gradient(0, gang.make_gradient())
    assert not gang.has_group
    gang.other.raises.clear()
    await gang.compute.form_group()
    assert gang.has_group


class SlowRank(FirstRank):
    """Rank that forms at once, and creates its model when it may."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, 0, 2, "cpu")  # type: ignore[arg-type, return-value]
        self.begun, self.may_end = threading.Event(), threading.Event()

    def join(self, *_: Any) -> None:
        pass

    def create_model(self) -> None:
        self.begun.set()
        assert self.may_end.wait(scaled(60.0))


async def test_slow_weight_reading_does_not_disband_a_formed_group(gang: Gang) -> None:
    losses: list[str] = []
    rank, form_timeout_s = SlowRank(), scaled(0.3)
    about = gang.mesh, JOB, rank, gang.directory, scaled(20.0), lambda: losses.append("")
    group = RankGroup(*about, form_timeout_s=form_timeout_s)
    forming = asyncio.create_task(group.form())
    try:
        assert await asyncio.to_thread(rank.begun.wait, scaled(60.0))
        losses.clear()
        await asyncio.sleep(2 * form_timeout_s)
        assert not forming.done() and not losses
    finally:
        rank.may_end.set()
    await forming
    assert not losses and group.generation
    assert len(gang.other.ordered["create_model"]) == 2  # the fixture's group, and this one
    assert gang.other.ordered["create_model"][-1].timeout_s >= STATE_TRANSFER_TIMEOUT_S


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def first_rank_bytes(gang: Gang) -> int:
    tensors = gang.rank.learner.get_tensors().values()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


ABOUT = {"tier": "disk", "job": JOB, "lineage": 0, "version": 1, "ranks": 2}


async def test_all_ranks_sleep_and_wake_unchanged(gang: Gang) -> None:
    gradient = gang.make_gradient()
    await gang.send_gradient(0, gradient)
    await gang.compute.sleep(lambda: dict(ABOUT), Tier.DISK)
    assert first_rank_bytes(gang) == gang.compute.kinds.accelerator_bytes == 0
    await gang.compute.move(Tier.DISK)
    await gang.compute.wake()
    assert gang.other.list_sleep_actions == ["keep", "release", "move", "take", "forget"]
    norm = await gang.compute.apply_gradient(1, 1.0, 1.0)  # with the gradient from before
    assert norm == pytest.approx(float(gradient.double().norm()))


async def test_no_rank_sleeps_if_another_lacks_space(gang: Gang) -> None:
    for _ in range(2):
        gang.other.raises["rest keep"] = StorageFull("the disk is full")
        with pytest.raises(StorageFull):
            await gang.compute.sleep(lambda: dict(ABOUT), Tier.DISK)
        assert gang.other.list_sleep_actions[-2:] == ["keep", "discard"]
        assert gang.has_group and first_rank_bytes(gang) > 0
    await gang.compute.begin_step()


async def test_no_rank_wakes_if_another_lacks_memory(gang: Gang) -> None:
    await gang.compute.sleep(lambda: dict(ABOUT), Tier.DISK)
    gang.other.raises["rest take"] = Refused("no memory")
    with pytest.raises(Refused, match="no memory"):
        await gang.compute.wake()
    assert first_rank_bytes(gang) == 0 and gang.other.list_sleep_actions[-1] == "release"
    gang.other.raises.clear()
    await gang.compute.wake()
    assert first_rank_bytes(gang) > 0


async def test_rank_lost_during_sleep_ends_the_group_on_wake(gang: Gang) -> None:
    await gang.compute.sleep(lambda: dict(ABOUT), Tier.DISK)
    gang.other.raises["rest take"] = Fenced("an order of another generation")
    with pytest.raises(CorruptData, match="has lost a rank"):
        await gang.compute.wake()
    assert not gang.has_group
    gang.other.raises.clear()
    await gang.compute.form_group()
    await gang.compute.begin_step()
