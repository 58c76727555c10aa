"""The environment of a conversation with a person: what they say follows the model's turns."""

from __future__ import annotations

from typing import Any

from meshrl.common.job.builtin import PERSON


class PersonEnvironment:
    """A chat that ends when the person has nothing more to say."""

    def open(self, row: dict[str, Any]) -> Any:
        """What the person says first: text, or messages."""
        return row["prompt"]

    def step(self, text: str) -> dict[str, Any]:
        """The model has said `text`, and called nothing: it is the person's turn."""
        return {"tool": PERSON, "input": text}

    def result(self, value: Any) -> dict[str, Any]:
        """What the person says; None: nothing more."""
        return {"done": True} if value is None else {"append": value}

    def close(self) -> None:
        """Nothing to let go."""


def make_environment() -> PersonEnvironment:
    """The environment."""
    return PersonEnvironment()
