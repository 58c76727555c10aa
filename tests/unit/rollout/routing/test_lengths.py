"""How much longer a trajectory will be, and where that leads it."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.rollout.routing.lengths import (
    MIN_VISITS,
    SAMPLES,
    LengthTrees,
    Past,
    tool_return_of,
)

tools = st.sampled_from(
    [("search", "small", "success"), ("search", "large", "success"), ("run", "small", "failure")]
)
pasts = st.lists(
    st.builds(
        lambda prompt, states, steps: past_of(prompt, states, steps),
        st.integers(0, 2),
        st.lists(tools, max_size=4),
        st.lists(st.integers(0, 50), min_size=5, max_size=5),
    ),
    max_size=60,
)


def past_of(prompt: int, states: list[Any], steps: list[int]) -> Past:
    """A trajectory that samples `steps[i]` tokens before each tool return, and the last after."""
    sampled, returns = 0, []
    for state, step in zip(states, steps, strict=False):
        sampled += step
        returns.append((state, sampled))
    return Past(prompt, tuple(returns), sampled + steps[len(states)])


@given(pasts, st.lists(tools, min_size=1, max_size=4), st.integers(0, 2))
def test_an_estimate_is_what_counting_the_past_gives(
    history: list[Past], path: list[Any], prompt: int
) -> None:
    """Against brute force: the longest prefix of the path with visits enough, own prompt first."""

    def remaining(depth: int, among: list[Past]) -> list[int]:
        head = path[:depth]
        return [
            past.sampled - past.returns[depth - 1][1]
            for past in among
            if [state for state, _ in past.returns[:depth]] == head
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
    ordered = sorted(values[-SAMPLES:])
    assert sum(v <= found.p90 for v in ordered) >= 0.9 * len(ordered)
    assert sum(v < found.p90 for v in ordered) < 0.9 * len(ordered)


@given(pasts)
def test_learning_one_by_one_and_rebuilding_give_the_same_trees(history: list[Past]) -> None:
    learned, rebuilt = LengthTrees(), LengthTrees(history)
    for past in history:
        learned.learn(past)
    for prompt in range(3):
        for past in history:
            path = [state for state, _ in past.returns]
            assert learned.estimate(prompt, path) == rebuilt.estimate(prompt, path)


def test_what_is_long_past_is_forgotten() -> None:
    lengths = LengthTrees(limit=40)
    path = [("search", "small", "success")]
    for _ in range(100):
        lengths.learn(past_of(0, path, [10, 1000]))
    for _ in range(100):
        lengths.learn(past_of(0, path, [10, 20]))
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
def test_an_answer_is_classified_by_tool_size_and_status(
    value: object, state: tuple[str, ...]
) -> None:
    assert tool_return_of("t", value) == state


def test_estimates_separate_two_kinds_of_trajectories() -> None:
    rng = random.Random(0)
    history = []
    for _ in range(200):
        failed = rng.random() < 0.3
        state = ("run", "small", "failure" if failed else "success")
        history.append(
            past_of(rng.randrange(5), [state], [10, rng.randrange(400, 600) if failed else 20])
        )
    lengths = LengthTrees(history)
    bad = lengths.estimate(None, [("run", "small", "failure")])
    good = lengths.estimate(None, [("run", "small", "success")])
    assert bad is not None and good is not None
    assert good.p90 == 20 and bad.mean > 400
