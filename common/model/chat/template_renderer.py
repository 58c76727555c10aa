"""Renderer of a checkpoint's chat template: sandboxed Jinja with the functions of `transformers`.

Source: `transformers` 5.23, `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.chat_format import PARSE_ERRORS, ChatFormatError
from meshrl.common.model.chat.messages import Message
from meshrl.common.model.chat.template_files import ChatFiles

RESERVED_OPTIONS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
)  # reserved names, which options cannot have
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # synonyms; the first is usual


class TemplateRenderer:
    """Template of a tokenizer's directory, with a job's options."""

    def __init__(self, files: ChatFiles, options: dict[str, Any], date: str = "") -> None:
        """Load the template; `date` is its date, such as 2026-11-22; empty: today.

        Raise ConfigError if a template is not Jinja, or an option has an invalid name.
        """
        if reserved := [name for name in options if name in RESERVED_OPTIONS]:
            raise ConfigError(f"environment.chat_options: {reserved[0]!r} is not an option")
        self._files = files
        self._variables = {**files.special_tokens, **options}
        environment = _make_jinja_environment(date)
        self.depends_on_date = any("strftime_now" in text for text in files.templates.values())
        try:
            self._templates = {n: environment.from_string(t) for n, t in files.templates.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: {error.message}, line {error.lineno}",
                where=str(files.directory),
                fix="Copy the complete file again",
            ) from error

    def get_template_text(self, tools: bool) -> str:
        """Return the text of the selected template."""
        return self._files.templates[self._select_template(tools)]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        """Render the conversation, with the start of the model's turn if `add_generation_prompt`.

        Raise ChatFormatError if the template rejects these messages.
        """
        try:
            return self._templates[self._select_template(bool(tools))].render(
                messages=[_add_reasoning_aliases(dict(message)) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, *PARSE_ERRORS) as error:
            raise ChatFormatError(
                f"the chat template rejects these messages: {error}",
                where=", ".join(str(m.get("role")) for m in messages),
                fix="Send only messages that the model's format allows: Gemma, for example, "
                "has no system message",
            ) from error

    def _select_template(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"


def _add_reasoning_aliases(message: Message) -> Message:
    """Return the message with its reasoning under all names that templates read."""
    found = next((message[name] for name in REASONING_KEYS if message.get(name) is not None), None)
    if found is not None:
        message = {"thinking": found, **message, "reasoning_content": found}
    return message


def _make_jinja_environment(date: str) -> ImmutableSandboxedEnvironment:
    def now(form: str) -> str:
        return (datetime.fromisoformat(date) if date else datetime.now()).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=now,
        dict=_DictFunction(),
        namespace=_PublicNamespace,
    )
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """Tag `{% generation %}`, which marks the model's text and renders it unchanged."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _DictFunction:
    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _PublicNamespace(jinja2.utils.Namespace):
    """Namespace that stores no private names."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, *pairs = arguments
        given = dict(*pairs, **named)
        for name in given:
            _reject_private_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_private_name(name)
        super().__setitem__(name, value)


def _reject_private_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
