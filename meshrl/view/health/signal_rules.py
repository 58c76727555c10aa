"""Rules about trajectories and rewards: is there anything to learn from."""

from __future__ import annotations

import math
from statistics import fmean

from meshrl.view.health.case import (
    FINE,
    REWARD_FREE,
    SHORT_WINDOW,
    Case,
    Severity,
    Verdict,
    format_share,
    format_steps,
    judge_limit,
)
from meshrl.view.health.run_figures import WINDOW

HIGH_FILTERED_SHARE = 0.9
HIGH_TRUNCATED_SHARE = 0.5
HIGH_FAILED_SHARE = 0.1  # as the alert MeshFailures
HIGH_STALE_SHARE = 0.25  # as the alert MeshStalenessRefusals
MIN_OPENED = 100  # trajectories, before their stale share is judged
WITHOUT_GROUP_BASELINE = ("ppo", "reinforce_pp")  # compare trajectories of different groups


def judge_end_tokens(case: Case) -> Verdict | None:
    """Judge if turns end before the maximum length."""
    recent = case.find_recent("truncated_share", SHORT_WINDOW)
    if not recent or case.algorithm == "sft":
        return None
    share, turns = case.figures.find_range("truncated_share"), case.figures.ranges.get("turns")
    if share is None or share.low < 1 or (turns is not None and turns.high > 1):
        return FINE
    scored = case.figures.ranges["scored"].total
    text = f"all {scored:.0f} trajectories were truncated: no turn ended by itself"
    if case.lacks_signal:
        return Verdict(Severity.FAILURE, text)
    return FINE if case.has_improved else Verdict(Severity.WARNING, text)


def judge_truncation(case: Case) -> Verdict | None:
    """Judge the share of truncated trajectories."""
    recent = case.find_recent("truncated_share", WINDOW)
    if not recent or case.algorithm == "sft":
        return None
    if fmean(recent) < HIGH_TRUNCATED_SHARE or case.has_improved:
        return FINE
    text = f"{format_share(fmean(recent))} of the trajectories of the last steps were truncated"
    is_all = min(recent) == 1 and case.lacks_signal
    return Verdict(Severity.FAILURE if is_all else Severity.WARNING, text)


def judge_failures(case: Case) -> Verdict | None:
    """Judge the share of trajectories that end without a reward."""
    recent = case.find_recent("failed_share", WINDOW)
    if not recent:
        return None
    text = f"{format_share(fmean(recent))} of the trajectories of the last steps failed"
    return judge_limit(fmean(recent), HIGH_FAILED_SHARE, text)


def judge_filtered_groups(case: Case) -> Verdict | None:
    """Judge if any trajectory is trained."""
    recent = case.find_recent("sequences", SHORT_WINDOW)
    if not recent:
        return None
    trained = case.figures.find_range("sequences")
    if any(recent) or (trained is not None and trained.high > 0 and case.has_improved):
        return FINE
    if trained is not None and trained.high == 0:
        text = f"no trajectory was trained in {format_steps(case.figures.steps)}: "
        return Verdict(Severity.FAILURE, text + _describe_filtered(case), *_explain_filtered(case))
    return Verdict(
        Severity.WARNING, f"no trajectory was trained in the last {format_steps(len(recent))}"
    )


def _describe_filtered(case: Case) -> str:
    groups, scored = (case.figures.ranges.get(name) for name in ("groups", "scored"))
    if groups is None or scored is None:
        return "all groups were filtered"
    return f"all {groups.total:.0f} groups ({scored.total:.0f} trajectories) were filtered"


def _explain_filtered(case: Case) -> tuple[str, tuple[str, ...]]:
    """Return cause and keys of a run in which nothing was trained."""
    reward, masked, scored = (
        case.figures.find_range(name) for name in ("reward", "masked", "scored")
    )
    if masked and scored and masked.total == scored.total > 0:
        cause = "algorithm.mask_truncated leaves out truncated trajectories, which are all of them"
        return cause, ("rollout.max_tokens", "rollout.stop")
    if reward and reward.low == reward.high:
        cut = case.figures.find_range("truncated_share")
        is_cut = cut is not None and cut.total >= HIGH_TRUNCATED_SHARE * cut.count
        others = ("rollout.max_tokens",) if is_cut else ("dataset.train",)
        cause = f"the reward is {reward.low:g} for every trajectory"
        return cause, ("reward.use", "reward.options", *others)
    return "", ()


def judge_filtered_share(case: Case) -> Verdict | None:
    """Judge the share of filtered groups of a job whose reward has not risen."""
    recent = case.find_recent("filtered_share", WINDOW)
    if not recent:
        return None
    text = f"{format_share(fmean(recent))} of the groups of the last steps were filtered"
    limit = math.inf if case.has_improved else HIGH_FILTERED_SHARE
    return judge_limit(fmean(recent), limit, text)


def judge_reward_spread(case: Case) -> Verdict | None:
    """Judge if rewards within a group differ, for algorithms that compare them there."""
    recent = case.find_recent("reward_spread", SHORT_WINDOW)
    if not recent or case.algorithm in (*REWARD_FREE, *WITHOUT_GROUP_BASELINE):
        return None
    if any(recent):
        return FINE
    text = f"the rewards of each group were equal in the last {format_steps(len(recent))}"
    return Verdict(Severity.FAILURE if case.lacks_signal else Severity.WARNING, text)


def judge_reward(case: Case) -> Verdict | None:
    """Judge if the reward ever leaves its floor."""
    reward = case.figures.find_range("reward")
    spread = case.figures.find_range("reward_spread")
    is_used = case.algorithm not in REWARD_FREE
    if reward is None or spread is None or not is_used or not case.is_long_enough(WINDOW):
        return None
    if reward.low < reward.high or spread.high > 0:
        return FINE
    text = f"the reward was {reward.low:g} in each of {format_steps(case.figures.steps)}"
    return Verdict(Severity.FAILURE, text)


def judge_staleness(case: Case) -> Verdict | None:
    """Judge the share of trajectories that are too old to be trained."""
    opened, stale = case.counts.get("opened", 0), case.counts.get("stale_requeued")
    if stale is None or opened < MIN_OPENED:
        return None
    text = f"{format_share(stale / opened)} of the trajectories were too old to be trained"
    return judge_limit(stale / opened, HIGH_STALE_SHARE, text)
