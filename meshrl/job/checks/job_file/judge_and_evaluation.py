"""Checks of a job's judge, whose verdict is the reward, and of its evaluations."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from meshrl.common.base.urls import Url
from meshrl.common.job.config import EvaluationSampling, JudgeConfig
from meshrl.common.job.evaluation_plan import (
    HELD_OUT,
    LOSS,
    has_held_out_loss,
    list_figures,
)
from meshrl.job.job_file import JobFile


def check_judge(job: JobFile) -> None:
    """Check that the judge can be called, and that it is the only reward."""
    judge, model = job.config.reward.judge, job.config.models.reward.path
    if not judge.use:
        if model:
            raise job.make_error(
                "models.reward",
                "models.reward is not used: the job has no judge",
                'Set reward.judge.use = "model"',
            )
        return
    use = "reward.judge.use"
    if job.config.reward.reward_parts:
        raise job.make_error(use, "reward.use and reward.judge.use exclude each other")
    if "{answer}" not in judge.template:
        raise job.make_error("reward.judge.template", "reward.judge.template has no {answer}")
    if judge.use == "model":
        if not model:
            raise job.make_error(
                use, "the judge 'model' needs [models.reward], which the job lacks"
            )
        if judge.yes == judge.no:
            raise job.make_error(
                "reward.judge.yes", "reward.judge.yes and reward.judge.no are the same"
            )
    elif not re.match(r"https?://[^/\s]+", judge.use):
        public_url = Url.parse(judge.use).public_url
        raise job.make_error(use, f"reward.judge.use = {public_url!r} is neither 'model' nor a URL")
    elif Url.parse(judge.use).public_url.rstrip("/") != judge.use.rstrip("/"):
        wrong = "the URL has a user, a password or a query, which the run's files would store"
        fix = "Put the key into an environment variable and set reward.judge.key to its name"
        raise job.make_error(use, wrong, fix)
    elif not judge.model:
        raise job.make_error(use, "reward.judge.model is missing")
    if judge.key and judge.key not in os.environ:
        raise job.make_error("reward.judge.key", f"the environment variable {judge.key} is not set")


def load_judge_template(job: JobFile) -> JudgeConfig:
    """Return the judge with its template: the text itself, or that of the file beside the job."""
    judge = job.config.reward.judge
    template, file = judge.template, job.base / judge.template
    if not template or "\n" in template or len(template) >= 256 or not file.is_file():
        return judge
    try:
        return replace(judge, template=file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"reward.judge.template: {file} is not UTF-8 text: {error}"
        raise job.make_error("reward.judge.template", wrong) from error


def _check_sampling(job: JobFile, table: str, sampling: EvaluationSampling) -> None:
    """Check that pass@k has samples, and that trajectories fit into the engines."""
    if any(k > sampling.samples for k in sampling.pass_at):
        key = f"{table}.pass_at"
        wrong = f"{key} = {sampling.pass_at} must be between 1 and samples = {sampling.samples}"
        raise job.make_error(key, wrong, f"Raise {table}.samples to {max(sampling.pass_at)}")
    limit = job.config.rollout.max_tokens
    if sampling.max_tokens > limit or sampling.max_tokens == 1:
        key = f"{table}.max_tokens"
        wrong = f"{key} = {sampling.max_tokens} must be between 2 and rollout.max_tokens = {limit}"
        raise job.make_error(
            key, wrong, "Lower it, or raise rollout.max_tokens: engines have room for that length"
        )


def check_evaluation(job: JobFile) -> None:
    """Check the evaluation's datasets, and that the best version's figure exists."""
    evaluation, config = job.config.evaluation, job.config
    names = [HELD_OUT, *(d.name for d in evaluation.datasets)]
    for i, d in enumerate(evaluation.datasets):
        table = f"evaluation.datasets[{i}]"
        if names.count(d.name) > 1:
            raise job.make_error(
                f"{table}.name", f"{table}.name: {d.name!r} is used twice", "Choose another name"
            )
        _check_sampling(job, table, d)
    _check_sampling(job, "evaluation", evaluation)
    if evaluation.patience and not (evaluation.best and evaluation.every):
        needed = "evaluation.every" if evaluation.best else "evaluation.best"
        raise job.make_error(
            "evaluation.patience",
            f"evaluation.patience counts evaluations without a better version; {needed} is "
            f"{'0' if evaluation.best else 'empty'}",
            f"Set {needed}, or remove evaluation.patience",
        )
    offered = list_figures(
        evaluation, bool(config.dataset.held_out or config.environment.verifiers)
    )
    if has_held_out_loss(config):
        offered = [LOSS, *(offered if config.has_reward else [])]
    if evaluation.best and evaluation.best not in offered:
        wrong = f"evaluation.best = {evaluation.best!r} is not a figure of this job"
        fix = (
            f"Use one of the job's figures: {', '.join(offered) or 'none without dataset.held_out'}"
        )
        raise job.make_error("evaluation.best", wrong, fix)
