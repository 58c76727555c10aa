"""Calls of a pool of workers: their functions, limits and encoding."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgpack

from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.process.entry.child import MAX_FRAME_BYTES
from meshrl.services.sandbox.outcomes import CallResult
from meshrl.services.sandbox.workers.worker import format_name

# for the arguments of a slice; the rest is names and ids
FRAME_BYTES = MAX_FRAME_BYTES - (64 << 10)
RLIMITS = {"AS": 2 << 30, "NOFILE": 256, "CORE": 0, "FSIZE": 64 << 20}


@dataclass(frozen=True)
class PoolLimits:
    """Limits of a pool and of each of its processes."""

    warm_workers: int = 2  # workers started with the job
    max_workers: int = 4  # workers, when calls wait
    rlimits: dict[str, int] = field(default_factory=lambda: dict(RLIMITS))
    nice: int = 0
    max_calls_per_worker: int = (
        5000  # calls that a process serves; memory leaks of libraries end with it
    )


@dataclass(frozen=True)
class PoolCall:
    """Call of one of a pool's functions."""

    name: str
    arguments: list[Any]
    deadline_s: float
    no_retry: bool = False  # not repeated when its process is lost


@dataclass(frozen=True)
class PoolFunctions:
    """Functions that the workers of a pool import and run."""

    job: str
    directory: str  # first on the search path
    references: dict[str, str]  # by name: "module:function", or "mcp:server/tool"
    mcp_servers: dict[str, list[str]] = field(default_factory=dict)  # MCP server -> its command
    is_confined: bool = False  # they need no files, programs or network, and get none


@dataclass
class WaitingCall:
    """Call that waits for a worker or for its answer."""

    call: PoolCall
    result: asyncio.Future[CallResult]
    batch: list[WaitingCall]  # the calls of its batch
    attempts: int = 0


def pack_arguments(call: PoolCall) -> tuple[str, bytes]:
    """Return ("", a call's arguments as MessagePack), or (the error in them, nothing)."""
    name = format_name(call.name)
    try:
        packed: bytes = msgpack.packb(call.arguments)
    except (OverflowError, UnicodeEncodeError, ValueError, TypeError) as error:
        return f"the arguments of {name} cannot be encoded with MessagePack: {error}", b""
    if len(packed) > FRAME_BYTES:
        return f"the arguments of {name} have {len(packed)} bytes; the limit is {FRAME_BYTES}", b""
    return "", packed


def unpack_result(frame: bytes) -> tuple[int, str, Any, str]:
    try:
        call_id, status, value, error = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.UnpackException) as problem:
        raise BadMessage(f"an answer is invalid: {problem}") from None
    return call_id, status, value, error
