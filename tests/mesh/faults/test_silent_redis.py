"""Redis is silent for longer than a lease: everybody goes on, and nobody starts again for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.mesh.running import Run

pytestmark = pytest.mark.timeout(300)
SILENT_S = 6.5  # longer than a lease, shorter than what Redis is restarted for
AT_WORK = ("rollout/digits/0", "trainer/digits", "weights", "worker/w0", "worker/w1", "planner/0")


def test_all_processes_outlive_an_outage_that_outlasts_their_leases(
    run: Callable[..., Run],
) -> None:
    mesh = run(budget__steps=60, rollout__max_tokens=200)
    mesh.until("a step", lambda: mesh.version >= 2)
    before = {name: mesh.pid(name) for name in AT_WORK}
    redis = int(mesh.redis.info("server")["process_id"])
    version = mesh.version
    os.kill(redis, signal.SIGSTOP)
    time.sleep(SILENT_S)
    os.kill(redis, signal.SIGCONT)
    mesh.until("steps after the outage", lambda: mesh.version > version + 2)
    assert {name: mesh.pid(name) for name in AT_WORK} == before
    mesh.program.send_signal(signal.SIGINT)
    assert mesh.finish() == 130, mesh.said
    assert mesh.audit()["lost"] == 0
