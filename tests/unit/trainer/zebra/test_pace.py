"""What tasks and transfers take on a rank that stands for a declared accelerator."""

from __future__ import annotations

import pytest

from common.zebra.kinds import declared_profile
from common.zebra.schedule import Work
from services.trainer.zebra.pace import ZebraPace
from sim.zebra.setups import MODELS

PROFILE = declared_profile(MODELS["D1"].shape, "A40", "V100", link_bytes_per_s=1e9)


def test_tasks_take_what_the_kind_takes_times_the_scale_and_more_on_the_way_back() -> None:
    pace = ZebraPace(PROFILE, PROFILE.fast, tokens=64.0, scale=100.0)
    assert PROFILE.fast.attention is not None and PROFILE.fast.head is not None
    forward = pace.task_s(Work.ATTENTION, False, [64, 32])
    expected = PROFILE.fast.attention.of(4096) + PROFILE.fast.attention.of(2048)
    assert forward == pytest.approx(100.0 * expected)
    backward = pace.task_s(Work.ATTENTION, True, [64, 32])
    assert backward == pytest.approx(PROFILE.backward * forward)
    slow = ZebraPace(PROFILE, PROFILE.slow, tokens=64.0, scale=100.0)
    hosted = pace.task_s(Work.HOSTED, False, [8, 0, 16])
    assert hosted == pytest.approx(100.0 * PROFILE.fast.experts.of(24 * 64))
    assert slow.task_s(Work.EXPERTS, False, [24]) == pytest.approx(hosted / 0.8)
    head = pace.head_s(64, goes_back=False)
    assert head == pytest.approx(100.0 * PROFILE.fast.head.of(4096))
    assert pace.head_s(64, goes_back=True) == pytest.approx(3 * head)


def test_transfers_take_their_bytes_over_the_link() -> None:
    pace = ZebraPace(PROFILE, PROFILE.slow, tokens=2.0, scale=10.0)
    expected = PROFILE.link_latency_s + 100 * 2 * PROFILE.row_bytes / 1e9
    assert pace.transfer_s(100) == pytest.approx(10.0 * expected)


def test_what_takes_a_tenth_longer_is_late() -> None:
    pace = ZebraPace(PROFILE, PROFILE.fast)
    for took_s in (1.0, 1.05, 1.3):
        pace.took(1.0, took_s)
    assert (pace.paced, pace.late) == (3, 1)
