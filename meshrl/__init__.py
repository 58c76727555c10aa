"""The command line and what it does, which is all that users of a mesh call, and `Client`, which is
the same for Python. Open `cli/runs.py` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrl.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """`Client` is imported when it is asked for: `import meshrl` stays cheap."""
    if name == "Client":
        from meshrl.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
