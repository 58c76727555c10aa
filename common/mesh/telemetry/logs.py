"""Logs and counters: JSON lines on stderr with the service's name, the job that it serves and the
trace of the call that it answers, if any; and a plain dict that is published with every renewal of
the lease.
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

LOG_INTERVAL_S = 30.0  # between two lines of the log, however many there are

RejectionCounter = Callable[[], Mapping[str, int]]


class _LossyLog:
    """The process's stderr; on a full disk a line is lost, and nobody fails for it."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def log_to_stderr(service: str, job: str = "") -> None:
    """Sets up this process's log: one JSON object a line, with the service's name, and the `job`
    of a process that serves one.
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
    """Asked of lines that are written alone: who logs nothing pays nothing."""
    if trace := read_trace_id():
        line.setdefault("trace", trace)
    return line


class Telemetry:
    """What one process counts. Plain numbers in plain dicts: reading them from another thread is
    safe.
    """

    def __init__(self, service: str, job: str = "") -> None:
        self.log: Any = structlog.get_logger(**_make_log_context(service, job))
        self.counters: dict[str, float] = {}

    def count(self, name: str, by: float = 1) -> None:
        """Adds `by` to a counter, which begins at 0."""
        self.counters[name] = self.counters.get(name, 0) + by


class ConnectionRejections:
    """Sum over the listeners of a process of the connections that each has turned away."""

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
        self._telemetry.log.warning("connections were turned away", **new)
        self._logged, self._logged_at = rejected, now
