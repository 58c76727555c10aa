"""Membership of hybrids, the board of a step's rounds, and failed sleep."""

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
from meshrl.services.trainer.hybrids.round_board import MAX_ROUNDS_AHEAD, RoundBoard
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


def create_board(count: int) -> RoundBoard:
    board = RoundBoard()
    board.add_rounds(count)
    board.is_closed = True
    return board


def test_core_and_hybrids_lease_from_the_front() -> None:
    board = create_board(4)
    assert board.take_round(now_s=0.0) == 0
    assert board.lease_round("g1", expires_s=5.0) == 1
    assert board.lease_round("g2", expires_s=5.0) == 2
    assert board.take_round(now_s=0.0) == 3
    assert board.take_round(now_s=0.0) is None
    assert board.lease_round("g1", expires_s=5.0) is None


def test_expired_lease_is_computed_by_the_core_and_counted_once() -> None:
    board = create_board(1)
    assert board.lease_round("g1", expires_s=5.0) == 0
    assert board.take_round(now_s=4.0) is None
    assert board.next_expiry() == 5.0
    assert board.take_round(now_s=5.0) == 0
    assert board.complete_round(0)
    assert not board.complete_round(0)
    assert board.is_complete


def test_rounds_of_a_departed_hybrid_are_free() -> None:
    board = create_board(2)
    assert board.lease_round("g1", expires_s=5.0) == 0
    assert board.release_rounds("g1") and not board.release_rounds("g1")
    assert board.lease_round("g2", expires_s=5.0) == 0


def test_late_round_is_leased_first_and_limits_the_lookahead() -> None:
    board = RoundBoard()
    board.add_rounds(50)
    assert board.lease_round("silent", expires_s=5.0) == 0
    leased_rounds = []
    while (index := board.take_round(now_s=1.0)) is not None:
        leased_rounds.append(index)
        board.complete_round(index)
    assert (
        leased_rounds == list(range(1, MAX_ROUNDS_AHEAD))
        and board.lease_round("g2", expires_s=9.0) is None
    )
    assert board.take_round(now_s=5.0) == 0
    board.complete_round(0)
    assert board.take_round(now_s=5.0) == MAX_ROUNDS_AHEAD


def test_unsaved_result_is_computed_again() -> None:
    board = create_board(1)
    assert board.lease_round("g1", expires_s=5.0) == 0
    assert board.claim_result(0) and not board.claim_result(0) and not board.is_complete
    assert board.take_round(now_s=9.0) is None
    board.release_claim(0)
    assert board.take_round(now_s=1.0) == 0 and board.complete_round(0) and board.is_complete


def test_board_is_incomplete_until_the_last_round_is_known() -> None:
    board = RoundBoard()
    board.add_rounds(1)
    assert board.take_round(0.0) == 0 and board.complete_round(0) and not board.is_complete
    board.add_rounds(1)
    board.is_closed = True
    assert (
        not board.is_complete
        and board.take_round(0.0) == 1
        and board.complete_round(1)
        and board.is_complete
    )


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("tldxrg"), st.integers(0, 2))))
def test_any_event_order_completes_each_round_once(
    count: int, events: list[tuple[str, int]]
) -> None:
    board = RoundBoard()
    board.add_rounds(count)
    out: dict[str, int] = {}
    counted: list[int] = []
    now = 0.0

    def done(index: int) -> None:
        if board.complete_round(index):
            counted.append(index)

    for kind, worker_name in events:
        now += 1.0
        gang = f"g{worker_name}"
        if (
            kind == "l"
            and gang not in out
            and (leased := board.lease_round(gang, now + 3)) is not None
        ):
            out[gang] = leased
        elif kind == "d" and gang in out:
            done(out.pop(gang))
        elif kind == "x":
            out.pop(gang, None)
        elif kind == "r":
            out.pop(gang, None)
            board.release_rounds(gang)
        elif kind == "g":
            board.add_rounds(1)
        elif kind == "t" and (leased_rounds := board.take_round(now)) is not None:
            done(leased_rounds)
    board.is_closed = True
    while (leased_rounds := board.take_round(now + 1e9)) is not None:
        done(leased_rounds)
    assert board.is_complete and sorted(counted) == list(range(board.round_count))


class FailingLearner:
    """Learner whose first `fails` calls of `get_tensors` raise an error."""

    def __init__(self, learner: Learner, fails: int) -> None:
        self._learner, self._fails = learner, fails

    def get_tensors(self) -> dict[str, torch.Tensor]:
        self._fails -= 1
        if self._fails >= 0:
            raise RuntimeError("CUDA error: an illegal memory access")
        return self._learner.get_tensors()

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
    assert tiers.tier == "accelerator" and hybrid.size_bytes > 0
    async with clock.timeout(1.0, "the learner, which is free"), hybrid._use_learner():
        pass
    async with clock.timeout(1.0, "its sleep"):
        assert (await tiers.set_tier(desired_tier("memory", 2))).accelerator_bytes == 0
    assert (await tiers.set_tier(desired_tier("accelerator", 3))).accelerator_bytes > 0
    hybrid.outbox.close()
