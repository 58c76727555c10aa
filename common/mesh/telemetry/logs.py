"""Logs and counters of a process.

Logs are JSON lines on stderr with the service's name, its job, and the trace of the call that it
serves, if any. Counters are a plain dict that is published with every renewal of the lease.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO, cast

import structlog

from meshrl.common.mesh.telemetry.tracing import read_trace_id

LOG_INTERVAL_S = 30.0  # seconds between two log lines about rejections

RejectionCounter = Callable[[], Mapping[str, int]]


class _LossyLog:
    """Log to the process's stderr; a full disk drops a line without an error."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def log_to_stderr(service: str, job: str = "") -> None:
    """Configure this process's log: one JSON object per line with the service's name and `job`, if
    any.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_trace_id,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _LossyLog())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**_make_log_context(service, job))


def _make_log_context(service: str, job: str) -> dict[str, str]:
    return {"service": service, "job": job} if job else {"service": service}


def _add_trace_id(
    logger: Any, method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the trace id to written lines only, so that unwritten lines cost nothing."""
    if trace := read_trace_id():
        line.setdefault("trace", trace)
    return line


class Telemetry:
    """Counters and log of one process.

    Counters are plain numbers in plain dicts, which other threads can read safely.
    """

    def __init__(self, service: str, job: str = "") -> None:
        self.log: Any = structlog.get_logger(**_make_log_context(service, job))
        self.counters: dict[str, float] = {}

    def count(self, name: str, by: float = 1) -> None:
        """Add `by` to a counter, which starts at 0."""
        self.counters[name] = self.counters.get(name, 0) + by


class ConnectionRejections:
    """Sum of rejected connections over the listeners of a process."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._listeners: list[RejectionCounter] = []
        self._logged: dict[str, int] = {}
        self._logged_at = -LOG_INTERVAL_S

    def add_listener(self, listener: RejectionCounter) -> None:
        """Include a listener, which returns its rejected connections by reason."""
        self._listeners.append(listener)

    def report(self, now: float) -> None:
        """Count and log the connections since the last line of the log, one line a while."""
        rejected = dict(sum((Counter(listener()) for listener in self._listeners), Counter()))
        if rejected == self._logged or now - self._logged_at < LOG_INTERVAL_S:
            return
        new = {why: n - self._logged.get(why, 0) for why, n in rejected.items()}
        for why, number in new.items():
            self._telemetry.count(f"refused_{why}", number)
        self._telemetry.log.warning("connections were rejected", **new)
        self._logged, self._logged_at = rejected, now
