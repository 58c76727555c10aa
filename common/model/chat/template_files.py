"""Chat templates and special tokens of a tokenizer's directory, found as in `transformers`.

It also reads the tokens that end a model's turn, as the model's files name them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.tokens.tokenizer import Tokenizer

GENERATION_CONFIG_FILE = "generation_config.json"
SPECIAL_TOKEN_KEYS = (  # names of special tokens in templates
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
    """Chat templates and special tokens of a tokenizer's directory."""

    directory: Path
    templates: dict[str, str]  # by name: default, tool_use and others
    special_tokens: dict[str, str]


def has_template(directory: Path) -> bool:
    """Return True if the directory has a chat template."""
    return bool(
        _read_templates(directory, _read_optional_json(directory / "tokenizer_config.json"))
    )


def load_chat_files(directory: Path) -> ChatFiles:
    """Load the templates of a tokenizer's directory; raise ConfigError if it has no usable one."""
    config = _read_optional_json(directory / "tokenizer_config.json")
    templates = _read_templates(directory, config)
    if "default" not in templates:
        named = f" but {', '.join(sorted(templates))}" if templates else ""
        raise ConfigError(
            f"the tokenizer has no chat template{named}",
            where=str(directory),
            fix="Put the model's chat_template.jinja there, or set environment.chat to a format",
        )
    return ChatFiles(directory, templates, _read_special_tokens(directory, config))


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read the templates; separate files take precedence over tokenizer_config.json."""
    own = {
        file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        own["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    templates = config.get("chat_template")
    if own or templates is None:
        return own
    if isinstance(templates, str):
        return {"default": templates}
    try:
        if not isinstance(templates, dict):
            templates = {entry["name"]: entry["template"] for entry in templates}
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "chat_template is neither a text nor a list of named templates",
            where=str(directory / "tokenizer_config.json"),
        ) from error
    return {str(name): str(text) for name, text in templates.items()}


def _read_special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    named = dict(config)
    if "added_tokens_decoder" not in config:  # written by earlier versions of transformers
        named |= _read_optional_json(directory / "special_tokens_map.json")
    found = {}
    for name in SPECIAL_TOKEN_KEYS:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _read_optional_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"the file is not JSON: {error}", where=str(file)) from error
    return found if isinstance(found, dict) else {}


def collect_eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """Return the ids of both files' `eos_token_id`, which is an id, a list of them or null."""
    found: dict[int, None] = {}
    for file, named in ((GENERATION_CONFIG_FILE, generation), ("config.json", config)):
        ids = named.get("eos_token_id")
        for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise ConfigError(
                    f"eos_token_id must be a token id or a list of token ids, not {i!r}", where=file
                )
            found[i] = None
    return list(found)


def read_eos_tokens(model: Path | None, config: Mapping[str, Any], tokenizer: Path) -> list[str]:
    """Return the texts of the tokens that end a turn.

    They are those of a model directory, or of a new model that `config` describes. Raise
    ConfigError for an id that the tokenizer lacks.
    """
    generation: dict[str, Any] = {}
    if model is not None:
        config = _read_json(model / "config.json")
        if (model / GENERATION_CONFIG_FILE).is_file():
            generation = _read_json(model / GENERATION_CONFIG_FILE)
    ids = collect_eos_ids(config, generation)
    if not ids:
        return []
    texts = Tokenizer.load(tokenizer)
    found = {i: texts.id_to_token(i) for i in ids}
    if lacking := [i for i, text in found.items() if text is None]:
        raise ConfigError(
            f"the model ends a turn with token {lacking[0]}, which the tokenizer lacks",
            where="eos_token_id",
            fix="Use the model's own tokenizer, or set eos_token_id to one of its tokens in "
            f"config.json and {GENERATION_CONFIG_FILE}",
        )
    return [text for text in found.values() if text is not None]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file cannot be read: {error}", where=str(file)) from error
    if not isinstance(found, dict):
        raise ConfigError("the file does not contain a JSON object", where=str(file))
    return found
