"""Logs and counters: JSON lines on stderr with the service's name, and a plain dict that is
published with every renewal of the lease.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast

import structlog


class _Lossy:
    """The process's stderr; on a full disk a line is lost, and nobody fails for it."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def log_to_stderr(service: str, level: int = logging.INFO) -> None:
    """Sets up this process's log: one JSON object a line, with the service's name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lossy())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


class Telemetry:
    """What one process counts. Plain numbers in plain dicts: reading them from another thread is
    safe.
    """

    def __init__(self, service: str) -> None:
        self.log: Any = structlog.get_logger(service=service)
        self.counters: dict[str, float] = {}

    def count(self, name: str, by: float = 1) -> None:
        """Adds `by` to a counter, which begins at 0."""
        self.counters[name] = self.counters.get(name, 0) + by

    def snapshot(self) -> dict[str, float]:
        """All counters and gauges as they are now."""
        return dict(self.counters)
