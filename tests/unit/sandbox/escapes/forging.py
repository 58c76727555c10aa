"""Forgeries: wrong answers, and the tests that they try to pass."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORGED = Path(__file__).parent / "forged"


@dataclass(frozen=True)
class Suite:
    """Tests with a right answer, which shows that they can pass."""

    name: str
    tests: Any
    right: str


@dataclass(frozen=True)
class Forgery:
    """Answer that is wrong in every test of its suite and must score 0.

    If `refused`, rejection by name is also accepted: its class claims equality that only a class
    under test could decide.
    """

    name: str
    source: str
    suite: str = ""
    refused: bool = False
    brief: bool = False  # contained after a short time just as after a long one


def read(style: str) -> tuple[dict[str, Any], list[Forgery]]:
    """Return a style's suites by name, or the tests of all styles, and its forgeries."""
    document = tomllib.loads((FORGED / f"{style}.toml").read_text())
    blocks = document.get("blocks", {})

    def expand_blocks(source: str) -> str:
        for name, block in blocks.items():
            source = source.replace(f"@{name}@\n", block)
        return source

    forgeries = [
        Forgery(**{**row, "source": expand_blocks(row["source"])}) for row in document["forgery"]
    ]
    suites = {row["name"]: Suite(**row) for row in document.get("suite", ())}
    return suites or document["tests"], forgeries
