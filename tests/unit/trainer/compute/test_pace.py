"""A core at a declared pace: the same numbers, no sooner than the accelerator would have them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.job.pace import TRAINING_PROFILES, TrainingPace, training_profile
from meshrl.services.trainer.compute.piece_runner import Padding, PieceRunner
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.trainer.ranks.batches_under_test import BINS, bins_of_step, fresh_learner

PACE = TrainingPace(tokens_per_s=100.0, update_s=2.0)


def local(clock: VirtualClock, random: Random, pace: TrainingPace | None = None) -> Compute:
    mesh = alone("trainer/j", clock, random, SimulatedHost(clock, random.child("host")))
    return Compute(mesh, "j", Rank.alone(fresh_learner("plain")), PieceRunner(mesh, pace=pace))


def test_a_step_takes_what_the_pace_says_and_makes_the_same_weights() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        plain, paced = local(clock, random), local(clock, random, PACE)
        bins = bins_of_step(0)
        weights = []
        for compute in (plain, paced):
            began = clock.monotonic()
            await compute.begin()
            for index, bin in enumerate(bins):
                await compute.compute(index, [bin])
            await compute.apply(BINS, 1.0, 1.0)
            took = clock.monotonic() - began
            learner = compute.alone
            assert learner is not None
            weights.append(learner.copied_weights())
        tokens = sum(len(bin.tokens) for bin in bins)
        assert took == pytest.approx(tokens / 100.0 + 2.0, abs=1e-6)
        for name, tensor in weights[0].items():
            assert torch.equal(tensor, weights[1][name])
        assert paced.late == {"paced": BINS + 1, "late": 0}
        began = clock.monotonic()
        await paced.score(bins, "logprobs")
        assert clock.monotonic() - began == pytest.approx(tokens / 300.0, abs=1e-6)

    run_virtual(main, limit_s=3600.0)


def test_a_piece_that_the_host_is_too_slow_for_counts_as_late() -> None:
    async def main(clock: Clock, random: Random) -> None:
        padding = Padding(clock)
        for lasts_s in (0.2, 1.05, 1.2):
            await padding.take(1.0, partial(clock.sleep, lasts_s))
        assert padding.late == {"paced": 3, "late": 1}

    run_virtual(main)


def test_a_pace_of_training_is_a_profile_or_two_numbers() -> None:
    assert training_profile("4000/150") == TrainingPace(4000.0, 0.15)
    fast, slow = TRAINING_PROFILES["h100-7b"], TRAINING_PROFILES["a100-7b"]
    assert 1e3 < slow.tokens_per_s < fast.tokens_per_s < 1e5
    for text in ("tpu", "4000", "0/10", "nan/10", "4000/-1", "4000/inf"):
        with pytest.raises(ConfigError, match="there is no pace"):
            training_profile(text)
