"""MeshRL's command line, and `Client`, its equivalent for Python, with the errors that it raises.
Open `cli/runs.py` first.
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

__all__ = [
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "MeshError",
    "NotFound",
    "Refused",
    "StateUnavailable",
]


def __getattr__(name: str) -> Any:
    """Import `Client` and errors when they are used: `import meshrl` stays cheap."""
    if name == "Client":
        from meshrl.client.client import Client

        return Client
    if name in __all__:
        from meshrl.common.base import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
