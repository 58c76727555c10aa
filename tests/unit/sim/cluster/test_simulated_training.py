"""The staleness gate and the steps of a simulated job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.training import SimTraining


class Costs:
    """A token a second, and half a second of an update."""

    def replicas(self, workers: int, core: bool) -> int:
        return workers

    def update_s(self) -> float:
        return 0.5

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        return tokens


def training(agenda: Agenda, steps: int = 4, staleness: int = 1) -> SimTraining:
    return SimTraining(agenda, Costs(), 2, 1, staleness, steps, lambda: None)


def end_group(job: SimTraining, number: int, length: float) -> None:
    job.ended(number, 0, length)


def test_gradients_are_computed_while_further_groups_are_waited_for() -> None:
    agenda = Agenda()
    job = training(agenda)
    job.attend("core", 1)
    first, second = job.admit(2)
    agenda.at(1.0, partial(end_group, job, first.number, 4.0))
    agenda.at(10.0, partial(end_group, job, second.number, 3.0))
    agenda.run(100.0, lambda: False)
    assert job.ended_s == [13.5]  # not 17.5: the first was computed by then
    work = job.work
    assert (work.work_s, work.wait_s, work.busy_s, work.tokens) == (7.0, 10.0, 3.5, 7.0)


def test_pieces_go_to_who_is_free_first() -> None:
    agenda = Agenda()
    job = training(agenda)
    job.attend("core", 1)
    job.attend("helper", 1)
    for group in job.admit(2):
        job.ended(group.number, 0, 4.0)
    agenda.run(100.0, lambda: False)
    assert job.ended_s == [4.5]


def test_the_gate_admits_what_is_trained_in_time() -> None:
    agenda = Agenda()
    job = training(agenda, steps=3)
    assert [g.number for g in job.admit(99)] == [0, 1, 2, 3] and not job.admit(1)
    job.attend("core", 1)
    job.ended(0, 0, 1.0)
    job.ended(1, 0, 1.0)
    agenda.run(100.0, lambda: False)
    assert job.version == 1 and [g.number for g in job.admit(99)] == [4, 5]
    assert not job.admit(1), "groups beyond the last step are not opened"


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000), staleness=st.integers(0, 3), workers=st.integers(1, 3))
def test_all_steps_are_made_of_groups_that_are_young_enough(
    seed: int, staleness: int, workers: int
) -> None:
    random, agenda = Random(seed), Agenda()
    trained: list[int] = []  # versions between a group's first token and its step

    class Watched(SimTraining):
        def _commit(self, step: int) -> None:
            trained.extend(self.version - group.oldest for group in self._leased)
            super()._commit(step)

    def opens() -> None:
        for group in job.admit(8):
            ends_s, oldest = random.expovariate(0.2), job.version
            number = group.number

            def end(number: int = number, oldest: int = oldest) -> None:
                job.ended(number, oldest, random.random())

            agenda.after(ends_s, end)

    def look() -> None:
        opens()
        agenda.after(0.1, look)

    job = Watched(agenda, Costs(), 2, 1, staleness, 12, opens)
    job.attend("core", workers)
    look()
    agenda.run(1e5, lambda: job.over)
    assert job.over and len(trained) == 24
    assert max(trained) <= staleness


def test_a_step_whose_core_has_ended_is_made_of_the_same_groups_by_the_next_one() -> None:
    agenda = Agenda()
    made: list[float] = []
    job = SimTraining(agenda, Costs(), 2, 1, 2, 2, lambda: made.append(agenda.now_s))
    job.attend("core", 1)
    for group in job.admit(2):
        job.ended(group.number, 0, 100.0)
    agenda.run(0.01, lambda: False)
    job.lose()
    job.dismiss("core")
    agenda.run(50.0, lambda: False)
    assert made == [] and job.version == 0
    agenda.at(60.0, lambda: job.attend("other", 2))
    agenda.run(400.0, lambda: bool(made))
    assert job.version == 1 and made == [60.0 + 100.0 + 0.5], "what it had begun is nobody's"


def test_accelerators_that_generate_train_when_all_groups_are_there() -> None:
    agenda = Agenda()
    made: list[float] = []
    job = SimTraining(agenda, Costs(), 2, 1, 0, 1, lambda: made.append(agenda.now_s), switch_s=5.0)
    job.attend("core", 1)
    first, other = job.admit(8)
    job.ended(first.number, 0, 1.0)
    agenda.at(10.0, partial(end_group, job, other.number, 1.0))
    agenda.run(100.0, lambda: job.over)
    alone = sum(Costs().bins_s([1.0])) * 2 + Costs().update_s()
    assert made == [pytest.approx(15.0 + alone)]
