"""Ids that a model's head has and its tokenizer lacks. Many published heads are padded.

Such an id has no text: a reward, an environment and the next turn's prompt cannot see it. It is
never sampled, and no probability is left for it (`ModelConfig.absent_ids`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from common.model.architecture.config import ModelConfig
from common.model.tokens.tokenizer import Tokenizer


def absent_ids(ids: Iterable[int], rows: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges [first, end) of [0, rows) that hold none of `ids`, ascending."""
    found, expected = [], 0
    for present in sorted({i for i in ids if 0 <= i < rows} | {rows}):
        if present > expected:
            found.append((expected, present))
        expected = present + 1
    return tuple(found)


def with_tokenizer(config: ModelConfig, tokenizer: Path) -> ModelConfig:
    """Return the shape of a model that generates and trains with this tokenizer.json."""
    return replace(config, absent_ids=_absent(tokenizer, config.vocab_size))


@cache
def _absent(tokenizer: Path, rows: int) -> tuple[tuple[int, int], ...]:
    """Read a tokenizer once in a process: a bundle never changes."""
    return absent_ids(Tokenizer.load(tokenizer).vocabulary.values(), rows)
