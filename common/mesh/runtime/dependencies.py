"""Parts that a mesh is made of: the seams by which it touches the world, its terms, its access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshrl.common.api.calls.call_permissions import CallPermissions
from meshrl.common.base.clock import Clock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.process_credentials import ProcessCredentials
from meshrl.common.mesh.transport.base import Transport
from meshrl.common.state.redis.client import StateClient


@dataclass(frozen=True)
class MeshDependencies:
    """The five seams of a process. The mesh closes the state only if it owns it."""

    state: StateClient
    transport: Transport
    clock: Clock
    random: Random
    host: Host
    owns_state: bool = False


@dataclass(frozen=True)
class LeaseTerms:
    """Terms of the lease of a process, in seconds, and what is called when the lease is lost."""

    ttl_s: float = 6.0
    renew_interval_s: float = 1.5
    stall_limit_s: float = 30.0  # without a tick of the event loop, until the lease is not renewed
    on_lost: Callable[[str], None] | None = None


@dataclass(frozen=True)
class AccessRules:
    """Rules of who may call whom, and the doorway where each process has a key of its own.

    Without `callers` every role may call every method.
    """

    callers: CallPermissions | None = None
    credentials: ProcessCredentials | None = None


UNRESTRICTED = AccessRules()
