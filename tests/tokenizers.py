"""Tokenizer for tests that need a job's model but no readable text."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.model.tokens.tokenizer import build_character_tokenizer

FIRST = 0x4E00  # characters without case or composition


def make_tokenizer(directory: Path, ids: int = 64) -> None:
    """Write a tokenizer.json with a token for each id below `ids`."""
    build_character_tokenizer(
        "".join(chr(FIRST + i) for i in range(ids)), directory / "tokenizer.json"
    )
