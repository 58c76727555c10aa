"""Repositories of the Hugging Face Hub: their ids, and the job keys that name them.

This module imports nothing of `huggingface_hub`, whose import takes a while.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_MAX_ID_CHARS = 96  # limit of the Hub
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz", ".safetensors", ".git")


@dataclass(frozen=True)
class Repository:
    """Repository at a branch, tag or commit, with the job keys that name them."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str = ""  # empty: main
    key: str = field(default="", compare=False)
    revision_key: str = field(default="", compare=False)

    @property
    def named_revision(self) -> str:
        """Branch, tag or commit as the Hub knows it."""
        return self.revision or "main"


def is_hub_id(text: str) -> bool:
    """Return True if a text that is no existing path can be the id of a repository."""
    return (
        len(text) <= _MAX_ID_CHARS
        and bool(_HUB_ID.fullmatch(text))
        and not text.endswith(_FILE_SUFFIXES)
        and "--" not in text
        and ".." not in text
    )


def suggest_id(text: str) -> str:
    """Return what to write instead of a text that is neither a path nor an id, as a sentence."""
    rest = re.sub(r"^(https?:/+[^/]+/|hf:/+)?(datasets/|models/)?", "", text)
    parts = [part for part in re.split(r"[/@:]", rest) if part]
    if len(parts) < 2 or not is_hub_id("/".join(parts[:2])) or rest.endswith(_FILE_SUFFIXES):
        return "Correct the path, or name a repository of the Hub as OWNER/NAME"
    keys = "; its revision, configuration and split have own keys" if parts[2:] else ""
    return f"Correct the path, or write {'/'.join(parts[:2])} for the repository of the Hub{keys}"


def parse_snapshot_path(path: str) -> Repository | None:
    """Return the repository, with its commit, of a snapshot's directory; None for another path."""
    parts = Path(path).parts
    found = re.fullmatch(r"(model|dataset)s--(.+)--(.+)", parts[-3]) if len(parts) > 2 else None
    if not found or parts[-2] != "snapshots":
        return None
    kind: Literal["model", "dataset"] = "model" if found[1] == "model" else "dataset"
    return Repository(f"{found[2]}/{found[3]}", kind, parts[-1])
