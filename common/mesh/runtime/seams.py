"""Parts that a mesh is made of: the seams by which it touches the world, its terms, its access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshrl.common.api.calls.callers import Callers
from meshrl.common.base.clock import Clock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.doorway import Doorway
from meshrl.common.mesh.transport.base import Transport
from meshrl.common.state.redis.client import State


@dataclass(frozen=True)
class Seams:
    """The five seams of a process. The mesh closes the state only if it owns it."""

    state: State
    transport: Transport
    clock: Clock
    random: Random
    host: Host
    owns_state: bool = False


@dataclass(frozen=True)
class Terms:
    """Terms of the lease of a process, in seconds, and what is called when the lease is lost."""

    ttl_s: float = 6.0
    renew_s: float = 1.5
    stall_s: float = 30.0  # without a tick of the event loop, until the lease is not renewed
    on_lost: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Access:
    """Rules of who may call whom, and the doorway where each process has a key of its own.

    Without `callers` every role may call every method.
    """

    callers: Callers | None = None
    doorway: Doorway | None = None


OPEN = Access()
