"""Batches: sequences with advantages and weights from a group's bytes, and their metrics."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.errors import BadMessage, ConfigError
from meshrl.common.job.config import DatasetConfig, JobConfig, MixedDataset
from meshrl.common.job.constraints import AlgorithmName
from meshrl.common.job.prompt_order import PromptMix
from meshrl.services.trainer.steps.batch import (
    SOURCE_REWARDS,
    RefillPolicy,
    StepBatch,
    compute_staleness,
    has_no_signal,
)
from tests.unit.trainer.steps.groups_under_test import LONGEST, group, job


def test_members_become_sequences_with_their_data() -> None:
    given_ = group([1.0, np.nan, 0.0], reference=True)
    batch = StepBatch(3, job())
    first, second = batch.add(given_)
    assert [first.member_index, second.member_index] == [0, 2] and first.group_id == 7
    assert (second.tokens == given_.tokens[-8:]).all()
    assert (second.extras["reference"] == given_.reference_logprobs[-8:]).all()
    assert float(first.advantages) == pytest.approx(-float(second.advantages), rel=1e-5) != 0
    assert batch.sequences == [first, second] and first.loss_token_count == 4


def test_rewards_of_mixed_datasets_are_averaged_by_source() -> None:
    paths = ("data/mix-0-sums.jsonl", "data/mix-1-more.jsonl")
    mix = [MixedDataset(path=path) for path in paths]
    config = replace(job(), dataset=DatasetConfig(mix=mix))
    batch, sources = StepBatch(3, config), PromptMix.from_job(config)
    of = [next(p for p in range(99) if sources.find_source(p) == source) for source in (0, 1)]
    for number, (prompt, rewards) in enumerate(((of[0], [1, 0]), (of[1], [3, 1]), (of[0], [1, 1]))):
        batch.add(replace(group(rewards, number=number), prompt=prompt))
    assert batch.build_metrics()[SOURCE_REWARDS] == {"0-sums": 0.75, "1-more": 2.0}
    assert SOURCE_REWARDS not in StepBatch(3, job()).build_metrics()


def test_mismatched_scores_are_rejected() -> None:
    given_ = group([1.0, 0.0], reference=True)
    with pytest.raises(BadMessage, match="reference"):
        StepBatch(3, job()).add(replace(given_, reference_logprobs=given_.reference_logprobs[:-1]))


@pytest.mark.parametrize("name", ["tokens", "logprobs", "versions", "rewards", "lengths"])
def test_mismatched_arrays_are_rejected(name: str) -> None:
    given_ = group([1.0, 0.0])
    with pytest.raises(BadMessage, match="group 7 has"):
        StepBatch(3, job()).add(replace(given_, **{name: getattr(given_, name)[:-1]}))


def test_untrained_members_do_not_make_a_group_stale() -> None:
    given_ = group([1.0, np.nan, 0.0], version=9)
    given_.versions[6:13] = [-1, -1, 0, 0, 0, 1, 1]  # of the failed member
    assert compute_staleness(given_, 10) == 1
    assert StepBatch(10, job()).add(given_) and set(given_.sampled_versions) == {9}
    assert compute_staleness(replace(given_, rewards=np.zeros(3, np.float32)), 10) == 10


def test_expert_ids_stay_with_their_tokens() -> None:
    given_ = group([1.0, np.nan, 0.0])
    experts = np.arange(len(given_.tokens) * 6, dtype=np.int16).reshape(-1, 6)
    routed_group = replace(given_, expert_ids=experts, expert_shape=[3, 2])
    _, second = StepBatch(3, job()).add(routed_group)
    assert second.expert_ids is not None
    assert second.expert_ids.shape == (8, 3, 2)
    assert (second.expert_ids.reshape(8, 6) == experts[-8:]).all()
    assert StepBatch(3, job()).add(given_)[0].expert_ids is None
    with pytest.raises(BadMessage, match="experts"):
        StepBatch(3, job()).add(replace(routed_group, expert_shape=[2, 2]))


def test_group_without_variance_is_filtered_and_counted() -> None:
    batch = StepBatch(3, job())
    assert batch.add(group([1.0, 1.0])) == []
    batch.add(group([1.0, 0.0], number=8))
    metrics = batch.build_metrics()
    assert batch.filtered_ids == [7] and metrics["filtered"] == 1
    assert metrics["filtered_share"] == 0.5 and metrics["reward_spread"] == 0.25
    assert has_no_signal(group([1.0, 1.0]), job())
    assert not has_no_signal(group([1.0, 0.0]), job())
    assert not has_no_signal(group([1.0, 1.0]), job("reinforce_pp"))


def test_group_that_differs_only_in_length_penalty_is_trained() -> None:
    long, punished = group([1.0, 1.0], lengths=[20, LONGEST]), job(overlong_buffer=8)
    assert has_no_signal(long, job()) and not has_no_signal(long, punished)
    short, truncated_group = StepBatch(3, punished).add(long)
    assert short.advantages > 0 > truncated_group.advantages


@pytest.mark.parametrize(
    "dynamic", [job("dapo"), job(overlong_buffer=8, refill_filtered=True)], ids=["dapo", "grpo"]
)
def test_dynamic_sampling_requires_different_answers_not_lengths(dynamic: JobConfig) -> None:
    """Require 0 < right answers < all for any lengths (DAPO, equation 11)."""
    for equal in (1.0, 0.0):
        assert has_no_signal(group([equal, equal], lengths=[20, LONGEST]), dynamic)
    short, truncated_group = StepBatch(3, dynamic).add(group([1.0, 0.0], lengths=[20, LONGEST]))
    assert short.advantages > 0 > truncated_group.advantages
    # A right answer of full length is worth as little as a short wrong one; both are trained.
    evened = StepBatch(3, dynamic).add(group([0.0, 1.0], lengths=[20, LONGEST]))
    assert [float(s.advantages) for s in evened] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("tokens", [1, 1]), ("sequences", [1 / 4, 1 / 5]), ("constant", [1 / LONGEST] * 2)],
)
def test_weights_follow_the_aggregation(kind: str, weights: list[float]) -> None:
    found = StepBatch(3, job(aggregation=kind)).add(group([1.0, 0.0]))
    assert [s.weight for s in found] == pytest.approx(weights)


def truncated_group(rewards: list[float], truncated_members: list[int]) -> TrajectoryGroup:
    """Return a group whose `truncated_members` were truncated at the maximum length."""
    given_ = group(rewards)
    return replace(given_, truncated=np.isin(np.arange(len(rewards)), truncated_members))


def test_masked_truncated_members_have_no_loss_but_count_in_the_baseline() -> None:
    given_ = truncated_group([1.0, np.nan, 0.0, 0.5], [1, 2])
    plain, masking = StepBatch(3, job()), StepBatch(3, job(mask_truncated=True))
    all_of_them, unmasked = plain.add(given_), masking.add(given_)
    assert [s.member_index for s in all_of_them] == [0, 2, 3] and [
        s.member_index for s in unmasked
    ] == [0, 3]
    for one in unmasked:
        assert (
            one.advantages
            == next(s for s in all_of_them if s.member_index == one.member_index).advantages
        )
    assert [
        (b.build_metrics()["truncated"], b.build_metrics()["masked"]) for b in (plain, masking)
    ] == [
        (1, 0),
        (1, 1),
    ]
    assert masking.build_metrics()["sequences"] == 2
    assert sum(masking.token_staleness.values()) == sum(s.loss_token_count for s in unmasked)


def test_fully_truncated_group_is_replaced_in_dynamic_sampling() -> None:
    given_ = truncated_group([1.0, np.nan, 0.0], [0, 2])
    batch = StepBatch(3, job(mask_truncated=True))
    assert batch.add(given_) == [] and batch.filtered_ids == [7]
    assert (batch.build_metrics()["truncated"], batch.build_metrics()["masked"]) == (2, 2)
    assert has_no_signal(given_, job("dapo", mask_truncated=True))
    assert not has_no_signal(given_, job("dapo"))


def test_mismatched_endings_are_rejected() -> None:
    with pytest.raises(BadMessage, match="truncation flags"):
        StepBatch(3, job()).add(replace(group([1.0, 0.0]), truncated=np.zeros(3, np.bool_)))


def test_kl_penalty_lowers_the_trajectory_reward() -> None:
    given_ = group([1.0, 0.0, 0.5], reference=True)
    keys = {"kl": "k1", "kl_in": "reward", "kl_coefficient": 0.1}
    found = StepBatch(3, job("dr_grpo", **keys)).add(given_)
    rewards, start = [], 0
    for length, reward in zip(given_.lengths, given_.rewards, strict=True):
        own = slice(start + 2, start + length)
        rewards.append(
            reward - 0.1 * float((given_.logprobs[own] - given_.reference_logprobs[own]).sum())
        )
        start += length
    expected = np.array(rewards) - np.mean(rewards)
    assert [float(s.advantages) for s in found] == pytest.approx(expected, rel=1e-5)


def test_kl_penalty_does_not_unfilter_a_group() -> None:
    keys: dict[str, Any] = {"kl_in": "reward", "kl_coefficient": 0.1}
    assert has_no_signal(group([1.0, 1.0], reference=True), job(**keys))


def test_kl_without_a_reference_names_the_missing_table() -> None:
    keys: dict[str, Any] = {"kl_in": "reward", "kl_coefficient": 0.1}
    with pytest.raises(ConfigError, match=r"models\.reference"):
        StepBatch(3, job(**keys)).add(group([1.0, 0.0]))


def test_trained_tokens_are_counted_by_staleness() -> None:
    batch = StepBatch(5, job(max_staleness=3))
    given_ = group([1.0, 0.0], lengths=[6, 5])  # 4 and 3 sampled tokens
    given_.versions[3:5] = 5
    batch.add(given_)
    batch.add(group([1.0, 0.0], lengths=[4, 4], number=8, version=4))
    batch.add(group([1.0, 1.0], number=9, version=2))  # filtered
    metrics = batch.build_metrics()
    assert metrics["staleness_tokens"] == [2, 4, 5, 0]
    assert metrics["staleness_max"] == 3 and metrics["mixed"] == 1


def test_staleness_of_an_abandoned_lineage_counts_from_its_last_version() -> None:
    """Check that its tokens are never fresh: the version that it ended with has other weights."""
    given_ = replace(group([1.0, 0.0], lengths=[4, 4], version=12), abandoned_above=8)
    for version, lag in ((8, 1), (9, 1), (10, 2), (13, 5)):
        batch = StepBatch(version, job(max_staleness=2))
        assert compute_staleness(given_, version) == lag
        assert {s.abandoned_above for s in batch.add(given_)} == {8}
        metrics = batch.build_metrics()
        assert metrics["staleness_max"] == lag and metrics["staleness_tokens"][lag] == 4


def test_one_token_of_an_abandoned_lineage_makes_a_group_stale() -> None:
    given_ = replace(group([1.0, 0.0], lengths=[4, 4], version=8), abandoned_above=8)
    assert compute_staleness(given_, 8) == 0
    given_.versions[-1] = 9
    assert compute_staleness(given_, 8) == 1


@given(st.lists(st.integers(-4, 4), min_size=2, max_size=6), st.integers(-3, 3), st.randoms())
def test_constant_and_member_order_change_no_advantages(
    rewards: list[int], constant: int, order: random.Random
) -> None:
    places = list(range(len(rewards)))
    order.shuffle(places)
    lengths = [5] * len(rewards)
    one = StepBatch(3, job(filter_zero_variance=False)).add(group(rewards, lengths))
    shifted = [float(rewards[i] + constant) for i in places]
    other = StepBatch(3, job(filter_zero_variance=False)).add(group(shifted, lengths))
    expected = [float(one[i].advantages) for i in places]
    assert [float(s.advantages) for s in other] == pytest.approx(expected, abs=1e-6)


def test_dynamic_sampling_replaces_filtered_groups_up_to_a_limit() -> None:
    config = job("dapo", groups_per_step=2)
    silent, telling = group([1.0, 1.0]), group([1.0, 0.0], number=8)
    refill = RefillPolicy(config)
    assert not refill.try_replace(telling) and refill.try_replace(silent)
    while refill.try_replace(silent):
        assert refill.replaced_count <= 100
    assert refill.replaced_count == 20
    batch = StepBatch(3, config, refilled_count=refill.replaced_count)
    for one in (silent, telling):
        batch.add(one)
    metrics = batch.build_metrics()
    assert (metrics["refilled"], metrics["filtered_share"]) == (20, 21 / 22)


def test_groups_are_not_replaced_without_dynamic_sampling() -> None:
    assert not RefillPolicy(job()).try_replace(group([1.0, 1.0]))
    assert RefillPolicy(job(refill_filtered=True)).try_replace(group([1.0, 1.0]))


def test_empty_batch_has_metrics() -> None:
    metrics = StepBatch(0, replace(job(), seed=1)).build_metrics()
    assert metrics["filtered_share"] == 0 and metrics["staleness_tokens"] == [0, 0, 0]


# -- rewards as numbers ----------------------------------------------------------------------------


def train_metrics(*rewards: float) -> TrajectoryGroup:
    return replace(group([0.0] * len(rewards)), rewards=np.array(rewards, np.float64))


def test_rewards_are_float64_up_to_the_advantage() -> None:
    assert not has_no_signal(train_metrics(100000001, 100000002), job())
    assert not has_no_signal(train_metrics(1.0, 1.0 + 1e-12), job())
    assert has_no_signal(train_metrics(0.1, 0.1, 0.1), job())
    assert len(StepBatch(3, job()).add(train_metrics(1e39, 0.0))) == 2
    first, _ = StepBatch(3, job(name="reinforce_pp")).add(train_metrics(100000001, 100000002))
    assert float(first.advantages) == 100000001


def test_equal_rewards_have_zero_variance() -> None:
    batch = StepBatch(3, job())
    batch.add(train_metrics(*[0.1] * 7))
    assert batch.build_metrics()["reward_spread"] == 0.0


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_group_without_scores_is_filtered_without_warnings() -> None:
    for filtered in (True, False):
        batch = StepBatch(3, job(filter_zero_variance=filtered))
        assert batch.add(train_metrics(np.nan, np.nan)) == []
        assert batch.filtered_ids == [7]
        assert batch.build_metrics()["reward"] == 0.0
        assert has_no_signal(train_metrics(np.nan, np.nan), job(filter_zero_variance=filtered))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_overflowing_rewards_raise_by_name() -> None:
    expected_message = r"rewards of group 7 go from 0 to 1e\+30.* Divide what the reward returns"
    plain: tuple[AlgorithmName, ...] = ("dr_grpo", "rloo", "ppo")
    divided: tuple[AlgorithmName, ...] = ("grpo", "reinforce_pp")  # by the deviation
    for name in plain:
        with pytest.raises(ConfigError, match=expected_message):
            StepBatch(3, job(name=name)).add(train_metrics(1e30, 0.0))
    for name in divided:
        StepBatch(3, job(name=name)).add(train_metrics(1e30, 0.0))
        with pytest.raises(ConfigError, match="rewards of group 7"):
            StepBatch(3, job(name=name)).add(train_metrics(1e200, 0.0))


def test_metrics_of_rewards_are_averaged_over_the_scored_members_that_have_them() -> None:
    batch = StepBatch(3, job())
    names, nan = ["environment/moves", "reward/format"], np.nan
    first = [[2.0, 1.0], [4.0, 0.0], [9.0, 1.0]]  # the last member has failed
    batch.add(replace(group([1.0, 0.0, nan]), metric_names=names, metrics=np.array(first)))
    second = np.array([[nan, 0.25], [nan, 0.75]])
    batch.add(replace(group([1.0, 0.0]), metric_names=names, metrics=second))
    batch.add(group([1.0, 0.0]))
    found = batch.build_metrics()
    assert (found["environment/moves"], found["reward/format"]) == (3.0, 0.5)
    with pytest.raises(BadMessage, match="metrics of shape"):
        batch.add(replace(group([1.0, 0.0]), metric_names=names, metrics=np.zeros((3, 2))))
