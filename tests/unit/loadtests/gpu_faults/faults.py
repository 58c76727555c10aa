"""Cases that pass, are skipped, raise, hang, exit or are killed."""

from __future__ import annotations

import os
import signal
import time

from loadtests.gpu.plan import Figures, Incorrect, Settings, Skipped


def succeed(settings: Settings) -> Figures:
    return {"pid": os.getpid()}


def skip(settings: Settings) -> Figures:
    raise Skipped("it cannot run")


def fail(settings: Settings) -> Figures:
    raise Incorrect("it differs")


def be_killed(settings: Settings) -> Figures:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hang(settings: Settings) -> Figures:
    time.sleep(3600)
    return {}


def exit_early(settings: Settings) -> Figures:
    os._exit(3)


CASES = {
    "first": succeed,
    "skipped": skip,
    "incorrect": fail,
    "killed": be_killed,
    "hung": hang,
    "exited": exit_early,
    "last": succeed,
    "very_last": succeed,
}
