"""SGLang's server on the device: start, weights by each transport, tokens, sleep."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from loadtests.gpu.plan import TRANSPORTS, Figures, Settings, Skipped

if TYPE_CHECKING:
    from loadtests.gpu.sglang_server import CheckedServer

# The server has the device, and this process only calls it: an error leaves both able to continue.
CONTINUES_AFTER_ERRORS = True


def find_python(settings: Settings) -> str:
    """Return the interpreter that has SGLang; raise Skipped if there is none."""
    if settings.sglang_python:
        return settings.sglang_python
    if importlib.util.find_spec("sglang") is None:
        raise Skipped("SGLang is not installed here; --sglang-python names its interpreter")
    return sys.executable


def get_server(settings: Settings) -> CheckedServer:
    """Return the running server of this process, which is started by the first case."""
    python = find_python(settings)
    if python not in _RUNNING:
        from loadtests.gpu.sglang_server import CheckedServer

        _RUNNING[python] = CheckedServer(settings, python)
    return _RUNNING[python]


def close() -> None:
    """Stop the server; the runner calls this after the last case of the process."""
    for server in _RUNNING.values():
        server.close()


_RUNNING: dict[str, CheckedServer] = {}  # by interpreter


def build_transport_case(transport: str) -> Callable[[Settings], Figures]:
    return lambda settings: get_server(settings).measure_transport(transport)


CASES: dict[str, Callable[[Settings], Figures]] = {
    "start": lambda settings: get_server(settings).describe_start(),
    **{f"weights_{name}": build_transport_case(name) for name in TRANSPORTS},
    "tokens": lambda settings: get_server(settings).measure_tokens(),
    "sleep": lambda settings: get_server(settings).measure_sleep(),
}
