"""An engine merges adapters while that costs less than computing them beside their base."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, LoraConfig, RolloutConfig
from meshrl.services.engine.running import _wish
from meshrl.services.engine.weights.merging import MARGIN, OVERHEAD, Merging, Wish, merging_pays
from tests.unit.common.generation.engines_under_test import StandingClock


@pytest.mark.parametrize("merging", [True, False])
def test_what_is_not_measured_is_merged(merging: bool) -> None:
    assert merging_pays(merging, 0.0, 10.0) and merging_pays(merging, 5.0, 0.0)


def test_it_changes_its_way_for_what_is_clearly_better_alone() -> None:
    even_s = OVERHEAD * 100.0
    assert merging_pays(True, even_s * MARGIN * 0.99, 100.0)
    assert not merging_pays(True, even_s * MARGIN * 1.01, 100.0)
    assert not merging_pays(False, even_s / MARGIN * 1.01, 100.0)
    assert merging_pays(False, even_s / MARGIN * 0.99, 100.0)


def versions(merging: Merging, clock: StandingClock, times: int, merge_s: float) -> list[bool]:
    found = []
    for _ in range(times):
        clock.pass_(10.0)
        found.append(merging.came(f"{clock.monotonic()}"))
        if found[-1]:
            merging.took(merge_s)
    return found


def test_the_way_follows_what_merging_takes() -> None:
    clock = StandingClock()
    assert versions(Merging("auto", clock), clock, 4, 0.5) == [True] * 4
    assert versions(Merging("auto", clock), clock, 4, 5.0) == [True, False, False, False]


def test_a_version_that_is_tried_again_is_no_other_one() -> None:
    clock = StandingClock()
    merging = Merging("auto", clock)
    assert versions(merging, clock, 3, 0.5) == [True] * 3
    clock.pass_(10.0)
    for _ in range(9):
        assert merging.came("again")
        clock.pass_(0.001)
    clock.pass_(10.0)
    assert merging.came("next"), "versions are still seconds apart"


def test_who_is_told_does_not_choose() -> None:
    clock = StandingClock()
    assert versions(Merging("merged", clock), clock, 3, 500.0) == [True] * 3
    assert versions(Merging("beside", clock), clock, 3, 0.001) == [False] * 3


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
    engine: Literal["torch", "sglang"], asked: Wish, does: Wish, tmp_path: Path
) -> None:
    config = JobConfig(rollout=RolloutConfig(engine=engine), lora=LoraConfig(rank=4, engines=asked))
    assert _wish(JobData("job", config, tmp_path, tmp_path)) == does
