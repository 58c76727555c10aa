"""Membership of hybrids, and failed sleep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.calls.role import SetTier
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Fenced
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.services.trainer.hybrids.hybrid import Hybrid
from meshrl.services.trainer.hybrids.membership import HybridMembership
from meshrl.services.trainer.initialization.initial_weights import create_learner
from meshrl.services.trainer.learner.learner import Learner
from meshrl.sim.virtual_loop import run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.tiers.bench import make_config


def test_hybrid_leases_only_rounds_of_its_loaded_version() -> None:
    pool = HybridMembership()
    generation = pool.join("g1", 0.0)
    assert pool.get_stages() == {"g1": "requested"}
    assert not pool.can_lease_round("g1", generation, "", "v1", 1.0)
    assert pool.get_stages() == {"g1": "fetching"}
    assert pool.can_lease_round("g1", generation, "v1", "v1", 2.0)
    assert pool.get_stages() == {"g1": "ready"}
    pool.record_lease("g1")
    assert pool.can_lease_round("g1", generation, "v1", "v1", 3.0)
    assert pool.get_stages() == {"g1": "active"}
    assert not pool.can_lease_round("g1", generation, "v1", "v2", 4.0)
    assert pool.get_stages() == {"g1": "fetching"}


def test_new_version_is_available_before_a_hybrid_requests_it() -> None:
    pool = HybridMembership()
    generation = pool.join("g1", 0.0)
    assert pool.can_lease_round("g1", generation, "v1", "v1", 1.0)
    pool.require_weights("v1")
    assert pool.get_stages() == {"g1": "ready"}
    pool.require_weights("v2")
    assert pool.get_stages() == {"g1": "fetching"}


def test_hybrid_stays_ready_between_steps() -> None:
    pool = HybridMembership()
    generation = pool.join("g1", 0.0)
    assert not pool.can_lease_round("g1", generation, "v1", "", 1.0)
    assert pool.get_stages() == {"g1": "ready"}


def test_report_of_an_earlier_join_is_rejected() -> None:
    pool = HybridMembership()
    first = pool.join("g1", 0.0)
    second = pool.join("g1", 1.0)
    with pytest.raises(Fenced):
        pool.can_lease_round("g1", first, "v1", "v1", 2.0)
    with pytest.raises(Fenced):
        pool.record_result("g1", first, 2.0)
    assert not pool.leave("g1", first)
    assert pool.can_lease_round("g1", second, "v1", "v1", 2.0)
    assert pool.leave("g1", second)
    with pytest.raises(Fenced):
        pool.record_result("g1", second, 3.0)


def test_silent_hybrid_times_out() -> None:
    pool = HybridMembership(max_silence_s=10.0)
    generation = pool.join("g1", 0.0)
    pool.join("g2", 5.0)
    assert pool.remove_silent(9.0) == []
    assert pool.remove_silent(12.0) == ["g1"]
    assert pool.get_stages() == {"g2": "requested"}
    with pytest.raises(Fenced):
        pool.record_result("g1", generation, 13.0)


actions = st.tuples(
    st.sampled_from(["join", "ask", "give", "leave", "wait"]),
    st.sampled_from(["g1", "g2"]),
    st.integers(0, 6),
)


@given(st.lists(actions, max_size=40))
def test_only_the_last_join_of_a_gang_counts(history: list[tuple[str, str, int]]) -> None:
    pool = HybridMembership(max_silence_s=3.0)
    live_rounds: dict[str, tuple[int, float]] = {}
    now, joins = 0.0, 0
    for action, gang, number in history:
        if action == "join":
            joins += 1
            assert pool.join(gang, now) == joins
            live_rounds[gang] = joins, now
        elif action == "wait":
            now += number
            failed = {g for g, (_, time_s) in live_rounds.items() if now - time_s > 3.0}
            assert set(pool.remove_silent(now)) == failed
            live_rounds = {g: found for g, found in live_rounds.items() if g not in failed}
        elif action == "leave":
            ends = gang in live_rounds and live_rounds[gang][0] == number
            assert pool.leave(gang, number) == ends
            if ends:
                del live_rounds[gang]
        elif gang in live_rounds and live_rounds[gang][0] == number:
            if action == "ask":
                assert pool.can_lease_round(gang, number, "v", "v", now)
            else:
                pool.record_result(gang, number, now)
            live_rounds[gang] = number, now
        else:
            with pytest.raises(Fenced):
                if action == "ask":
                    pool.can_lease_round(gang, number, "v", "v", now)
                else:
                    pool.record_result(gang, number, now)
        assert set(pool.get_stages()) == set(live_rounds)


class FailingLearner:
    """Learner whose first `fails` calls of `get_parameters` raise an error."""

    def __init__(self, learner: Learner, fails: int) -> None:
        self._learner, self._fails = learner, fails

    def get_parameters(self) -> dict[str, torch.Tensor]:
        self._fails -= 1
        if self._fails >= 0:
            raise RuntimeError("CUDA error: an illegal memory access")
        return self._learner.get_parameters()

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


@story_on(partial(run_virtual, limit_s=100.0), given=2)
async def test_hybrid_that_fails_to_sleep_stays_awake_and_can_sleep_later(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    def desired_tier(tier: str, epoch: int) -> SetTier:
        return SetTier(tier, epoch, time_sliced=False, segment_owner="", offload_dir="")

    make_tokenizer(tmp_path)
    data = JobData("j", make_config("plain"), tmp_path, tmp_path)
    mesh = alone("hybrid/g0.0", clock, random, SimulatedHost(clock, random.child("host")))
    learner = FailingLearner(create_learner(data), fails=1)
    hybrid = Hybrid(mesh, data, Placement("g0", "g0.0", "j", 1), cast(Learner, learner))
    tiers = hybrid.tiers
    with pytest.raises(RuntimeError, match="illegal memory"):
        await tiers.set_tier(desired_tier("memory", 1))
    assert tiers.tier == "accelerator" and hybrid.kinds.accelerator_bytes > 0
    async with clock.timeout(1.0, "the learner, which is free"), hybrid._use_learner():
        pass
    async with clock.timeout(1.0, "its sleep"):
        assert (await tiers.set_tier(desired_tier("memory", 2))).accelerator_bytes == 0
    assert (await tiers.set_tier(desired_tier("accelerator", 3))).accelerator_bytes > 0
    hybrid.outbox.close()
