"""Real SGLang server for a process of tests, started once because that takes half a minute.

It serves the tiny model of the engine tests. Tests that break a server start their own.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang.engine import SGLangEngine, attach_engine
from meshrl.services.engine.sglang.launch_config import LaunchConfig
from meshrl.services.engine.sglang.server import SGLangServer
from tests.load import scaled
from tests.sglang.interpreter import python
from tests.unit.common.generation.engines_under_test import TINY, decoder, text_of

START_S, STOP_S = 500.0, 20.0  # on a shared machine
SLOTS, MAX_LENGTH = 64, 1000


def start(place: Path | None = None, **more: Any) -> SGLangServer:
    """Start a server from the main thread, because it exits with the thread that started it.

    Afterwards the loop runs on another thread: tests take the role of an engine's thread.
    """
    place = place or Path(tempfile.mkdtemp(prefix="sglang-"))
    options = LaunchConfig(str(python()), place, SLOTS, MAX_LENGTH, **more)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        SGLangServer.start(SystemHost(), SystemClock(), options, TINY, deadline_s=scaled(START_S))
    )
    threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()
    return server


def stop(server: SGLangServer) -> None:
    server.http.spawn(server.stop()).result(scaled(STOP_S))
    shutil.rmtree(server.launch_config.directory)


class Shared:
    """Server that tests share, and the engine that uses it at the moment."""

    server: SGLangServer | None = None
    engine: SGLangEngine | None = None


def server() -> SGLangServer:
    if Shared.server is None:
        Shared.server = start()
        atexit.register(stop, Shared.server)
    return Shared.server


def engine(slots: int = 4, max_length: int = 128, seed: int = 0, **more: Any) -> SGLangEngine:
    """Return an engine with the weights of `decoder(seed)`; the previous one has left its server
    idle.
    """
    release()
    more = {"decode": text_of, **more}
    Shared.engine = attach_engine(server(), TINY, slots, max_length, **more)
    Shared.engine.wake(decoder(seed).state_dict(), 0)
    return Shared.engine


def release() -> None:
    if Shared.engine is not None:
        Shared.engine.close()
        Shared.engine = None
