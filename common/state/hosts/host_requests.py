"""What the gateway asks of the launcher, who alone lets hosts in and out: by Redis, as neither is
an actor of the other. No secret passes: of a host's passwords the launcher is told digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError, from_wire, to_wire
from meshrl.common.state.redis.client import StateClient

# Kinds of what is asked.
JOIN, LEAVE, DRAIN, RETURN, LOCATE = "join", "leave", "drain", "back", "where"
ANSWER_TIMEOUT_S = 60.0  # who asks gives up then
ANSWER_RETENTION_S = 300.0
POLL_S = 0.2  # between two looks for the answer


@dataclass(frozen=True, slots=True)
class HostRequest:
    """One question."""

    id: str
    kind: str
    about: Mapping[str, Any]


async def submit_host_request(
    state: StateClient,
    clock: Clock,
    id: str,
    kind: str,
    arguments: Mapping[str, Any],
    deadline_s: float = ANSWER_TIMEOUT_S,
) -> dict[str, Any]:
    """The launcher's answer, once for `id`; the MeshError of its refusal; DeadlineExceeded."""
    until = clock.monotonic() + deadline_s
    while True:
        text = (await state.run_mesh_script("ask", id=id, kind=kind, about=dict(arguments)))[
            "answer"
        ]
        if text:
            answer: dict[str, Any] = json.loads(text)
            if "refusal" in answer:
                raise from_wire(*answer["refusal"])
            return answer
        if clock.monotonic() > until:
            raise DeadlineExceeded(
                f"the launcher of the mesh has not answered within {deadline_s:g} s",
                fix="See its log, mesh/logs/launcher.log at the head, and try again",
            )
        await clock.sleep(POLL_S)


async def read_pending_requests(state: StateClient) -> list[HostRequest]:
    """What has no answer yet, in the order in which it was asked."""
    rows = (await state.run_mesh_script("asked", waits_ms=int(1000 * ANSWER_TIMEOUT_S)))["rows"]
    found = [json.loads(text) for text in rows or []]
    return [HostRequest(row["id"], row["kind"], row["about"] or {}) for row in found]


async def answer_host_request(
    state: StateClient, id: str, answer: Mapping[str, Any] | MeshError
) -> None:
    """Gives an answer, or a refusal."""
    told = {"refusal": to_wire(answer)} if isinstance(answer, MeshError) else dict(answer)
    await state.run_mesh_script(
        "answer", id=id, answer=json.dumps(told), kept_ms=int(1000 * ANSWER_RETENTION_S)
    )
