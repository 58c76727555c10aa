"""The tokens that a model itself ends a turn with, as its files name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from common.model.tokens.tokenizer import Tokenizer

GENERATION = "generation_config.json"


def end_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """The ids in both files' `eos_token_id`, which is an id, a list of them or null."""
    found: dict[int, None] = {}
    for file, named in ((GENERATION, generation), ("config.json", config)):
        ids = named.get("eos_token_id")
        for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise ConfigError(
                    f"eos_token_id is an id of a token or a list of them, not {i!r}", where=file
                )
            found[i] = None
    return list(found)


def end_tokens(model: Path | None, config: Mapping[str, Any], tokenizer: Path) -> list[str]:
    """The texts of the tokens that end a turn of a model directory, or of one from scratch that
    `config` describes; ConfigError for an id that the tokenizer lacks.
    """
    generation: dict[str, Any] = {}
    if model is not None:
        config = _read(model / "config.json")
        if (model / GENERATION).is_file():
            generation = _read(model / GENERATION)
    ids = end_ids(config, generation)
    if not ids:
        return []
    texts = Tokenizer.load(tokenizer)
    found = {i: texts.id_to_token(i) for i in ids}
    if lacking := [i for i, text in found.items() if text is None]:
        raise ConfigError(
            f"the model ends a turn with token {lacking[0]}, which the tokenizer lacks",
            where="eos_token_id",
            fix="use the model's own tokenizer, or set eos_token_id to one of its tokens in "
            f"config.json and {GENERATION}",
        )
    return [text for text in found.values() if text is not None]


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file cannot be read: {error}", where=str(file)) from error
    if not isinstance(found, dict):
        raise ConfigError("the file holds no JSON object", where=str(file))
    return found
