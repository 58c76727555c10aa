"""Algorithm 1 of RLBoost: seeding times and engines elsewhere, in a closed-form model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.planner.policies.offload import (
    EFFICIENCY,
    LOWEST_REMOTE,
    MOST_REMOTE,
    EnginePrices,
    OffloadState,
    StepFigures,
    choose_most_remote,
    predict_step_s,
    set_remote,
    update_offload,
)

times = st.floats(0.0, 1e4)
engines = st.integers(1, 16)
works = st.floats(1.0, 1e4)


@dataclass(frozen=True)
class ModelJob:
    """Job whose engines are equal and never wait: a step is its seeding, gradients and rollout."""

    work_s: float  # of rollout, in engine seconds
    training_s: float
    seeding: int

    def run_step(self, seed_s: float | None, remote: int) -> StepFigures:
        """Run a step; without other engines, and before it is measured, seeding has no end."""
        alone_s = self.work_s / (self.seeding + remote)
        seed_s = alone_s if seed_s is None or not remote else min(seed_s, alone_s)
        rollout_s = alone_s
        if remote and seed_s < alone_s:
            rollout_s = (self.work_s - seed_s * self.seeding) / remote
        step_s = max(rollout_s, seed_s + self.training_s)
        return StepFigures(
            trainer_idle_s=step_s - seed_s - self.training_s,
            remote_idle_s=step_s - rollout_s,
            training_s=self.training_s,
            step_s=step_s,
            seeding=self.seeding,
            remote=remote,
        )

    def find_best_step_s(self, remote: int) -> float:
        return predict_step_s(self.work_s, self.training_s, self.seeding, remote)


jobs = st.builds(ModelJob, work_s=works, training_s=st.floats(0.5, 1e3), seeding=engines)


@given(
    figures=st.builds(
        StepFigures,
        trainer_idle_s=times,
        remote_idle_s=times,
        training_s=times,
        step_s=times,
        seeding=st.integers(0, 16),
        remote=st.floats(0.0, 16.0),
    ),
    state=st.builds(
        OffloadState,
        seed_s=st.none() | times,
        most_remote=st.none() | engines,
        known_seed_s=st.dictionaries(engines.map(str), times, max_size=3),
        remote=st.integers(0, 16),
        work_s=times,
        efficiency=st.floats(0.1, 1.0),
        training_s=times,
        seeding=st.integers(0, 16),
    ),
    remote=st.integers(0, 16),
    remembers=st.booleans(),
)
def test_times_are_within_a_step_and_numbers_are_not_negative(
    figures: StepFigures, state: OffloadState, remote: int, remembers: bool
) -> None:
    found = update_offload(state, figures, remote, remembers=remembers)
    if figures.step_s <= 0:
        assert found == state
        return
    assert found.most_remote is not None and found.most_remote >= 0
    assert found.seed_s is not None and found.seed_s >= 0
    if figures.remote:
        assert found.seed_s <= figures.step_s
    other = set_remote(found, (remote + 1) % 17)
    assert other.seed_s is not None and other.seed_s >= 0


@given(job=jobs, remote=engines, factor=st.sampled_from([0.25, 4.0]))
def test_any_first_time_converges_within_ten_steps(
    job: ModelJob, remote: int, factor: float
) -> None:
    best_s = job.find_best_step_s(remote)
    state = OffloadState(seed_s=factor * max(best_s - job.training_s, 1.0), remote=remote)
    for _ in range(10):
        state = update_offload(state, job.run_step(state.seed_s, remote), remote)
    assert job.run_step(state.seed_s, remote).step_s <= 1.05 * best_s + 0.05


@given(job=jobs, remote=engines)
def test_job_starts_without_a_seeding_time(job: ModelJob, remote: int) -> None:
    state = OffloadState()
    for _ in range(11):
        state = update_offload(state, job.run_step(state.seed_s, remote), remote)
    assert job.run_step(state.seed_s, remote).step_s <= 1.05 * job.find_best_step_s(remote) + 0.05


@given(job=jobs)
def test_without_engines_elsewhere_the_core_seeds_for_the_whole_step(job: ModelJob) -> None:
    figures = job.run_step(None, 0)
    state = update_offload(OffloadState(), figures, 0)
    assert state.seed_s == figures.step_s == pytest.approx(job.find_best_step_s(0))
    assert update_offload(state, figures, 0).seed_s == state.seed_s


@given(job=jobs)
def test_rollout_alone_fits_into_the_gradients_with_the_most_engines(job: ModelJob) -> None:
    figures = job.run_step(None, 0)
    most = choose_most_remote(job.work_s, EFFICIENCY, figures, EnginePrices())
    assert most == MOST_REMOTE or job.work_s <= most * job.training_s * (1 + 1e-6) + 1e-6
    if most > LOWEST_REMOTE:
        assert job.work_s > (most - 1) * job.training_s * (1 - 1e-6)


@given(job=jobs, prices=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=5))
def test_fewer_engines_are_bought_at_a_higher_price_and_none_that_does_not_pay(
    job: ModelJob, prices: list[float]
) -> None:
    figures = job.run_step(None, 0)
    found = [
        choose_most_remote(job.work_s, EFFICIENCY, figures, EnginePrices(float(job.seeding), one))
        for one in sorted(prices)
    ]
    assert found == sorted(found, reverse=True)
    alone = job.seeding * predict_step_s(EFFICIENCY * job.work_s, job.training_s, job.seeding, 0)
    for price, most in zip(sorted(prices), found, strict=True):
        cost = (job.seeding + most * price) * job.find_best_step_s(most)
        assert not most or cost <= alone * (1 + 1e-9)
    full = EnginePrices(float(job.seeding), 1.0 / EFFICIENCY + 0.01)
    assert choose_most_remote(job.work_s, EFFICIENCY, figures, full) == 0


@given(job=jobs, before=engines, after=engines)
def test_another_number_of_engines_starts_near_its_balance(
    job: ModelJob, before: int, after: int
) -> None:
    state = OffloadState(seed_s=max(job.find_best_step_s(before) - job.training_s, 0.0))
    state = update_offload(state, job.run_step(state.seed_s, before), before)
    moved = set_remote(state, after)
    if state.seed_s and before != after:
        best_s = job.find_best_step_s(after)
        assert job.run_step(moved.seed_s, after).step_s <= 1.05 * best_s + 0.05
    back = set_remote(moved, before)
    if before != after:
        known = state.known_seed_s.get(str(before))
        assert known is None or back.seed_s == known


def test_settled_time_of_a_number_of_engines_is_remembered() -> None:
    job = ModelJob(work_s=2000.0, training_s=100.0, seeding=8)
    state = OffloadState(seed_s=job.find_best_step_s(4) - job.training_s, remote=4)
    state = update_offload(state, job.run_step(state.seed_s, 4), 4)
    settled_s = state.seed_s
    assert state.known_seed_s == {"4": settled_s}
    figures = replace(job.run_step(settled_s, 4), remote=3.0)
    gone = update_offload(state, figures, 2)
    forgets = update_offload(state, figures, 2, remembers=False)
    assert gone.seed_s != forgets.seed_s and set_remote(gone, 4).seed_s == settled_s
