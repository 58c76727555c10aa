"""Finds the checkpoint of a run in its files: the one that its last recorded step commit names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STATE = "state"  # below a checkpoint's directory: all that training depends on beside the weights


def checkpoint_name(lineage: int, step: int, manifest: str) -> str:
    """The name of a checkpoint's manifest, without `.json`, and of the directory beside it."""
    return f"step-{lineage:03d}-{step:06d}-{manifest[:8]}"


def newest_due(version: int, every: int, last: int) -> int:
    """The newest version up to this one for which a checkpoint is due: each `every`th, and the
    last.
    """
    return version if version >= last else version - version % every


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Manifests of checkpoints in the order of lineage and step; the step of one may never have
    been committed.
    """
    return sorted((run_dir / "checkpoints").glob("step-*.json"))


def committed(run_dir: Path) -> Path | None:
    """The manifest of the last commit on record, else the newest one; None if there is none."""
    found = {path.stem: path for path in all_checkpoints(run_dir)}
    named = next((name for name in _named(run_dir) if name in found), "")
    return found[named] if named else next(reversed(found.values()), None)


def last_named(run_dir: Path) -> str:
    """The checkpoint that the last recorded step commit names, wherever it is; empty: none does."""
    return next(_named(run_dir), "")


def steps_done(run_dir: Path) -> int:
    """The version of the last step commit or lineage on record; 0 without one."""
    for line in reversed(_recorded(run_dir)):
        if b'"step"' in line or b'"lineage"' in line:
            event = json.loads(line)
            if event["kind"] in ("step", "lineage", "restored"):
                return int(event["fields"]["version"])
    return 0


def _named(run_dir: Path) -> Iterator[str]:
    """The checkpoints that step commits on record name, the last one first."""
    for line in reversed(_recorded(run_dir)):
        if b'"step"' not in line:
            continue
        event = json.loads(line)
        if event["kind"] == "step" and (name := event["fields"].get("checkpoint", "")):
            yield name


def last_lineage(run_dir: Path) -> int:
    """The highest lineage that a run's record or its checkpoints mention; 0 when none does."""
    found = [int(path.name.split("-")[1]) for path in all_checkpoints(run_dir)]
    for line in _recorded(run_dir):
        if b'"lineage"' in line:
            found.append(json.loads(line)["fields"].get("lineage", 0))
    return max(found, default=0)


def _recorded(run_dir: Path) -> list[bytes]:
    """The events of a run, one a line; the last may have been cut off while it was written."""
    path = run_dir / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith(b"\n")]


@dataclass(frozen=True)
class Best:
    """The version that evaluation found best so far."""

    version: int
    manifest: str  # digest of its weights
    value: float  # the figure that it was judged by


def best(run_dir: Path) -> Best | None:
    """The best version by the run's record; None: no evaluation has compared versions, or none
    since a new lineage abandoned the best one.
    """
    found: Best | None = None
    for line in _recorded(run_dir):
        if b'"evaluation"' not in line and b'"lineage"' not in line:
            continue
        event = json.loads(line)
        kind, told = event["kind"], event["fields"]
        if kind == "evaluation" and told.get("best"):
            found = Best(int(told["step"]), str(told["manifest"]), float(told["value"]))
        elif kind == "lineage" and found is not None and found.version > int(told["version"]):
            found = None
    return found


def is_first(path: Path) -> bool:
    """Whether it is of version 0, for which nothing has been trained."""
    return path.name.split("-")[2] == "000000"
