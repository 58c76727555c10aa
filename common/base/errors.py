"""Errors that cross the wire: each says what happened, where, and what to do."""

from __future__ import annotations

from typing import ClassVar

_BY_CODE: dict[str, type[MeshError]] = {}


class MeshError(Exception):
    """Base of every error a caller may see.

    `where` names the process or file, `fix` what the reader can do. `retryable` tells a caller that
    the same call may succeed later, elsewhere or after a new look-up. A subclass has a code of its
    own, and can be made of a message and `where` alone, as `from_wire` does.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """TypeError when another class has its code: a peer's error would be raised as the wrong
        one of the two.
        """
        super().__init_subclass__()
        known = _BY_CODE.get(cls.code, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__qualname__} needs a code of its own: {known} has '{cls.code}'")
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
    """Something took longer than its caller would wait; whether it still happens is unknown."""

    code = "deadline_exceeded"
    retryable = True


class PeerLost(MeshError):
    """The process that was asked has gone; whether it acted is unknown."""

    code = "peer_lost"
    retryable = True


class HandshakeFailed(PeerLost):
    """Whatever answers at a process's address is not of this mesh, or takes us for strangers;
    nothing that was asked has arrived.
    """

    code = "handshake_failed"


class WrongKeys(HandshakeFailed):
    """A handshake fails for so long that no restart explains it."""

    code = "wrong_keys"
    retryable = False


class RankLost(MeshError):
    """A rank of a training gang has gone or hangs: what the gang was computing is lost with it."""

    code = "rank_lost"


class StaleIncarnation(MeshError):
    """The address now belongs to another start of the process."""

    code = "stale_incarnation"
    retryable = True


class UnknownMethod(MeshError):
    """The actor that was asked has no method of that name."""

    code = "unknown_method"


class BadMessage(MeshError):
    """Bytes that do not decode to the message that was expected."""

    code = "bad_message"


class Overloaded(MeshError):
    """A bounded queue is full."""

    code = "overloaded"
    retryable = True


class Fenced(MeshError):
    """A lease, epoch or leadership that the caller acted under is no longer its own."""

    code = "fenced"


class NotFound(MeshError):
    """The caller named something that does not exist there, such as a job, a version or a chunk."""

    code = "not_found"


class NotAllowed(MeshError):
    """A process of the caller's role may not call that; see
    common/api/calls/call_permissions.py.
    """

    code = "not_allowed"


class Refused(MeshError):
    """The request is understood and not allowed now."""

    code = "refused"


class AlreadyCommitted(Refused):
    """A version of a lineage has other weights on record than those that are offered for it."""

    code = "already_committed"


class ConfigError(MeshError):
    """A job file or an option holds something that cannot be run."""

    code = "config_error"


class StateUnavailable(MeshError):
    """Redis does not answer."""

    code = "state_unavailable"
    retryable = True


class StorageFull(MeshError):
    """A disk is full; nothing that was acknowledged is lost."""

    code = "storage_full"
    retryable = True


class QuotaExceeded(StorageFull):
    """A job's versions would have more bytes in the store than it may; nothing of it is lost."""

    code = "quota_exceeded"


class CorruptData(MeshError):
    """A durable file is not what was written; see `meshrl.common.base.files.corruption`."""

    code = "damaged"


class HistoryLost(MeshError):
    """Events that a reader has not read are gone. Those after `through` are there."""

    code = "history_lost"

    def __init__(
        self, message: str, *, where: str = "", fix: str = "", since: str = "", through: str = ""
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.since, self.through = since, through


class ToolFailed(MeshError):
    """A tool or reward of the job's author hung, raised or returned garbage."""

    code = "tool_failed"


class RemoteFailure(MeshError):
    """The callee raised something that is not a MeshError."""

    code = "remote_failure"


_BY_CODE[MeshError.code] = MeshError


def to_wire(error: BaseException) -> tuple[str, str]:
    """(code, text) of any exception; what is not a MeshError becomes a RemoteFailure with its
    type's name.
    """
    if isinstance(error, MeshError):
        return error.code, str(error)
    return RemoteFailure.code, f"{type(error).__name__}: {error}"


def from_wire(code: str, text: str, where: str = "") -> MeshError:
    """The error a peer reported, as the class its code names (RemoteFailure if it is unknown)."""
    return _BY_CODE.get(code, RemoteFailure)(text, where=where)
