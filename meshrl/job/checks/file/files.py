"""Checks the files that a job names: its model, its rows, and the modules of its author."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from meshrl.common.model.chat.messages import message_of
from meshrl.common.model.tokens.tokenizer import companions
from meshrl.job import references, row_keys, rows
from meshrl.job.checks.file.algorithm import REWARDLESS
from meshrl.job.loaded import WHOLE, JobFile, at


def model(job: JobFile) -> None:
    """Check that the model and its tokenizer are there, or the shape of a new one."""
    own = job.config.model
    if own.path and not (Path(own.path) / "config.json").is_file():
        there = "holds no config.json" if Path(own.path).exists() else "does not exist"
        raise job.fail(
            "model.path",
            f"model.path: {own.path} {there}",
            "Name a Hugging Face directory; `hf download OWNER/NAME --local-dir DIRECTORY` "
            "fetches one from the Hub",
        )
    if not own.path and not own.config:
        raise job.fail("model", "no model", "Set model.path, or [model.config] for a new one")
    if not (tokenizer := own.tokenizer_file).is_file():
        wrong = f"model.tokenizer: there is no tokenizer at {tokenizer}"
        raise job.fail("model.tokenizer", wrong, _convert(tokenizer.parent))


def _convert(directory: Path) -> str:
    """What to do about a tokenizer.json that is missing."""
    older = [f.name for f in companions(directory / "tokenizer.json") if f.suffix == ".model"]
    if not older:
        return "Name a tokenizer.json"
    return (
        f"transformers makes one of {older[0]}: "
        f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
    )


def rows_of_all(job: JobFile) -> None:
    """Check that each dataset has rows, with the keys that rewards read or an answer to learn, and
    that none is trained on and held out.
    """
    config = job.config
    if not (config.dataset.train or config.environment.verifiers):
        raise job.fail(
            "dataset.train", "no dataset", "Set dataset.train to a JSONL or Parquet file"
        )
    keys = row_keys.needed(config, job.base)
    trained: set[bytes] = set()
    for key, path in job.datasets:
        if not rows.exists(path):
            raise job.fail(key, f"{key}: there is no file {path}")
        own = set()
        for row in _rows(job, key, path):
            own.add(row.identity)
            if key == "dataset.held_out" and row.identity in trained:
                raise job.fail(key, f"{row.place} is also in dataset.train")
            if job.learns(key):
                _answered(job, row)
            elif wrong := row_keys.lacking(row, keys):
                raise job.fail(*wrong)
        if not own:
            raise job.fail(key, f"{key}: {path} holds no rows")
        trained = own


def _rows(job: JobFile, key: str, path: Path) -> Iterator[rows.DatasetRow]:
    config = job.config
    prompt = config.dataset.prompt if job.own_prompts else ""
    try:
        with job.naming(key):
            yield from rows.read(path, prompt, chat=bool(config.environment.chat))
    except OSError as error:
        wrong = f"{key}: {error.filename or path} cannot be read: {error.strerror}"
        raise job.fail(key, wrong, "See that it is a file that you may read") from error


def _answered(job: JobFile, row: rows.DatasetRow) -> None:
    """Check that a row has an answer to learn."""
    key = job.config.dataset.response
    answer = row.value.get(key)
    wrong = fix = ""
    if isinstance(answer, dict) and not job.config.environment.chat:
        wrong = f"{key!r} is a message, and the job has no chat format"
        fix = 'Set environment.chat, such as "auto", or write the answer as a text'
    elif not isinstance(answer, dict | str) or not answer:
        wrong = f"the row has no text {key!r} to learn"
        fix = "Set dataset.response to the row's key that holds the answer"
    elif isinstance(answer, dict):
        try:
            message_of({"role": "assistant"} | answer, "the answer", ("assistant",))
        except ValueError as error:
            wrong = f"{key!r} is no message of the assistant: {error}"
            fix = "Write it as a text, or as {'role': 'assistant', 'content': text}"
    if wrong:
        raise job.fail("dataset.response", f"{row.place}: {wrong}", fix)


def taskset(job: JobFile) -> None:
    """Check the keys of a taskset of `verifiers`, and that none stands without one."""
    environment = job.config.environment
    if not environment.verifiers:
        for key in ("environment.python", "environment.verifiers_options"):
            if at(job.config, key):
                raise job.fail(key, f"{key} without environment.verifiers")
        for key in ("dataset.tasks", "dataset.held_out_tasks"):
            if at(job.config, key):
                raise job.fail(key, f"{key} counts tasks of environment.verifiers")
        return
    for key in ("environment.use", "environment.tools"):
        if at(job.config, key):
            raise job.fail(key, f"{key}: environment.verifiers brings its own")
    if not environment.chat:
        raise job.fail("environment.verifiers", "environment.verifiers takes environment.chat")
    if not os.access(environment.python, os.X_OK) or not Path(environment.python).is_file():
        wrong = f"there is no interpreter at {environment.python or 'environment.python'}"
        fix = "Name one of an environment that `pip install verifiers==0.4.0` was run in"
        raise job.fail("environment.python", wrong, fix)


def rewards(job: JobFile) -> None:
    """Check that the job has a reward, or learns from something else."""
    config = job.config
    rewarded = config.reward.declared or config.reward.judge.use or not job.own_prompts
    if not rewarded and config.algorithm.name not in REWARDLESS:
        raise job.fail("reward", "no reward", 'Set reward.use = "module:function"')


def references_of_all(job: JobFile) -> None:
    for key, reference in references.all_references(job.config):
        with job.naming(key, WHOLE):
            references.check_reference(reference, job.base)
