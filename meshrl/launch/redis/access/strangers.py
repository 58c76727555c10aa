"""Connections to Redis that do not say who they are: they take places of those that do, and are cut
off after a while, or where there are many.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from common.base.clock import Clock
from common.base.errors import DeadlineExceeded, StateUnavailable
from common.state.redis.client import State

INTERVAL_S = 1.0
PATIENCE_S = 5  # for a handshake and a password: milliseconds, and a second on a busy host
MOST = 64  # that are waited for at a time; all clients together are 10,000 at most
ANSWER_S = 5.0
# A client of no user is listed as one of `default`, whose password nobody has.
STRANGER = re.compile(r"\bid=(\d+) .*\bage=(\d+) .*\buser=default\b")


def too_many(listed: str) -> list[str]:
    """The ids of those to cut off, of all clients as Redis lists them: the oldest first."""
    found = [match.groups() for match in map(STRANGER.search, listed.splitlines()) if match]
    by_age: Sequence[tuple[str, int]] = sorted(
        ((client, int(age)) for client, age in found), key=lambda one: -one[1]
    )
    spare = len(by_age) - MOST
    return [client for n, (client, age) in enumerate(by_age) if age >= PATIENCE_S or n < spare]


async def cut_off(owner: State, clock: Clock) -> None:
    while True:
        await clock.sleep(INTERVAL_S)
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            listed = await owner.command("CLIENT", "LIST", deadline_s=ANSWER_S)
            for client in too_many(str(listed)):
                await owner.command("CLIENT", "KILL", "ID", client, deadline_s=ANSWER_S)
