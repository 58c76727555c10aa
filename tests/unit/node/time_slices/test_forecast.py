"""Forecast of the next slices: steps repeat, and requests that wait come first."""

from __future__ import annotations

import math

import pytest

from meshrl.common.api.node import KindUse
from meshrl.services.node.slices.fifo import Fifo
from meshrl.services.node.slices.slice_policy import SliceRequest
from meshrl.services.node.slices.slice_queue import SliceQueue

KINDS = {
    "forward_backward": ("parameters", "gradients"),
    "optim_step": ("parameters", "gradients", "optimizer"),
    "sync": ("parameters",),
}
STEP = ["forward_backward"] * 3 + ["optim_step", "sync"]
GAPS = {"forward_backward": 0.1, "optim_step": 0.2, "sync": 0.3}
ROLLOUT_S = 5.0


class Gang:
    """Queue of a gang whose instances run one step after another, each slice for one second."""

    def __init__(self, repeat_gap_s: float = math.inf) -> None:
        self.queue, self.now, self.count = SliceQueue(Fifo()), 0.0, 0
        self.repeat_gap_s = repeat_gap_s  # by the profiles of the instances' kinds

    def request(self, instance: str, function: str) -> SliceRequest:
        self.count += 1
        request = SliceRequest(
            *(f"{instance}/{self.count}", instance, 1, "i", self.count, instance, function, 1.0),
            frozenset({0}),
            KINDS[function],
            repeat_gap_s=self.repeat_gap_s,
        )
        self.queue.enqueue(request, self.now)
        return request

    def run(self, instance: str, function: str) -> None:
        self.now += ROLLOUT_S if function != STEP[0] else GAPS[function]
        request = self.request(instance, function)
        [chosen] = self.queue.choose_waiting(self.now)
        self.queue.begin(chosen.request.ticket, self.now)
        self.now += 1.0
        self.queue.release(request.ticket, self.now)

    def forecast(self) -> dict[tuple[str, str], float]:
        """Return the first expected use of each kind."""
        found: dict[tuple[str, str], float] = {}
        for use in self.queue.forecast_uses(self.now):
            for kind in use.kinds:
                found.setdefault((use.instance, kind), use.starts_in_s)
        return found


def test_instance_without_a_repeated_function_has_no_forecast() -> None:
    gang = Gang()
    gang.run("a", "optim_step")
    assert gang.forecast() == {}


def test_forecast_names_the_time_of_each_kind_from_the_last_step() -> None:
    gang = Gang()
    for function in STEP * 2:
        gang.run("a", function)
    assert gang.forecast() == {
        ("a", "parameters"): pytest.approx(0.1),
        ("a", "gradients"): pytest.approx(0.1),
        ("a", "optimizer"): pytest.approx(0.1 + 1.0 + 1.1 + 1.1 + ROLLOUT_S),
    }
    gang.run("a", STEP[0])
    gang.run("a", STEP[0])
    assert gang.forecast()["a", "optimizer"] == pytest.approx(0.1 + 1.0 + ROLLOUT_S)
    gang.run("a", STEP[0])
    assert gang.forecast()["a", "optimizer"] == pytest.approx(ROLLOUT_S)


def test_waiting_requests_follow_the_holder_in_the_order_of_the_policy() -> None:
    gang = Gang()
    for function in STEP * 2:
        gang.run("a", function)
        gang.run("b", function)
    gang.request("a", STEP[0])
    [chosen] = gang.queue.choose_waiting(gang.now)
    gang.queue.begin(chosen.request.ticket, gang.now)
    gang.request("b", STEP[0])
    assert gang.queue.list_computing() == [KindUse("a", list(KINDS[STEP[0]]))]
    found = gang.forecast()
    assert found["b", "gradients"] == 1.0  # after the holder
    assert found["b", "parameters"] == 1.0 < found["a", "gradients"]
    assert found["a", "optimizer"] < found["b", "optimizer"]
    gang.queue.drop_instance("b")
    assert {instance for instance, _ in gang.forecast()} == {"a"}


def test_first_pair_of_slices_of_a_known_kind_is_forecast_by_its_profile() -> None:
    gang = Gang(repeat_gap_s=0.4)
    gang.request("a", STEP[0])
    [chosen] = gang.queue.choose_waiting(gang.now)
    gang.queue.begin(chosen.request.ticket, gang.now)
    repeated = gang.queue.forecast_uses(gang.now)
    assert repeated == [KindUse("a", list(KINDS[STEP[0]]), 1.0 + 0.4)]  # while the first one runs
    gang.now += 1.0
    gang.queue.release(chosen.request.ticket, gang.now)
    assert gang.forecast() == {("a", "parameters"): 0.4, ("a", "gradients"): 0.4}
    gang.run("a", STEP[0])  # its own gap is known now
    assert gang.forecast()["a", "gradients"] == pytest.approx(GAPS[STEP[0]])


def test_known_gaps_order_the_first_prefetches() -> None:
    gang = Gang()
    for instance, gap_s in {"a": 50.0, "b": 5.0, "c": math.inf}.items():
        gang.repeat_gap_s = gap_s
        gang.run(instance, STEP[0])
    expected = gang.queue.predict_next(None, gang.now)
    assert expected is not None and expected.instance == "b"
    assert [use.instance for use in gang.queue.forecast_uses(gang.now)] == ["b", "a"]
