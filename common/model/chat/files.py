"""Chat templates and special tokens of a tokenizer's directory, found as `transformers` does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError

SPECIAL = (  # names under which templates find special tokens
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class ChatFiles:
    """What a tokenizer's directory says of chats."""

    directory: Path
    templates: dict[str, str]  # by name: default, tool_use and others
    special_tokens: dict[str, str]


def has_template(directory: Path) -> bool:
    """Whether there is a chat template."""
    return bool(_templates(directory, _object(directory / "tokenizer_config.json")))


def chat_files(directory: Path) -> ChatFiles:
    """The templates of a tokenizer's directory; ConfigError when it has none to use."""
    config = _object(directory / "tokenizer_config.json")
    templates = _templates(directory, config)
    if "default" not in templates:
        named = f" but {', '.join(sorted(templates))}" if templates else ""
        raise ConfigError(
            f"the tokenizer has no chat template{named}",
            where=str(directory),
            fix="put the model's chat_template.jinja there, or name a format in environment.chat",
        )
    return ChatFiles(directory, templates, _special_tokens(directory, config))


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own go before what tokenizer_config.json holds."""
    own = {
        file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        own["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    held = config.get("chat_template")
    if own or held is None:
        return own
    if isinstance(held, str):
        return {"default": held}
    named = held.items() if isinstance(held, dict) else _listed(directory, held)
    return {str(name): str(text) for name, text in named}


def _listed(directory: Path, held: Any) -> list[tuple[str, str]]:
    try:
        return [(entry["name"], entry["template"]) for entry in held]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "chat_template is neither a text nor a list of named ones",
            where=str(directory / "tokenizer_config.json"),
        ) from error


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    named = dict(config)
    if "added_tokens_decoder" not in config:  # written by earlier versions of transformers
        named |= _object(directory / "special_tokens_map.json")
    found = {}
    for name in SPECIAL:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"the file is not JSON: {error}", where=str(file)) from error
    return found if isinstance(found, dict) else {}
