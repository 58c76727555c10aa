"""Tasks of MBPP: the prompt shows the assertions, because they name the function."""

from __future__ import annotations

from typing import Any


class Task:
    """One program for one task."""

    def open(self, row: dict[str, Any]) -> list[dict[str, str]]:
        assertions = "\n".join(row["test_list"])
        text = f"{row['text']}\nThe program must satisfy:\n```python\n{assertions}\n```"
        return [{"role": "user", "content": text}]

    def step(self, text: str) -> dict[str, bool]:
        return {"done": True}

    def close(self) -> None:
        pass
