"""An engine merges adapters while that costs less than computing them beside their base."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, LoraConfig, RolloutConfig
from meshrl.services.engine.role_process import _choose_adapter_mode
from meshrl.services.engine.weights.merge_policy import (
    OVERHEAD_SHARE,
    SWITCH_MARGIN,
    AdapterMode,
    MergePolicy,
    is_merging_worthwhile,
)
from tests.unit.common.generation.engines_under_test import StandingClock


@pytest.mark.parametrize("merging", [True, False])
def test_what_is_not_measured_is_merged(merging: bool) -> None:
    assert is_merging_worthwhile(merging, 0.0, 10.0) and is_merging_worthwhile(merging, 5.0, 0.0)


def test_it_changes_its_way_for_what_is_clearly_better_alone() -> None:
    even_s = OVERHEAD_SHARE * 100.0
    assert is_merging_worthwhile(True, even_s * SWITCH_MARGIN * 0.99, 100.0)
    assert not is_merging_worthwhile(True, even_s * SWITCH_MARGIN * 1.01, 100.0)
    assert not is_merging_worthwhile(False, even_s / SWITCH_MARGIN * 1.01, 100.0)
    assert is_merging_worthwhile(False, even_s / SWITCH_MARGIN * 0.99, 100.0)


def versions(merging: MergePolicy, clock: StandingClock, times: int, merge_s: float) -> list[bool]:
    found = []
    for _ in range(times):
        clock.pass_(10.0)
        found.append(merging.observe_version(f"{clock.monotonic()}"))
        if found[-1]:
            merging.record_merge_time(merge_s)
    return found


def test_the_way_follows_what_merging_takes() -> None:
    clock = StandingClock()
    assert versions(MergePolicy("auto", clock), clock, 4, 0.5) == [True] * 4
    assert versions(MergePolicy("auto", clock), clock, 4, 5.0) == [True, False, False, False]


def test_a_version_that_is_tried_again_is_no_other_one() -> None:
    clock = StandingClock()
    merging = MergePolicy("auto", clock)
    assert versions(merging, clock, 3, 0.5) == [True] * 3
    clock.pass_(10.0)
    for _ in range(9):
        assert merging.observe_version("again")
        clock.pass_(0.001)
    clock.pass_(10.0)
    assert merging.observe_version("next"), "versions are still seconds apart"


def test_who_is_told_does_not_choose() -> None:
    clock = StandingClock()
    assert versions(MergePolicy("merged", clock), clock, 3, 500.0) == [True] * 3
    assert versions(MergePolicy("beside", clock), clock, 3, 0.001) == [False] * 3


@pytest.mark.parametrize(
    ("engine", "asked", "does"),
    [
        ("torch", "auto", "auto"),
        ("torch", "beside", "beside"),
        ("sglang", "auto", "merged"),
        ("sglang", "merged", "merged"),
        ("sglang", "beside", "beside"),
    ],
)
def test_an_sglang_server_that_was_started_without_adapters_is_never_tried_with_them(
    engine: Literal["torch", "sglang"], asked: AdapterMode, does: AdapterMode, tmp_path: Path
) -> None:
    config = JobConfig(
        rollout=RolloutConfig(engine=engine), lora=LoraConfig(rank=4, engine_mode=asked)
    )
    assert _choose_adapter_mode(JobData("job", config, tmp_path, tmp_path)) == does
