"""Requests of the gateway to the launcher, which alone admits and removes hosts.

They pass through Redis, as neither is an actor of the other. No secret passes: the launcher
receives digests of a host's passwords.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError, from_wire, to_wire
from meshrl.common.state.redis.client import StateClient

# Kinds of requests.
JOIN, LEAVE, DRAIN, RETURN, LOCATE = "join", "leave", "drain", "back", "where"
NOTICE = "notice"
ANSWER_TIMEOUT_S = 60.0  # then the caller gives up
ANSWER_RETENTION_S = 300.0
POLL_S = 0.2  # between two polls for the answer


@dataclass(frozen=True, slots=True)
class HostRequest:
    """Request of the gateway."""

    id: str
    kind: str
    arguments: Mapping[str, Any]


async def submit_host_request(
    state: StateClient,
    clock: Clock,
    id: str,
    kind: str,
    arguments: Mapping[str, Any],
    deadline_s: float = ANSWER_TIMEOUT_S,
) -> dict[str, Any]:
    """Submit a request, once for `id`, and return the launcher's answer.

    Raise the MeshError of its rejection, or DeadlineExceeded.
    """
    until = clock.monotonic() + deadline_s
    while True:
        text = (
            await state.run_mesh_script(
                "submit_host_request", id=id, kind=kind, arguments=dict(arguments)
            )
        )["answer"]
        if text:
            answer: dict[str, Any] = json.loads(text)
            if "error" in answer:
                raise from_wire(*answer["error"])
            return answer
        if clock.monotonic() > until:
            raise DeadlineExceeded(
                f"the launcher of the mesh has not answered within {deadline_s:g} s",
                fix="Read its log, mesh/logs/launcher.log at the head, and try again",
            )
        await clock.sleep(POLL_S)


async def read_pending_requests(state: StateClient) -> list[HostRequest]:
    """Return the requests without an answer, in the order of submission."""
    rows = (
        await state.run_mesh_script("pending_host_requests", waits_ms=int(1000 * ANSWER_TIMEOUT_S))
    )["rows"]
    found = [json.loads(text) for text in rows or []]
    return [HostRequest(row["id"], row["kind"], row["arguments"] or {}) for row in found]


async def answer_host_request(
    state: StateClient, id: str, answer: Mapping[str, Any] | MeshError
) -> None:
    """Answer a request, or reject it."""
    document = {"error": to_wire(answer)} if isinstance(answer, MeshError) else dict(answer)
    await state.run_mesh_script(
        "answer_host_request",
        id=id,
        answer=json.dumps(document),
        kept_ms=int(1000 * ANSWER_RETENTION_S),
    )
