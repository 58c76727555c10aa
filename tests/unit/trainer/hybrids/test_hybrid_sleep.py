"""A hybrid that cannot sleep, for whatever reason, goes on."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from meshrl.common.api.calls.role import Settle
from meshrl.common.base.clock import Clock
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.hybrids.hybrid import Hybrid
from meshrl.services.trainer.initial.beginning import fresh_learner
from meshrl.sim.loop import run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.tiers.bench import configured


class Stubborn:
    """A learner whose memory cannot be looked through as often as is said."""

    def __init__(self, learner: Learner, fails: int) -> None:
        self._learner, self._fails = learner, fails

    def tensors(self) -> dict[str, torch.Tensor]:
        self._fails -= 1
        if self._fails >= 0:
            raise RuntimeError("CUDA error: an illegal memory access")
        return self._learner.tensors()

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


def test_a_hybrid_whose_memory_cannot_be_given_back_is_awake_and_can_sleep_later(
    tmp_path: Path,
) -> None:
    def wish(tier: str, epoch: int) -> Settle:
        return Settle(tier, epoch, turns=False, segments="", files="")

    async def main(clock: Clock, random: Random) -> None:
        make_tokenizer(tmp_path)
        data = JobData("j", configured("plain"), tmp_path, tmp_path)
        mesh = alone("hybrid/g0.0", clock, random, SimulatedHost(clock, random.child("host")))
        learner = Stubborn(fresh_learner(data), fails=1)
        hybrid = Hybrid(mesh, data, Seat("g0", "g0.0", "j", 1), cast(Learner, learner))
        tiers = hybrid.tiers
        with pytest.raises(RuntimeError, match="illegal memory"):
            await tiers.settle(wish("memory", 1))
        assert tiers.tier == "accelerator" and hybrid.bytes > 0
        async with clock.timeout(1.0, "the learner, which is free"), hybrid._computing():
            pass
        async with clock.timeout(1.0, "its sleep"):
            assert (await tiers.settle(wish("memory", 2))).accelerator == 0
        assert (await tiers.settle(wish("accelerator", 3))).accelerator > 0
        hybrid.outbox.close()

    run_virtual(main, limit_s=100.0)
