"""MeshRL's command line, and its equivalents for Python, with the errors that they raise.

`run`, `start`, `resume` and `Run` train on a mesh of their own, `Client` on a running mesh. Open
`cli/runs.py` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrl.client.client import Client
    from meshrl.common.base.errors import (
        ConfigError,
        DeadlineExceeded,
        MeshError,
        NotFound,
        Refused,
        StateUnavailable,
    )
    from meshrl.scripting.python_runs import JobFailed, Run, resume, run, start

__all__ = [
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "JobFailed",
    "MeshError",
    "NotFound",
    "Refused",
    "Run",
    "StateUnavailable",
    "resume",
    "run",
    "start",
]
_RUN_NAMES = ("JobFailed", "Run", "resume", "run", "start")


def __getattr__(name: str) -> Any:
    """Import each name when it is used: `import meshrl` stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Client":
        from meshrl.client import client as module
    elif name in _RUN_NAMES:
        from meshrl.scripting import python_runs as module  # type: ignore[no-redef]
    else:
        from meshrl.common.base import errors as module  # type: ignore[no-redef]
    return getattr(module, name)
