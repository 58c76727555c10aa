"""What a forgery is: a wrong answer, and the tests that it is to pass."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORGED = Path(__file__).parent / "forged"


@dataclass(frozen=True)
class Suite:
    """Tests, and a right answer, which shows that they can be passed."""

    name: str
    tests: Any
    right: str


@dataclass(frozen=True)
class Forgery:
    """Wrong in every test of its suite, so that it must score 0; or may be `refused` by name, where
    its class claims what only a class under test could.
    """

    name: str
    source: str
    suite: str = ""
    refused: bool = False
    brief: bool = False  # as contained after a little as after long


def read(style: str) -> tuple[dict[str, Any], list[Forgery]]:
    """Return the suites of a style of tests by name, or what all are tested by; and forgeries."""
    document = tomllib.loads((FORGED / f"{style}.toml").read_text())
    blocks = document.get("blocks", {})

    def whole(source: str) -> str:
        for name, block in blocks.items():
            source = source.replace(f"@{name}@\n", block)
        return source

    forged = [Forgery(**{**row, "source": whole(row["source"])}) for row in document["forgery"]]
    suites = {row["name"]: Suite(**row) for row in document.get("suite", ())}
    return suites or document["tests"], forged
