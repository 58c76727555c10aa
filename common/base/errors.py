"""Errors that cross the wire: each states what happened, where, and what to do."""

from __future__ import annotations

from typing import ClassVar

_BY_CODE: dict[str, type[MeshError]] = {}


class MeshError(Exception):
    """Base of every error a caller may see.

    `where` names the process or file, `fix` a remedy. `retryable` is True if the same call may
    succeed later, elsewhere or after a new lookup. A subclass has its own code, and can be created
    from a message and `where` only, as `from_wire` does.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Raise TypeError if another class has its code: `from_wire` could not distinguish them."""
        super().__init_subclass__()
        known = _BY_CODE.get(cls.code, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"{cls.__qualname__} needs its own code: {known} already has '{cls.code}'"
            )
        _BY_CODE[cls.code] = cls

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.message} (at {self.where})" if self.where else self.message
        return f"{text}. {self.fix}" if self.fix else text


class DeadlineExceeded(MeshError):
    """Error raised when an operation exceeds its deadline; it may still complete."""

    code = "deadline_exceeded"
    retryable = True


class StillStarting(DeadlineExceeded):
    """Error raised while a start makes progress, which ends by its own limit."""

    code = "still_starting"


class PeerLost(MeshError):
    """Error raised when the callee's process has exited; it may have acted."""

    code = "peer_lost"
    retryable = True


class HandshakeFailed(PeerLost):
    """Error raised when a process and the one at the called address cannot authenticate each other.

    It is of another mesh, or takes this process for an unauthenticated peer. No request has
    arrived.
    """

    code = "handshake_failed"


class WrongKeys(HandshakeFailed):
    """Error raised when a handshake fails for longer than a restart takes."""

    code = "wrong_keys"
    retryable = False


class RankLost(MeshError):
    """Error raised when a rank of a training gang has exited or hangs: the gang's computation is
    lost.
    """

    code = "rank_lost"


class StaleIncarnation(MeshError):
    """Error raised when the address belongs to another incarnation of the process."""

    code = "stale_incarnation"
    retryable = True


class UnknownMethod(MeshError):
    """Error raised when the called actor has no such method."""

    code = "unknown_method"


class BadMessage(MeshError):
    """Error raised for bytes that do not decode to the expected message."""

    code = "bad_message"


class Overloaded(MeshError):
    """Error raised when a bounded queue is full."""

    code = "overloaded"
    retryable = True


class Fenced(MeshError):
    """Error raised when the caller has lost its lease, epoch or leadership."""

    code = "fenced"


class NotFound(MeshError):
    """Error raised when a named object, such as a job, a version or a chunk, does not exist."""

    code = "not_found"


class NotAllowed(MeshError):
    """Error raised when the caller's role may not call a method.

    See common/api/calls/call_permissions.py.
    """

    code = "not_allowed"


class Refused(MeshError):
    """Error raised for a valid request that is not allowed now."""

    code = "refused"


class AlreadyCommitted(Refused):
    """Error raised when a version of a lineage is recorded with other weights."""

    code = "already_committed"


class ConfigError(MeshError):
    """Error raised when a job file or an option has an unusable value."""

    code = "config_error"


class StateUnavailable(MeshError):
    """Error raised when Redis does not answer."""

    code = "state_unavailable"
    retryable = True


class StorageFull(MeshError):
    """Error raised when a disk is full; no acknowledged data is lost."""

    code = "storage_full"
    retryable = True


class QuotaExceeded(StorageFull):
    """Error raised when a job's versions would exceed its quota in the store; no data is lost."""

    code = "quota_exceeded"


class CorruptData(MeshError):
    """Error raised when a durable file has changed; see `meshrl.common.base.files.corruption`."""

    code = "damaged"


class HistoryLost(MeshError):
    """Error raised when unread events are gone. Those after `through` are available."""

    code = "history_lost"

    def __init__(
        self, message: str, *, where: str = "", fix: str = "", since: str = "", through: str = ""
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.since, self.through = since, through


class ToolFailed(MeshError):
    """Error raised when a tool or reward of the job's author hung, raised or returned garbage."""

    code = "tool_failed"


class RemoteFailure(MeshError):
    """Error raised when the callee raised something other than a MeshError."""

    code = "remote_failure"


_BY_CODE[MeshError.code] = MeshError


def to_wire(error: BaseException) -> tuple[str, str]:
    """Convert any exception to (code, text).

    Exceptions other than MeshError become a RemoteFailure with the name of their type.
    """
    if isinstance(error, MeshError):
        return error.code, str(error)
    return RemoteFailure.code, f"{type(error).__name__}: {error}"


def from_wire(code: str, text: str, where: str = "") -> MeshError:
    """Create the error that a peer reported, of the class with its code (RemoteFailure if
    unknown).
    """
    return _BY_CODE.get(code, RemoteFailure)(text, where=where)
