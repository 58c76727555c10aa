"""Environment of a conversation with a person, whose messages follow the model's turns."""

from __future__ import annotations

from typing import Any

from meshrl.common.job.builtin import PERSON


class PersonEnvironment:
    """Chat that ends when the person has no further message."""

    def open(self, row: dict[str, Any]) -> Any:
        """Return the person's first message: text, or messages."""
        return row["prompt"]

    def step(self, text: str) -> dict[str, Any]:
        """Request the person's next message after a turn `text` of the model without calls."""
        return {"tool": PERSON, "input": text}

    def result(self, value: Any) -> dict[str, Any]:
        """Append the person's message; None ends the chat."""
        return {"done": True} if value is None else {"append": value}

    def close(self) -> None:
        """Do nothing: no resource is open."""


def make_environment() -> PersonEnvironment:
    return PersonEnvironment()
