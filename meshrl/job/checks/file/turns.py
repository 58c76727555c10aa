"""Checks and resolves what begins and ends a turn of a job: its chat format and its end tokens.

`fail(key, message, fix)` makes the error that names the key's line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

from common.errors import ConfigError
from common.job.config import JobConfig
from common.model.chat import TEMPLATE, Chat, ChatBroken, format_of
from common.model.end_tokens import end_tokens
from common.model.messages import conversation_of
from common.model.tokenizer import Tokenizer
from meshrl.job import rows

Fail = Callable[..., ConfigError]


def check(config: JobConfig, fail: Fail) -> JobConfig:
    """The job with its chat format by name, and with all tokens that end a turn."""
    config = _ends(config, fail)
    return _chat(config, fail) if config.environment.chat else _plain(config, fail)


def _tokenizer(config: JobConfig) -> Path:
    return Path(config.model.tokenizer or Path(config.model.path) / "tokenizer.json")


def _ends(config: JobConfig, fail: Fail) -> JobConfig:
    """With the model's own end tokens."""
    model = config.model
    path = Path(model.path) if model.path else None
    try:
        own = end_tokens(path, model.config, _tokenizer(config))
    except ConfigError as error:
        where = f" ({error.where})" if error.where else ""
        raise fail("model", f"model: {error.message}{where}", error.fix) from error
    return _stopped(config, own)


def _stopped(config: JobConfig, tokens: list[str]) -> JobConfig:
    stop = list(dict.fromkeys([*config.rollout.stop, *tokens]))
    return replace(config, rollout=replace(config.rollout, stop=stop))


def _plain(config: JobConfig, fail: Fail) -> JobConfig:
    environment = config.environment
    if environment.chat_options:
        raise fail("environment.chat_options", "chat_options without environment.chat")
    if environment.chat_history != "keep":
        raise fail("environment.chat_history", "chat_history without environment.chat")
    if environment.chat_date:
        raise fail("environment.chat_date", "chat_date without environment.chat")
    return config


def _chat(config: JobConfig, fail: Fail) -> JobConfig:
    """With the format's stop tokens."""
    environment, tokenizer = config.environment, _tokenizer(config)
    try:
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
            date=_date(environment.chat_date, fail),
            special_tokens=environment.special_tokens,
        )
    except ConfigError as error:
        raise fail("environment.chat", f"environment.chat: {error}") from error
    # One day for the whole run, so that trajectories can be rebuilt on another.
    day = environment.chat_date or (date.today().isoformat() if chat.dated else "")
    config = replace(config, environment=replace(environment, chat=name, chat_date=day))
    if name == TEMPLATE:
        _taken(config, chat, fail)
    else:
        _known(config, fail)
    return _stopped(config, chat.stop_tokens)


def _date(day: str, fail: Fail) -> str:
    try:
        return day and date.fromisoformat(day).isoformat()
    except ValueError:
        message = f"environment.chat_date = {day!r} is no day"
        raise fail("environment.chat_date", message, "Write it as 2026-11-22") from None


def _known(config: JobConfig, fail: Fail) -> None:
    """The formats of `renderers` keep what was sampled and read their own calls."""
    if config.environment.chat_history != "keep":
        raise fail(
            "environment.chat_history",
            f"chat format {config.environment.chat!r} always keeps earlier turns as they were "
            "sampled",
            f"Leave it out, or set environment.chat = {TEMPLATE!r}",
        )
    if config.environment.chat_date:
        raise fail(
            "environment.chat_date",
            f"chat format {config.environment.chat!r} takes no date",
            f"Leave it out, or set environment.chat = {TEMPLATE!r}",
        )
    if config.environment.tool_call_parser != "auto":
        raise fail(
            "environment.tool_call_parser",
            f"chat format {config.environment.chat!r} reads tool calls in its own way",
            f"Leave it out, or set environment.chat = {TEMPLATE!r}",
        )


def _taken(config: JobConfig, chat: Chat, fail: Fail) -> None:
    """The template takes the job's tools, and the first prompt of each of its files."""
    if config.environment.tools and (problem := chat.tool_problem):
        raise fail(
            "environment.tools",
            f"environment.tools: {problem}",
            "Leave tools out, take a model whose template has them, or name "
            "environment.tool_call_parser, or a format in environment.chat that knows how to call",
        )
    if config.environment.use or config.environment.verifiers:
        return  # which make their own prompts
    for key in ("train", "held_out"):
        if name := getattr(config.dataset, key):
            row = next(iter(rows.read(Path(name))))
            try:
                chat.begin(conversation_of(row.value[config.dataset.prompt]))
            except ChatBroken as error:
                raise fail(f"dataset.{key}", f"{row.place}: {error.message}", error.fix) from error
