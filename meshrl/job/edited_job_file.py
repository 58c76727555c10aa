"""Record of the job file that a run began with, and its differences from the edited file."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.job.change_rules import diff_documents, find_rule, flatten

MAX_VALUE_CHARS = 60  # characters of a value that is shown


def record_job_file(path: Path) -> dict[str, Any]:
    """Return the job file's path, digest and keys for the run's record."""
    content = path.read_bytes()
    return {
        "path": str(path.resolve()),
        "digest": hashlib.sha256(content).hexdigest(),
        "keys": tomllib.loads(content.decode("utf-8")),
    }


def describe_edits(
    recorded_file: Mapping[str, Any], document: Mapping[str, Any], run: str
) -> list[str]:
    """Return the notices for a resumed run whose job file has changed since.

    Returns none if the file is unchanged or missing, or now agrees with the run.
    """
    path = Path(recorded_file["path"])
    try:
        content = path.read_bytes()
    except OSError:
        return []
    if hashlib.sha256(content).hexdigest() == recorded_file["digest"]:
        return []
    goes_on = "the run continues with its own"
    try:
        now = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return [
            f"{path} was edited after the run began and is no longer valid TOML ({error}); "
            f"{goes_on} values"
        ]
    own = dict(flatten(document))
    found = diff_documents(recorded_file["keys"], now)
    differences = {key: new for key, (_, new) in found.items() if key not in own or own[key] != new}
    if not differences:
        return []
    lines = [f"{path} was edited after the run began; {goes_on} values:"]
    may: list[str] = []
    for key, value in differences.items():
        try:
            fixed = find_rule(key).fixed_reason
        except KeyError:
            fixed = "unknown key"
        if key not in own or value is None:
            lines.append(
                f"  {key}: {_format_value(own.get(key))} in the run, {_format_value(value)} "
                "in the file"
            )
            continue
        why = f" (cannot change: {fixed})" if fixed else ""
        lines.append(
            f"  {key}: {_format_value(own[key])} in the run, {_format_value(value)} in the "
            f"file{why}"
        )
        if not fixed:
            may.append(f"--set {key}={_to_toml_value(value)}")
    if may:
        lines.append(f"To apply the permitted changes: meshrl resume {run} {' '.join(may)}")
    return lines


def _format_value(value: Any) -> str:
    text = "nothing" if value is None else _to_toml_value(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def _to_toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)
