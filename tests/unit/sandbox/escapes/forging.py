"""What a forgery is: a wrong answer, and the tests that it is to pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Suite:
    """Tests, and a right answer, which shows that they can be passed."""

    tests: Any
    right: str


@dataclass(frozen=True)
class Forgery:
    """Wrong in every test of its suite, so that it must score 0; or may be `refused` by name, where
    its class claims what only a class under test could.
    """

    name: str
    suite: str
    source: str
    refused: bool = False
