"""Checks and resolves what begins and ends a turn of a job: its chat format and its end tokens."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

from meshrl.common.job.config import JobConfig
from meshrl.common.model.chat.chat import TEMPLATE, Chat, ChatBroken, format_of
from meshrl.common.model.chat.files import end_tokens
from meshrl.common.model.chat.messages import conversation_of
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import rows
from meshrl.job.loaded import PLACED, WHOLE, JobFile, at

OF_A_CHAT = {"chat_options": {}, "chat_history": "keep", "chat_date": ""}  # and without one
OF_A_TEMPLATE = {  # with values that every format takes, and what one of `renderers` does instead
    "chat_history": ("keep", "always keeps earlier turns as they were sampled"),
    "chat_date": ("", "takes no date"),
    "tool_call_parser": ("auto", "reads tool calls in its own way"),
}


def resolved(job: JobFile) -> JobConfig:
    """The job with its chat format by name, and with all tokens that end a turn."""
    model = job.config.model
    with job.naming("model", PLACED):
        own = end_tokens(
            Path(model.path) if model.path else None, model.config, model.tokenizer_file
        )
    job = job.with_config(_stopped(job.config, own))
    if job.config.environment.chat:
        return _chat(job)
    for name, none in OF_A_CHAT.items():
        if getattr(job.config.environment, name) != none:
            raise job.fail(f"environment.{name}", f"{name} without environment.chat")
    return job.config


def _stopped(config: JobConfig, tokens: list[str]) -> JobConfig:
    stop = list(dict.fromkeys([*config.rollout.stop, *tokens]))
    return replace(config, rollout=replace(config.rollout, stop=stop))


def _chat(job: JobFile) -> JobConfig:
    """With the format's stop tokens."""
    config, environment = job.config, job.config.environment
    tokenizer = config.model.tokenizer_file
    day = _date(job)
    with job.naming("environment.chat", WHOLE):
        name = environment.chat
        if name == "auto":
            name = format_of(Path(config.model.path), tokenizer)
        chat = Chat.load(
            name,
            environment.chat_options,
            Tokenizer.load(tokenizer),
            history=environment.chat_history,
            parser=environment.tool_call_parser,
            ends=config.rollout.stop,
            date=day,
            special_tokens=environment.special_tokens,
        )
    # One day for the whole run, so that trajectories can be rebuilt on another.
    day = environment.chat_date or (date.today().isoformat() if chat.dated else "")
    config = replace(config, environment=replace(environment, chat=name, chat_date=day))
    if name == TEMPLATE:
        _taken(job, chat)
    else:
        _known(job.with_config(config))
    return _stopped(config, chat.stop_tokens)


def _date(job: JobFile) -> str:
    day = job.config.environment.chat_date
    try:
        return day and date.fromisoformat(day).isoformat()
    except ValueError:
        message = f"environment.chat_date = {day!r} is no day"
        raise job.fail("environment.chat_date", message, "Write it as 2026-11-22") from None


def _known(job: JobFile) -> None:
    """The formats of `renderers` keep what was sampled and read their own calls."""
    chat = job.config.environment.chat
    for name, (none, instead) in OF_A_TEMPLATE.items():
        if getattr(job.config.environment, name) != none:
            wrong = f"chat format {chat!r} {instead}"
            fix = f"Leave it out, or set environment.chat = {TEMPLATE!r}"
            raise job.fail(f"environment.{name}", wrong, fix)


def _taken(job: JobFile, chat: Chat) -> None:
    """The template takes the job's tools, and the first prompt of each of its files."""
    config = job.config
    if config.environment.tools and (problem := chat.tool_problem):
        raise job.fail(
            "environment.tools",
            f"environment.tools: {problem}",
            "Leave tools out, take a model whose template has them, or name "
            "environment.tool_call_parser, or a format in environment.chat that knows how to call",
        )
    if not job.own_prompts:
        return
    for key in ("dataset.train", "dataset.held_out"):
        if name := at(config, key):
            row = next(iter(rows.read(Path(name))))
            try:
                chat.begin(conversation_of(row.value[config.dataset.prompt]))
            except ChatBroken as error:
                raise job.fail(key, f"{row.place}: {error.message}", error.fix) from error
