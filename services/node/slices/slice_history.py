"""Recent decisions of a gang's slice scheduler, and the history of its slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from meshrl.common.api.node import (
    RETAINED_SLICES,
    ResidencyReport,
    SliceCandidate,
    SliceDecision,
    SliceRecord,
)
from meshrl.common.base.clock import Clock
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.slices.slice_policy import RankedCandidate
from meshrl.services.node.slices.slice_queue import Decision, SliceGrant

DECISIONS = 64  # retained ones


class SliceHistory:
    """Decisions and slices of one gang, with times of the wall clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._slices: deque[SliceRecord] = deque(maxlen=RETAINED_SLICES)
        self._running: dict[str, SliceRecord] = {}  # by ticket
        self.overdue: set[str] = set()  # tickets of slices that a kill ends
        self._count = 0
        self.switch_s, self.loaded_bytes, self.hidden_bytes = 0.0, 0, 0

    def add_decision(self, decision: Decision) -> None:
        """Add a decision; the oldest beyond the retained ones is dropped."""
        self._decisions.append(decision)

    def begin(self, grant: SliceGrant, job: str, reports: Sequence[ResidencyReport]) -> None:
        """Record the begin of a slice, with the moves of tensors before it."""
        self._count += 1
        request, offset_s = grant.request, self._wall_offset_s()
        record = self._running[request.ticket] = SliceRecord(
            number=self._count,
            instance=request.instance,
            job=job,
            function=request.function,
            ranks=sorted(request.ranks),
            requested_s=grant.requested_at + offset_s,
            chosen_s=grant.chosen_at + offset_s,
            granted_s=grant.granted_at + offset_s,
            ended_s=0.0,
            end="",
            moves=[move for report in reports for move in report.moves],
            hidden_bytes=sum(report.prefetched_bytes for report in reports),
        )
        self.switch_s += grant.granted_at - grant.chosen_at
        self.loaded_bytes += _count_loaded_bytes(record)
        self.hidden_bytes += record.hidden_bytes

    def describe_wait(self, ticket: str) -> tuple[int, int, float]:
        """Return what happened before a running slice.

        The bytes that were loaded for it, those that prefetches had loaded, and the seconds of
        other jobs' slices on its ranks while it waited.
        """
        record = self._running.get(ticket)
        if record is None:
            return 0, 0, 0.0
        others = (
            max(0.0, min(one.ended_s, record.chosen_s) - max(one.granted_s, record.requested_s))
            for one in self._slices
            if one.job != record.job and not set(one.ranks).isdisjoint(record.ranks)
        )
        return _count_loaded_bytes(record), record.hidden_bytes, sum(others)

    def end_others(self, running: Collection[str], end: str) -> None:
        """Record the end of the slices without a ticket in `running`; `end` is the reason."""
        for ticket in self._running.keys() - set(running):
            record = self._running.pop(ticket)
            reason = "killed" if ticket in self.overdue else end
            self._slices.append(replace(record, ended_s=self._clock.wall(), end=reason))
            self.overdue.discard(ticket)

    def list_slices(self, since_s: float) -> list[SliceRecord]:
        """Return the slices that had not ended at a time, in the order of grants."""
        found = [one for one in self._slices if one.ended_s >= since_s]
        return sorted([*found, *self._running.values()], key=lambda one: one.number)

    def list_decisions(self, since_s: float) -> list[SliceDecision]:
        """Return the decisions since a time, in their order."""
        offset_s = self._wall_offset_s()
        found = [_describe(one, offset_s) for one in self._decisions]
        return [one for one in found if one.at_s >= since_s]

    def _wall_offset_s(self) -> float:
        return self._clock.wall() - self._clock.monotonic()


def _count_loaded_bytes(record: SliceRecord) -> int:
    return sum(move.size_bytes for move in record.moves if move.target == Tier.ACCELERATOR)


def describe_candidates(ranked: Sequence[RankedCandidate], now: float) -> list[SliceCandidate]:
    """Return waiting requests with their waits up to `now`, in the same order."""
    return [
        SliceCandidate(
            one.candidate.request.instance,
            one.candidate.request.function,
            now - one.candidate.requested_at,
            one.candidate.service_s,
            one.candidate.switch_s,
            one.score,
        )
        for one in ranked
    ]


def _describe(decision: Decision, wall_offset_s: float) -> SliceDecision:
    return SliceDecision(
        decision.now + wall_offset_s,
        decision.policy,
        describe_candidates(decision.ranked, decision.now),
        decision.chosen.candidate.request.instance,
        decision.chosen.reason,
    )
