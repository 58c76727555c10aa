"""A rank beside the first answers its worker when rank 0 has done with its rows what is wished."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.calls.role import Settle
from meshrl.common.api.ranks import LentGradient, Meeting, RankOrder, Rest
from meshrl.common.base.errors import Refused
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.trainer.ranks.actor import RankActor
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost

GENERATION = 3


class OwnRows(Rank):
    """Has 100 bytes of them, and is in no process group."""

    def __init__(self) -> None:
        self.rank = 1

    @property
    def bytes(self) -> int:
        return 100

    def leave(self) -> None:
        pass


def bench(clock: VirtualClock, random: Random, root: Path = Path("/nowhere")) -> RankActor:
    settings = MeshSettings(redis_url="simulated", run_root=str(root), worker="worker/w1")
    host = SimulatedHost(clock, random.child("host"))
    mesh = alone("rank/j/1", clock, random, host, settings=settings)
    seat = Seat("g0", "g0.0", "j", 1, core=True, rank=1, ranks=2)
    data = JobData("j", JobConfig(name="j"), root, root)
    return RankActor(mesh, data, seat, OwnRows())


def wish(tier: str, epoch: int) -> Settle:
    return Settle(tier, epoch, turns=False, segments="", files="")


def move(tier: str) -> Rest:
    return Rest(GENERATION, "move", tier, {"tier": tier})


def test_it_is_absent_only_once_its_rows_are_gathered(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        rank = bench(clock, random)
        assert (await rank.settle(wish("absent", 1))).accelerator == 0, "it is of no group"
        await rank.stand_by(RankOrder(GENERATION))
        asked = asyncio.create_task(rank.settle(wish("absent", 2)))
        await clock.sleep(60.0)
        assert not asked.done(), "rank 0 has its rows still to gather"
        await rank.rest(move("absent"))
        assert (await asked).accelerator == 100
        await rank.rest(move("accelerator"))
        await rank.settle(wish("accelerator", 3))
        assert rank.published()["tier"] == Tier.ACCELERATOR

    run_virtual(main, limit_s=1e4)


def test_one_that_begins_anew_while_its_gang_sleeps_sleeps_too_until_it_forms_again() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        rank = bench(clock, random)
        settled = await rank.settle(wish("disk", 5))
        assert (settled.accelerator, settled.disk) == (0, 0)
        assert rank.published()["tier"] == Tier.DISK
        woken = asyncio.create_task(rank.settle(wish("accelerator", 6)))
        await clock.sleep(60.0)
        assert not woken.done(), "rank 0 has yet to form the gang"
        await rank.stand_by(RankOrder(GENERATION))
        assert (await woken).accelerator == 100

    run_virtual(main, limit_s=1e4)


def test_it_opens_no_file_that_others_name_but_where_gangs_of_its_host_meet(tmp_path: Path) -> None:
    """Whatever host the process is on that calls itself rank 0, or its worker."""
    run, secret = tmp_path / "run", tmp_path / "secret"
    (run / "mesh" / "gangs").mkdir(parents=True)
    secret.write_bytes(bytes(400))
    link = run / "mesh" / "gangs" / "link"
    link.symlink_to(secret)

    async def main(clock: VirtualClock, random: Random) -> None:
        rank = bench(clock, random, run)
        await rank.stand_by(RankOrder(GENERATION))
        around = run / "mesh" / "gangs" / ".." / ".." / ".." / "secret"
        for path in (secret, link, around, Path("secret")):
            with pytest.raises(Refused, match=r"is not below .*gangs"):
                await rank.keep(LentGradient(GENERATION, 0, 100, path=str(path)))
        with pytest.raises(Refused, match=r"is not below .*gangs"):
            await rank.form(Meeting(GENERATION, str(tmp_path / "new" / "store"), 1.0))
        assert not (tmp_path / "new").exists()
        others: tuple[dict[str, Any], ...] = {"files": str(tmp_path)}, {"segments": "worker/w2"}
        for other in others:
            with pytest.raises(Refused, match="Who says so is not its worker"):
                await rank.settle(replace(wish("disk", 1), **other))

    run_virtual(main, limit_s=1e4)
