"""Hints for files of other kinds that are passed as a TOML file."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from meshrl.job.toml.writer import to_toml

_JOB_FILE = "job.toml"  # as `meshrl init` names it


def suggest_path(path: Path, is_job: bool) -> str:
    """Return what to type instead of a path that is no readable file; empty if unknown."""
    if (path / "job.json").is_file():
        return f"{path} is a run: `meshrl resume {path}` continues it"
    if path.is_dir():
        files = sorted(path.glob("*.toml"), key=lambda file: file.name != _JOB_FILE)
        return f"Name its job file, such as {files[0]}" if files else "Name a TOML file"
    if path.parent.is_dir():
        files = sorted(path.parent.glob("*.toml"))
        close = difflib.get_close_matches(path.name, [file.name for file in files], 1)
        if close:
            return f"Did you mean {path.with_name(close[0])}?"
    return "`meshrl init NAME` writes a job that runs" if is_job else ""


def describe_foreign_text(path: Path, text: str) -> tuple[str, str]:
    """Return what a file is that is no TOML, and its fix; empty texts if it is meant as TOML."""
    if path.suffix in (".py", ".jsonl", ".csv", ".parquet"):
        kind = "Python code" if path.suffix == ".py" else "a dataset"
        return f"{path} is {kind}, not a TOML file", "Name a job file, such as job.toml"
    if path.suffix not in (".yaml", ".yml", ".json"):
        return "", ""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    target = path.with_suffix(".toml")
    try:
        document = yaml.safe_load(text)
        same = to_toml(document).strip() if isinstance(document, dict) else ""
    except (yaml.YAMLError, TypeError):
        same = ""
    equivalent = f"Write this to {target}:\n\n{same}" if same else f"Write it as TOML to {target}"
    return f"{path} is {kind}, and files of MeshRL are TOML", equivalent
