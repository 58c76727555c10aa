"""Preemption notices of hosts, which the launcher of the head writes for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshrl.common.base.errors import Refused
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

NOTICES = f"{MESH_PREFIX}:notices"  # host -> notice, as JSON
UNKNOWN_TIME = 0.0  # `preempt_at_s` of a notice without a time: the host ends within seconds
MAX_TEXT_CHARS = 300


@dataclass(frozen=True)
class HostNotice:
    """Announced end of a host, or why its source of notices cannot be read, or both."""

    source: str = ""  # who will end it, as `EC2 (terminate)`; empty: not announced
    preempt_at_s: float | None = None  # seconds since 1970; UNKNOWN_TIME: within seconds
    failure: str = ""  # why its source cannot be read; empty: it can, or there is none

    @property
    def is_empty(self) -> bool:
        """True if nothing is announced, and its source can be read."""
        return not self.source and not self.failure

    def describe(self, now_s: float) -> str:
        """Return the notice for people at a wall clock time; empty if there is none."""
        return "; ".join(filter(None, (self._describe_end(now_s), self._describe_failure())))

    def _describe_end(self, now_s: float) -> str:
        if not self.source:
            return ""
        left_s = max(0.0, (self.preempt_at_s or 0.0) - now_s)
        return f"preempted {f'in {left_s:.0f} s' if left_s else 'at any moment'} by {self.source}"

    def _describe_failure(self) -> str:
        return f"its preemption notices cannot be read: {self.failure}" if self.failure else ""


def decode_notice(document: Mapping[str, Any]) -> HostNotice:
    """Return the notice of a document with its fields; Refused if it is invalid."""
    found = HostNotice(**document)
    at_s = found.preempt_at_s
    texts = found.source, found.failure
    if not all(isinstance(text, str) and len(text) <= MAX_TEXT_CHARS for text in texts):
        raise Refused(f"a preemption notice has no texts of at most {MAX_TEXT_CHARS} characters")
    if at_s is not None and not (math.isfinite(at_s) and at_s >= 0):
        raise Refused(f"a preemption notice has the invalid time {at_s!r:.40}")
    return found


async def write_notice(state: StateClient, host: str, notice: HostNotice) -> None:
    """Write the notice of a host; an empty one removes it."""
    if notice.is_empty:
        await state.run_command("HDEL", NOTICES, host)
    else:
        await state.run_command("HSET", NOTICES, host, json.dumps(asdict(notice)))


async def read_notice(state: StateClient, host: str) -> HostNotice:
    """Return the notice of a host; an empty one if there is none."""
    text = await state.run_command("HGET", NOTICES, host)
    return HostNotice(**json.loads(text)) if text else HostNotice()


async def read_notices(state: StateClient) -> dict[str, HostNotice]:
    """Return the notices of all hosts."""
    found = await state.run_command("HGETALL", NOTICES)
    pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
    return {host: HostNotice(**json.loads(text)) for host, text in pairs}
