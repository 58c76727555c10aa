"""Dependencies of a mesh: its interfaces to the outside, its lease terms, its access rules."""

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
    """Five external interfaces of a process. The mesh closes the state only if it owns it."""

    state: StateClient
    transport: Transport
    clock: Clock
    random: Random
    host: Host
    owns_state: bool = False


@dataclass(frozen=True)
class LeaseTerms:
    """Terms of the lease of a process, in seconds, and the callback for its loss."""

    ttl_s: float = 6.0
    renew_interval_s: float = 1.5
    stall_limit_s: float = 30.0  # without a tick of the event loop before renewals stop
    on_lost: Callable[[str], None] | None = None


@dataclass(frozen=True)
class AccessRules:
    """Permitted calls by role, and the credentials where each process has its own key.

    Without `callers` every role may call every method.
    """

    callers: CallPermissions | None = None
    credentials: ProcessCredentials | None = None


UNRESTRICTED = AccessRules()
