"""Checks and resolution of a job's chat format and end tokens."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading import row_values
from meshrl.common.job.config import JobConfig
from meshrl.common.model.chat.chat_format import (
    TEMPLATE_FORMAT,
    ChatFormat,
    ChatFormatError,
    detect_format,
)
from meshrl.common.model.chat.messages import add_system_prompt, parse_conversation
from meshrl.common.model.chat.template_files import has_template, read_eos_tokens
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import dataset_rows
from meshrl.job.job_file import MESSAGE_WITH_FIX, MESSAGE_WITH_LOCATION, JobFile
from meshrl.job.model_files import load_chat

CHAT_OPTION_DEFAULTS = {
    "chat_options": {},
    "chat_history": "keep",
    "chat_date": "",
}  # and without one
# with values that every format takes, and what one of `renderers` does instead
TEMPLATE_OPTION_DEFAULTS = {
    "chat_history": ("keep", "always keeps earlier turns as they were sampled"),
    "chat_date": ("", "takes no date"),
    "tool_call_parser": ("auto", "parses tool calls in its own way"),
}


def resolve_chat(job: JobFile) -> JobConfig:
    """Return the job with its chat format by name, and with all tokens that end a turn."""
    model = job.config.model
    with job.locate_errors("model", MESSAGE_WITH_LOCATION):
        own = read_eos_tokens(
            Path(model.path) if model.path else None, model.config, model.tokenizer_file
        )
    job = job.with_config(_add_stop_tokens(job.config, own))
    if job.config.environment.chat:
        return _resolve_chat_format(job)
    for name, none in CHAT_OPTION_DEFAULTS.items():
        if getattr(job.config.environment, name) != none:
            raise job.make_error(f"environment.{name}", f"{name} needs environment.chat")
    _report_unused_template(job)
    return job.config


def _report_unused_template(job: JobFile) -> None:
    """Print a notice for rows whose prompts a chat model would continue as plain text."""
    path = job.config.model.path
    with contextlib.suppress(ConfigError):  # of a template that is not used
        if path and job.uses_row_prompts and has_template(Path(path)):
            found = job.make_error(
                "model.path",
                "the model has a chat template, but the job has no chat format: the model "
                "continues each prompt as plain text",
                'Set environment.chat = "auto", unless it is a base model',
            )
            print(f"notice: {found}", file=sys.stderr)


def _add_stop_tokens(config: JobConfig, tokens: list[str]) -> JobConfig:
    stop = list(dict.fromkeys([*config.rollout.stop, *tokens]))
    return replace(config, rollout=replace(config.rollout, stop=stop))


def _resolve_chat_format(job: JobFile) -> JobConfig:
    """Return the job with the stop tokens of its chat format."""
    config, environment = job.config, job.config.environment
    tokenizer = config.model.tokenizer_file
    day = _parse_date(job)
    with job.locate_errors("environment.chat", MESSAGE_WITH_FIX):
        name = environment.chat
        if name == "auto":
            name = detect_format(Path(config.model.path), tokenizer)
        environment = replace(environment, chat=name, chat_date=day)
        chat = load_chat(environment, Tokenizer.load(tokenizer), config.rollout.stop)
    # One day for the whole run, so that trajectories can be rebuilt on another.
    day = day or (date.today().isoformat() if chat.depends_on_date else "")
    config = replace(config, environment=replace(environment, chat_date=day))
    if name == TEMPLATE_FORMAT:
        _check_template(job, chat)
    else:
        _check_renderer_options(job.with_config(config))
    return _add_stop_tokens(config, chat.stop_tokens)


def _parse_date(job: JobFile) -> str:
    day = job.config.environment.chat_date
    try:
        return day and date.fromisoformat(day).isoformat()
    except ValueError:
        message = f"environment.chat_date = {day!r} is not a date"
        raise job.make_error(
            "environment.chat_date", message, "Write the date as 2026-11-22"
        ) from None


def _check_renderer_options(job: JobFile) -> None:
    """Check that formats of `renderers` have no template options: they parse their own calls."""
    chat = job.config.environment.chat
    for name, (none, instead) in TEMPLATE_OPTION_DEFAULTS.items():
        if getattr(job.config.environment, name) != none:
            wrong = f"chat format {chat!r} {instead}"
            fix = f"Remove the key, or set environment.chat = {TEMPLATE_FORMAT!r}"
            raise job.make_error(f"environment.{name}", wrong, fix)


def _check_template(job: JobFile, chat: ChatFormat) -> None:
    """Check that the template takes the job's tools, and the first prompt of each of its files."""
    config = job.config
    if config.environment.tools and (problem := chat.tools_unsupported_reason):
        raise job.make_error(
            "environment.tools",
            f"environment.tools: {problem}",
            "Remove environment.tools, use a model whose template has tools, or set "
            "environment.tool_call_parser or a format with tool calls in environment.chat",
        )
    if not job.uses_row_prompts:
        return
    for source in job.datasets:
        # All rows of a supervised dataset are encoded before the start.
        if source.key.startswith("dataset.") and not job.is_supervised(source.key):
            row = next(dataset_rows.read_rows(source))
            prompt = row_values.get_value(row.value, config.dataset.prompt)
            try:
                chat.start_conversation(
                    parse_conversation(add_system_prompt(prompt, config.dataset.system))
                )
            except ChatFormatError as error:
                wrong = f"{row.location}: {error.message}"
                raise job.make_error(source.key, wrong, error.fix) from error
