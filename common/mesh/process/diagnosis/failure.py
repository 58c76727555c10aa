"""What ended a process, as whoever started it finds it: a file beside its log.

The entry of every process that a Host starts writes it (`child.py`, `fork_setup.py`, `Host.exit`),
so that it tells of a failed import too, and while Redis is away.
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
TAIL_BYTES = 1 << 18  # of a log: enough for any number of lines one would read
MAX_TEXT_CHARS = 10_000  # of an error, which may be of a job's author
SITE_PACKAGES = "site-packages"
ROOT = Path(__file__).parents[4]  # of our own packages

# What starting a process again does about its error: nothing; perhaps nothing, so that the tries
# are counted; it is the cure once the other process or the lease that the error tells of is back,
# which is waited for while the job makes progress, and for some minutes without; or, always, once
# an outage is over that is shown to people: a full disk, or Redis away.
RestartClass = Literal["never", "counted", "patient", "always"]
FATAL_ERRORS = (ConfigError, ToolFailed)
EXTERNAL_ERRORS = (Fenced, RankLost)
OUTAGE_ERRORS = (StorageFull, StateUnavailable)


@dataclass(frozen=True)
class Failure:
    """An error that ended a process. `where` is a file and line where the error names nothing."""

    type: str
    text: str
    where: str = ""
    fix: str = ""
    restart: RestartClass = "counted"
    job: str = ""  # that it was at work for, if it serves more than one

    @classmethod
    def from_error(cls, error: BaseException, job: str = "") -> Failure:
        """The failure that an exception is."""
        name = type(error).__name__
        if isinstance(error, MeshError):
            where = error.where or locate_error(error)
            fix = error.fix or host_limits.explain_hit_limit(error.__cause__ or error)
            return cls(name, error.message, where, fix, classify_restart(error), job)
        if isinstance(error, SystemExit):
            return cls(name, str(error.code), job=job)
        try:
            text = str(error)
        except Exception:  # the exception is of a job's author
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
        """Whether the process would only fail again."""
        return self.restart == "never"

    def to_event_fields(self) -> dict[str, str]:
        """What an event tells of it."""
        return {"type": self.type, "text": self.text, "where": self.where, "fix": self.fix}

    def __str__(self) -> str:
        told = f"{self.type}: {self.text}" if self.text else self.type
        told = f"{told} (at {self.where})" if self.where else told
        return f"{told}. {self.fix}" if self.fix else told


def format_failure(fields: dict[str, Any]) -> str:
    """The text of `Failure.to_event_fields`; empty for none."""
    kind, text, where, fix = (str(fields.get(n, "")) for n in ("type", "text", "where", "fix"))
    return str(Failure(kind, text, where, fix)) if kind else ""


def classify_restart(error: BaseException) -> RestartClass:
    """Whether it helps to start a process again that this error has ended."""
    if isinstance(error, FATAL_ERRORS):
        return "never"
    if isinstance(error, MeshError):
        others = error.retryable or isinstance(error, EXTERNAL_ERRORS)
        return "always" if isinstance(error, OUTAGE_ERRORS) else "patient" if others else "counted"
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return "always"
    return "patient" if isinstance(error, asyncio.CancelledError) else "counted"


def locate_error(error: BaseException) -> str:
    """`file:line` of the last code of ours, or of a job's, that an exception came through; of
    anybody's if there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = ("<", sys.base_prefix)
    own = [
        f for f in frames if not f.filename.startswith(others) and SITE_PACKAGES not in f.filename
    ]
    if not frames:
        return ""
    last = (own or frames)[-1]
    path = Path(last.filename)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{shown}:{last.lineno}"


def failure_path(log: Path) -> Path:
    """Where a process with this log leaves what ended it."""
    return log.with_suffix(".failure.json")


def write_failure(error: BaseException, job: str = "") -> None:
    """Writes down what ends this process, if whoever started it has said where."""
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return  # an exit status, which is told anyway
    path = os.environ.get(FAILURE_ENV)
    if path:
        content = {"pid": os.getpid(), "parent": os.getppid()} | asdict(
            Failure.from_error(error, job)
        )
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            with contextlib.suppress(OSError):
                os.close(0)  # nothing is read from it any more, and the file takes a descriptor
        with contextlib.suppress(OSError):  # a full disk: then the exit status is all there is
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def read_failure(log: Path | None, pid: int) -> Failure | None:
    """What the process of this number, or the one that it guarded, has left beside its log when it
    ended.
    """
    if log is None:
        return None
    try:
        content = json.loads(failure_path(log).read_bytes())
        left_by = content.pop("pid"), content.pop("parent", 0)
        return Failure(**content) if pid in left_by else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or a torn one
        return None


def read_tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, without reading all of it."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def read_log_end(log: Path | None, lines: int = 3) -> str:
    """The last lines of a log in one; empty where it has none."""
    if log is None or not log.is_file():
        return ""
    return " / ".join(line.strip() for line in read_tail(log, lines) if line.strip())
