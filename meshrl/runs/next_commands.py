"""Commands that use a finished run, printed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.job.config import JobConfig
from meshrl.common.job.evaluation_plan import can_evaluate
from meshrl.directory.directory_paths import format_path


def list_next_commands(run_dir: Path, content: Mapping[str, Any]) -> list[str]:
    """Return a line for each command that uses the run; `content` is that of its `job.json`."""
    run = format_path(run_dir)
    job = format_path(Path(content["file"]["path"])) if content.get("file") else ""
    found = []
    if (run_dir / "model/config.json").is_file():
        found.append((f"meshrl chat {run}", "talk to the model"))
        document = {key: value for key, value in content["document"].items() if key != "bundle"}
        if job and can_evaluate(JobConfig.from_document(document)):
            found.append((f"meshrl eval {run} {job}", "evaluate it again"))
    found.append((f"meshrl samples {run}", "read its trajectories"))
    found.append((f"meshrl resume {run} budget.steps=N", "train it further"))
    width = max(len(command) for command, _ in found)
    return [f"  {command:<{width}}  {purpose}" for command, purpose in found]
