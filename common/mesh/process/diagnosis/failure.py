"""Failure report of an exited process for its parent: a file beside its log.

The entry point of every process that a Host starts writes the file (`child.py`, `fork_setup.py`,
`Host.exit`). So it also covers a failed import, and works while Redis is unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from meshrl.common.base.errors import (
    ConfigError,
    Fenced,
    MeshError,
    RankLost,
    StateUnavailable,
    StorageFull,
    ToolFailed,
)
from meshrl.common.mesh.process.diagnosis import host_limits

FAILURE_ENV = "MESHRL_FAILURE"  # path of the file
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
TAIL_BYTES = 1 << 18  # bytes of a log: enough for any readable number of lines
MAX_TEXT_CHARS = 10_000  # of an error, which may come from a job's code
SITE_PACKAGES = "site-packages"
ROOT = Path(__file__).parents[4]  # of our own packages

# Effect of a restart on the error of a process. `never`: it fails again. `counted`: it may fail
# again, so restarts are counted. `patient`: it helps once the other process or the lease of the
# error is back; the supervisor waits while the job makes progress, and some minutes without.
# `always`: it helps once a reported outage is over: a full disk, or Redis unavailable.
RestartClass = Literal["never", "counted", "patient", "always"]
FATAL_ERRORS = (ConfigError, ToolFailed)
EXTERNAL_ERRORS = (Fenced, RankLost)
OUTAGE_ERRORS = (StorageFull, StateUnavailable)


@dataclass(frozen=True)
class Failure:
    """Error that ended a process. `where` is a file and line if the error names no place."""

    type: str
    text: str
    where: str = ""
    fix: str = ""
    restart: RestartClass = "counted"
    job: str = ""  # job that it worked for, if it serves several

    @classmethod
    def from_error(cls, error: BaseException, job: str = "") -> Failure:
        """Convert an exception to a failure."""
        name = type(error).__name__
        if isinstance(error, MeshError):
            where = error.where or locate_error(error)
            fix = error.fix or host_limits.explain_hit_limit(error.__cause__ or error)
            return cls(name, error.message, where, fix, classify_restart(error), job)
        if isinstance(error, SystemExit):
            return cls(name, str(error.code), job=job)
        try:
            text = str(error)
        except Exception:  # the exception's class comes from a job's code
            text = ""
        if len(text) > MAX_TEXT_CHARS:
            text = f"{text[:MAX_TEXT_CHARS]}... ({len(text) - MAX_TEXT_CHARS} more characters)"
        return cls(
            name,
            text,
            locate_error(error),
            host_limits.explain_hit_limit(error),
            classify_restart(error),
            job,
        )

    @property
    def is_fatal(self) -> bool:
        """True if a restarted process can only fail again."""
        return self.restart == "never"

    def to_event_fields(self) -> dict[str, str]:
        """Return the fields of an event that reports this failure."""
        return {"type": self.type, "text": self.text, "where": self.where, "fix": self.fix}

    def __str__(self) -> str:
        text = f"{self.type}: {self.text}" if self.text else self.type
        text = f"{text} (at {self.where})" if self.where else text
        return f"{text}. {self.fix}" if self.fix else text


def format_failure(fields: dict[str, Any]) -> str:
    """Format the fields of `Failure.to_event_fields`; empty for no failure."""
    kind, text, where, fix = (str(fields.get(n, "")) for n in ("type", "text", "where", "fix"))
    return str(Failure(kind, text, where, fix)) if kind else ""


def classify_restart(error: BaseException) -> RestartClass:
    """Classify whether a restart of the process helps against this error."""
    if isinstance(error, FATAL_ERRORS):
        return "never"
    if isinstance(error, MeshError):
        others = error.retryable or isinstance(error, EXTERNAL_ERRORS)
        return "always" if isinstance(error, OUTAGE_ERRORS) else "patient" if others else "counted"
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return "always"
    return "patient" if isinstance(error, asyncio.CancelledError) else "counted"


def locate_error(error: BaseException) -> str:
    """Return `file:line` of the last frame in our code or a job's; of any code if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("<", sys.base_prefix)
    own = [
        f for f in frames if not f.filename.startswith(others) and SITE_PACKAGES not in f.filename
    ]
    if not frames:
        return ""
    last = (own or frames)[-1]
    path = Path(last.filename)
    display_path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{display_path}:{last.lineno}"


def failure_path(log: Path) -> Path:
    """Return the path where a process with this log writes its failure."""
    return log.with_suffix(".failure.json")


def write_failure(error: BaseException, job: str = "") -> None:
    """Write the failure that ends this process, if its parent has named a file."""
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return  # the parent reads the exit status anyway
    path = os.environ.get(FAILURE_ENV)
    if path:
        content = {"pid": os.getpid(), "parent": os.getppid()} | asdict(
            Failure.from_error(error, job)
        )
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            with contextlib.suppress(OSError):
                os.close(0)  # stdin is no longer read, and the file needs a descriptor
        with contextlib.suppress(OSError):  # a full disk: only the exit status remains
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def read_failure(log: Path | None, pid: int) -> Failure | None:
    """Read the failure of the process with this pid, or of the process that it guarded.

    Returns None if it has left none beside its log.
    """
    if log is None:
        return None
    try:
        content = json.loads(failure_path(log).read_bytes())
        left_by = content.pop("pid"), content.pop("parent", 0)
        return Failure(**content) if pid in left_by else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing or truncated
        return None


def read_tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file without reading all of it."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def read_log_end(log: Path | None, lines: int = 3) -> str:
    """Return the last lines of a log joined into one; empty without a log."""
    if log is None or not log.is_file():
        return ""
    return " / ".join(line.strip() for line in read_tail(log, lines) if line.strip())
