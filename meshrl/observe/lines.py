"""Reads JSONL files that another process may be writing, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.state.events import Event


def lines_of(path: Path, *holding: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file that somebody may be writing, as far as they are whole; only lines
    that hold one of some texts, if any are given.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (not holding or any(t.encode() in line for t in holding)):
                yield json.loads(line)


def events_of(run_dir: Path) -> list[Event]:
    """The events of a run as far as they are recorded, while somebody may be writing them."""
    lines = lines_of(run_dir / "events.jsonl")
    return [Event(row["id"], int(row["ms"]), row["kind"], row["fields"]) for row in lines]
