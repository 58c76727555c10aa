"""Checks of the files that a job names: its model, its rows, and the modules of its author."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import find_value
from meshrl.common.model.tokens.tokenizer import list_companion_files
from meshrl.job import dataset_rows, demonstrations, references, row_keys
from meshrl.job.checks.job_file.algorithm import REWARDLESS_ALGORITHMS
from meshrl.job.checks.job_file.contamination import OverlapFinder
from meshrl.job.checks.job_file.demonstrations import check_supervised_row
from meshrl.job.hub.repository import suggest_id
from meshrl.job.job_file import MESSAGE_WITH_FIX, Choice, JobFile, get_value
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.dataset_row import DatasetRow
from meshrl.job.row_files.file_locations import has_source


def check_model(job: JobFile) -> None:
    """Check that the model and its tokenizer exist, or the shape of a new one."""
    own = job.config.model
    if own.path and not (Path(own.path) / "config.json").is_file():
        there = "has no config.json" if Path(own.path).exists() else "does not exist"
        raise job.make_error(
            "model.path",
            f"model.path: {own.path} {there}",
            suggest_id(os.path.relpath(own.path, job.base)),
        )
    if not own.path and not own.config:
        raise job.make_error(
            "model", "the job has no model", "Set model.path, or [model.config] for a new one"
        )
    if not (tokenizer := own.tokenizer_file).is_file():
        wrong = f"model.tokenizer: there is no tokenizer at {tokenizer}"
        raise job.make_error("model.tokenizer", wrong, _suggest_tokenizer_fix(tokenizer.parent))


def _suggest_tokenizer_fix(directory: Path) -> str:
    """Return how to fix a missing tokenizer.json."""
    older = [
        f.name for f in list_companion_files(directory / "tokenizer.json") if f.suffix == ".model"
    ]
    if not older:
        return "Set model.tokenizer to a tokenizer.json"
    return (
        f"Convert {older[0]} with transformers: "
        f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
    )


def check_datasets(job: JobFile) -> None:
    """Check that each dataset has rows with the keys that rewards read, or an answer to learn.

    No row of an evaluation set may be trained on.
    """
    config = job.config
    if config.dataset.train and config.dataset.mix:
        raise job.make_error(
            "dataset.mix",
            "dataset.train and dataset.mix exclude each other",
            "Make the rows of dataset.train a source of dataset.mix, too",
        )
    if not (config.dataset.trained_paths or config.environment.verifiers):
        raise job.make_error(
            "dataset.train",
            "the job has no dataset",
            "Set dataset.train to a file of rows, or to the Hub id of a dataset",
        )
    keys = row_keys.find_required_keys(config, job.base)
    overlap = OverlapFinder(job)
    for source in job.datasets:
        key, path = source.key, source.path
        if not has_source(source):
            fix = suggest_id(os.path.relpath(path, job.base))
            raise job.make_error(key, f"{key}: there is no file {path}", fix)
        row = None
        has_text = False
        for row in _read_rows(job, source):
            has_text = has_text or isinstance(find_value(row.value, config.dataset.prompt), str)
            (overlap.add_trained if source.is_trained else overlap.add_evaluated)(row)
            if job.is_supervised(key):
                check_supervised_row(job, key, row)
            elif wrong := row_keys.find_missing_key(row, keys):
                raise job.make_error(*wrong)
        overlap.report_found(key, [source for source in job.datasets if source.is_trained])
        if row is None:
            raise job.make_error(key, f"{key}: {path} has no rows")
        if config.dataset.system and not has_text:
            raise job.make_error(
                "dataset.system",
                f"dataset.system is for prompts that are texts, but all of {key} are messages",
                "Remove it, and write a message of the role system into each row",
            )


def complete_steps(job: JobFile) -> JobFile:
    """Return the job with the steps that its epochs take, if budget.steps in its file is no fewer.

    A step takes `algorithm.groups_per_step` prompts. The last step may begin a further epoch.
    """
    config, epochs = job.config, job.config.dataset.epochs
    if not epochs:
        return job
    if not config.dataset.trained_paths:
        raise job.make_error(
            "dataset.epochs",
            "dataset.epochs needs dataset.train: tasks are counted when the job is packed",
            "Set budget.steps",
        )
    rows = sum(_count_rows(job, source) for source in job.datasets if source.is_trained)
    steps = -(-epochs * max(1, rows) // config.algorithm.groups_per_step)
    if "steps" in job.raw_document.get("budget", {}) and config.budget.steps <= steps:
        return job
    size = config.algorithm.groups_per_step
    why = f"dataset.epochs = {epochs} of {rows:,} rows, {size} prompts in a step"
    config = replace(config, budget=replace(config.budget, steps=steps))
    choices = (*job.choices, Choice("budget.steps", steps, why))
    return replace(job, config=config, choices=choices)


def _count_rows(job: JobFile, source: DataSource) -> int:
    if not demonstrations.is_counted(job.config, source.key):
        return sum(1 for _ in _read_rows(job, source))
    with job.locate_errors(source.key):
        return demonstrations.count_rows(job.config, source).usable_count


def check_system_prompt(job: JobFile) -> None:
    """Check that the job makes the messages that its system prompt precedes."""
    if not job.config.dataset.system:
        return
    if not job.uses_row_prompts:
        raise job.make_error(
            "dataset.system",
            "dataset.system needs prompts of rows, but the environment makes its own",
            "Remove it, and let the environment's open() return a message of the role system",
        )
    if not job.config.environment.chat:
        raise job.make_error(
            "dataset.system",
            "dataset.system needs a chat, but the job has no chat format",
            'Set environment.chat, such as "auto", or write the text into each prompt',
        )


def _read_rows(job: JobFile, source: DataSource) -> Iterator[DatasetRow]:
    config, key, path = job.config, source.key, source.path
    is_prompted = job.uses_row_prompts and not job.is_supervised(key)
    prompt = config.dataset.prompt if is_prompted else ""
    try:
        yield from dataset_rows.read_rows(source, prompt, chat=bool(config.environment.chat))
    except ConfigError as error:
        place = error.where or key
        wrong = error.message if error.where else f"{key}: {error.message}"
        raise job.make_error(place, wrong, error.fix) from error
    except OSError as error:
        wrong = f"{key}: {error.filename or path} cannot be read: {error.strerror}"
        raise job.make_error(
            key, wrong, "Check that the path is a file with read permission"
        ) from error


def check_taskset(job: JobFile) -> None:
    """Check the keys of a taskset of `verifiers`, and that none appears without one."""
    environment = job.config.environment
    if not environment.verifiers:
        for key in ("environment.python", "environment.verifiers_options"):
            if get_value(job.config, key):
                raise job.make_error(key, f"{key} needs environment.verifiers")
        for key in ("dataset.tasks", "dataset.held_out_tasks"):
            if get_value(job.config, key):
                raise job.make_error(
                    key, f"{key} needs environment.verifiers, whose tasks it counts"
                )
        return
    for key in ("environment.use", "environment.tools"):
        if get_value(job.config, key):
            raise job.make_error(
                key, f"{key} conflicts with environment.verifiers, which has its own"
            )
    if not environment.chat:
        raise job.make_error(
            "environment.verifiers", "environment.verifiers needs environment.chat"
        )
    if not os.access(environment.python, os.X_OK) or not Path(environment.python).is_file():
        wrong = f"there is no interpreter at {environment.python or 'environment.python'}"
        fix = (
            "Set environment.python to an interpreter for which `pip install "
            "verifiers==0.4.0` was run"
        )
        raise job.make_error("environment.python", wrong, fix)


def check_rewards(job: JobFile) -> None:
    """Check that the job has a reward, or learns from something else."""
    config = job.config
    rewarded = config.reward.reward_parts or config.reward.judge.use or not job.uses_row_prompts
    if not rewarded and config.algorithm.name not in REWARDLESS_ALGORITHMS:
        raise job.make_error(
            "reward", "the job has no reward", 'Set reward.use = "module:function"'
        )


def check_references(job: JobFile) -> None:
    for key, reference in references.find_references(job.config):
        with job.locate_errors(key, MESSAGE_WITH_FIX):
            references.check_reference(reference, job.base)
