"""Estimates of remaining trajectory length, and routing by them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.files.json_lines import encode_row
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.routing.cmlfq import BucketScheduler
from meshrl.services.rollout.routing.degree_buckets import MIN_PAST, MeasuredEngine, build_buckets
from meshrl.services.rollout.routing.length_history import FILE_NAME, LengthHistory
from meshrl.services.rollout.routing.length_trees import (
    MIN_VISITS,
    NODE_SAMPLES,
    LengthTrees,
    PastTrajectory,
    classify_tool_return,
)
from meshrl.services.rollout.routing.queue_policy import LengthBucket, assign_buckets

tools = st.sampled_from(
    [("search", "small", "success"), ("search", "large", "success"), ("run", "small", "failure")]
)
pasts = st.lists(
    st.builds(
        lambda prompt, states, steps: make_past(prompt, states, steps),
        st.integers(0, 2),
        st.lists(tools, max_size=4),
        st.lists(st.integers(0, 50), min_size=5, max_size=5),
    ),
    max_size=60,
)


def make_past(prompt: int, states: list[Any], steps: list[int]) -> PastTrajectory:
    """Build a trajectory that samples `steps[i]` tokens before each tool return, and the last one
    after them.
    """
    sampled, returns = 0, []
    for state, step in zip(states, steps, strict=False):
        sampled += step
        returns.append((state, sampled))
    return PastTrajectory(prompt, tuple(returns), sampled + steps[len(states)])


@given(pasts, st.lists(tools, min_size=1, max_size=4), st.integers(0, 2))
def test_estimate_counts_past_trajectories(
    history: list[PastTrajectory], path: list[Any], prompt: int
) -> None:
    """Compare with brute force: the longest prefix of the path with enough visits, own prompt
    first.
    """

    def remaining(depth: int, among: list[PastTrajectory]) -> list[int]:
        head = path[:depth]
        return [
            past.sampled_tokens - past.tool_returns[depth - 1][1]
            for past in among
            if [state for state, _ in past.tool_returns[:depth]] == head
        ]

    own = [past for past in history if past.prompt == prompt]
    best: tuple[int, str, list[int]] | None = None
    for name, among in (("prompt", own), ("all", history)):
        depth = 0
        while depth < len(path) and len(remaining(depth + 1, among)) >= MIN_VISITS:
            depth += 1
        if depth and (best is None or depth > best[0]):
            best = depth, name, remaining(depth, among)
    found = LengthTrees(history).estimate(prompt, path)
    if best is None:
        assert found is None
        return
    depth, name, values = best
    assert found is not None
    assert (found.depth, found.tree, found.visits) == (depth, name, len(values))
    assert found.mean == pytest.approx(sum(values) / len(values))
    ordered = sorted(values[-NODE_SAMPLES:])
    assert sum(v <= found.p90 for v in ordered) >= 0.9 * len(ordered)
    assert sum(v < found.p90 for v in ordered) < 0.9 * len(ordered)


@given(pasts)
def test_incremental_learning_and_rebuilding_give_equal_trees(
    history: list[PastTrajectory],
) -> None:
    learned, rebuilt = LengthTrees(), LengthTrees(history)
    for past in history:
        learned.learn(past)
    for prompt in range(3):
        for past in history:
            path = [state for state, _ in past.tool_returns]
            assert learned.estimate(prompt, path) == rebuilt.estimate(prompt, path)


def test_old_trajectories_are_forgotten() -> None:
    lengths = LengthTrees(limit=40)
    path = [("search", "small", "success")]
    for _ in range(100):
        lengths.learn(make_past(0, path, [10, 1000]))
    for _ in range(100):
        lengths.learn(make_past(0, path, [10, 20]))
    found = lengths.estimate(0, path)
    assert found is not None and found.mean == 20 and found.visits <= 60


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("fine", ("t", "small", "success")),
        ("x" * 600, ("t", "medium", "success")),
        ("x" * 6000, ("t", "large", "success")),
        ("Traceback ... ValueError: no", ("t", "small", "failure")),
        ("the command timed out", ("t", "small", "timeout")),
        ({"status": "ok", "rows": [1, 2]}, ("t", "small", "success")),
        ({"status": "timeout"}, ("t", "small", "timeout")),
        ({"exception": "KeyError('a')"}, ("t", "small", "failure")),
        ({"error": ""}, ("t", "small", "success")),
        (17, ("t", "small", "success")),
    ],
)
def test_tool_answer_is_classified_by_tool_size_and_status(
    value: object, state: tuple[str, ...]
) -> None:
    assert classify_tool_return("t", value) == state


def test_estimates_separate_two_kinds_of_trajectories() -> None:
    rng = random.Random(0)
    history = []
    for _ in range(200):
        failed = rng.random() < 0.3
        state = ("run", "small", "failure" if failed else "success")
        history.append(
            make_past(rng.randrange(5), [state], [10, rng.randrange(400, 600) if failed else 20])
        )
    lengths = LengthTrees(history)
    bad = lengths.estimate(None, [("run", "small", "failure")])
    good = lengths.estimate(None, [("run", "small", "success")])
    assert bad is not None and good is not None
    assert good.p90 == 20 and bad.mean > 400


STATE = ("run", "small", "failure")


def write_history(count: int) -> list[PastTrajectory]:
    return [PastTrajectory(n % 3, ((STATE, n), (STATE, 2 * n)), 3 * n) for n in range(count)]


def read_history(directory: Path, limit: int) -> list[PastTrajectory]:
    history = LengthHistory(SystemHost(), directory, limit)
    try:
        return history.latest
    finally:
        history.close()


def test_successor_reads_the_history_of_its_predecessor(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=50)
    for past in write_history(20):
        history.append(past)
    assert read_history(tmp_path, 50) == write_history(
        20
    )  # the predecessor was killed: nothing was closed


def test_history_file_keeps_only_the_latest_entries(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=10)
    for past in write_history(95):
        history.append(past)
    history.close()
    assert read_history(tmp_path, 10) == write_history(95)[-10:]
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) <= 20


def test_truncated_line_is_the_only_one_lost(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=10)
    for past in write_history(5):
        history.append(past)
    history.close()
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole[:-7])
    assert read_history(tmp_path, 10) == write_history(4)


def test_line_of_another_shape_is_the_only_one_lost(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=10)
    history.append(write_history(1)[0])
    history.close()
    with (tmp_path / FILE_NAME).open("ab") as file:
        for past in ([1, [["run", 5]], 3], [1, 2], 7):
            file.write(encode_row({"past": past}, 0))
    assert read_history(tmp_path, 10) == write_history(1)


def test_corrupt_line_is_lost_and_the_file_is_quarantined(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path / "ledger", limit=10, root=tmp_path)
    for past in write_history(5):
        history.append(past)
    history.close()
    path = tmp_path / "ledger" / FILE_NAME
    content = bytearray(path.read_bytes())
    content[12] ^= 1  # a digit of the first line
    path.write_bytes(content)
    after = LengthHistory(SystemHost(), tmp_path / "ledger", limit=10, root=tmp_path)
    assert after.latest == write_history(5)[1:] and after.corruption == "1 of 5 lines are corrupt"
    assert after.quarantined_path == tmp_path / "quarantine" / "ledger" / FILE_NAME
    assert after.quarantined_path.read_bytes() == content
    after.close()
    assert not LengthHistory(SystemHost(), tmp_path / "ledger", limit=10).corruption


LONGEST, BATCH = 4096, 16

engines = st.lists(
    st.builds(
        MeasuredEngine,
        tensor_parallel_size=st.sampled_from([1, 2, 4, 8]),
        tokens=st.integers(0, 10_000),
        busy_s=st.floats(0.0, 100.0),
    ),
    min_size=1,
    max_size=8,
)


@given(engines, st.lists(st.integers(1, LONGEST), max_size=60))
def test_each_tensor_parallel_size_has_a_bucket_with_its_engines(
    there: list[MeasuredEngine], past: list[int]
) -> None:
    buckets = build_buckets(there, past, LONGEST, BATCH)
    degrees = sorted({engine.tensor_parallel_size for engine in there})
    bounds = [bucket.max_tokens for bucket in buckets]
    assert len(buckets) == len(degrees) and bounds == sorted(set(bounds))
    assert bounds[-1] >= LONGEST and {bucket.batch_size for bucket in buckets} == {BATCH}
    named = {f"engine/{number}": engine.tensor_parallel_size for number, engine in enumerate(there)}
    places = assign_buckets(named, buckets)
    assert {named[name]: place for name, place in places.items()} == {
        degree: place for place, degree in enumerate(degrees)
    }


def test_bounds_divide_tokens_by_measured_rates() -> None:
    past = [100] * 90 + [1000] * 9
    equal = [MeasuredEngine(1, 9000, 90.0), MeasuredEngine(4, 9000, 90.0)]
    assert build_buckets(equal, past, LONGEST, BATCH)[0].max_tokens == 100, "half of all tokens"
    slow = [MeasuredEngine(1, 9000, 9.0), MeasuredEngine(4, 9000, 90.0)]
    assert build_buckets(slow, past, LONGEST, BATCH)[0].max_tokens == 1000, "ten elevenths"
    unknown = [MeasuredEngine(1), MeasuredEngine(4)]
    assert build_buckets(unknown, past, LONGEST, BATCH)[0].max_tokens == 100, "by workers: a fifth"


TINY, HUGE = 5e-324, sys.float_info.max


@pytest.mark.parametrize(
    ("small_s", "large_s", "bound"),
    [
        (1.1e-308, 1.1e-308, LONGEST // 2),
        (TINY, 1.0, LONGEST - 1),
        (1.0, TINY, 1),
        (HUGE, HUGE, LONGEST // 2),
        (HUGE, 1.0, 1),
        (TINY, HUGE, LONGEST - 1),
    ],
)
def test_bounds_follow_rates_of_any_size(small_s: float, large_s: float, bound: int) -> None:
    engines = [MeasuredEngine(1, 512, small_s), MeasuredEngine(2, 512, large_s)]
    buckets = build_buckets(engines, [], LONGEST, BATCH)
    assert [bucket.max_tokens for bucket in buckets] == [bound, LONGEST]
    again = build_buckets([*engines, *engines], [], LONGEST, BATCH)
    assert [bucket.max_tokens for bucket in again] == [bound, LONGEST], "sums are no trouble either"


def test_single_engine_has_one_bucket_after_any_busy_time() -> None:
    [bucket] = build_buckets([MeasuredEngine(1, 512, 1.1e-308)], [], LONGEST, BATCH)
    assert bucket.max_tokens == LONGEST


def test_bounds_without_history_divide_the_max_length() -> None:
    buckets = build_buckets(
        [MeasuredEngine(1), MeasuredEngine(1), MeasuredEngine(2)],
        [7] * (MIN_PAST - 1),
        LONGEST,
        BATCH,
    )
    assert [bucket.max_tokens for bucket in buckets] == [LONGEST // 2, LONGEST]
    assert [bucket.share for bucket in buckets] == [2.0, 1.0]


def test_buckets_change_with_engines_and_not_with_their_rates() -> None:
    whole = [LengthBucket(LONGEST, BATCH)]
    past = [PastTrajectory(0, (), 100)] * 30 + [PastTrajectory(0, (), 1000)] * 30
    scheduler = BucketScheduler(whole, LengthTrees(past), follows_engines=True)
    small, large = MeasuredEngine(1, 5000, 50.0), MeasuredEngine(4, 5000, 25.0)
    assert scheduler.update_engines({"a": small})
    assert len(scheduler.buckets) == 1
    assert scheduler.update_engines({"a": small, "b": large})
    [short, long] = scheduler.buckets
    assert short.max_tokens < long.max_tokens == LONGEST
    assert not scheduler.update_engines({"a": MeasuredEngine(1, 9000, 9.0), "b": large})
    assert scheduler.buckets == [short, long]
    assert not scheduler.update_engines({}), "nobody is there: they may come back"
    assert not scheduler.update_engines({"b": large, "c": small}), (
        "the same degrees: whose is whose stays"
    )
    assert scheduler.update_engines({"c": small}) and len(scheduler.buckets) == 1


def test_buckets_of_the_job_file_are_fixed() -> None:
    declared = [LengthBucket(100, 4), LengthBucket(1000, 8)]
    scheduler = BucketScheduler(declared, LengthTrees())
    assert not scheduler.update_engines({"a": MeasuredEngine(1), "b": MeasuredEngine(4)})
    assert scheduler.buckets == declared
