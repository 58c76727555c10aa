"""Membership of hybrids: which hybrids compute for a core, and their stages.

A hybrid is REQUESTED when it asks to join, FETCHING while it fetches the weights that the core
names, READY when it has them, and ACTIVE from its first lease on. Weights of a new version make it
FETCHING again. No stage blocks a step: a hybrid without the step's weights gets no round.

Each join has a generation. Leaving, a long silence or another join ends it. Later requests of that
generation are rejected: the hybrid rolls back and joins again.

The module is pure: callers pass times, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshrl.common.base.errors import Fenced

MAX_SILENCE_S = 60.0  # a hybrid sends requests every few seconds, unless it computes or fetches


class HybridStage(StrEnum):
    """Stage of a hybrid on its way to computing rounds."""

    REQUESTED = "requested"
    FETCHING = "fetching"
    READY = "ready"
    ACTIVE = "active"


@dataclass(slots=True)
class HybridMember:
    """State of one hybrid at the core."""

    generation: int
    stage: HybridStage
    manifest: str  # of its weights
    last_contact_s: float


class HybridMembership:
    """Hybrids of one incarnation of a core; those of the next incarnation join again."""

    def __init__(self, max_silence_s: float = MAX_SILENCE_S) -> None:
        self._max_silence_s = max_silence_s
        self._members: dict[str, HybridMember] = {}
        self._last_generation = 0

    def join(self, instance: str, now_s: float) -> int:
        """Return the generation of a new join, which ends an earlier one of the instance."""
        self._last_generation += 1
        self._members[instance] = HybridMember(
            self._last_generation, HybridStage.REQUESTED, "", now_s
        )
        return self._last_generation

    def require_weights(self, manifest: str) -> None:
        """Require these weights for later rounds; members with others are FETCHING."""
        for member in self._members.values():
            if member.manifest != manifest:
                member.stage = HybridStage.FETCHING

    def can_lease_round(
        self, instance: str, generation: int, manifest: str, required_manifest: str, now_s: float
    ) -> bool:
        """Return True if a member with `manifest` may lease rounds of `required_manifest`.

        Raise Fenced if its join has ended.
        """
        member = self._get_member(instance, generation)
        member.last_contact_s, member.manifest = now_s, manifest
        if not manifest or manifest != required_manifest:
            member.stage = (
                HybridStage.READY if manifest and not required_manifest else HybridStage.FETCHING
            )
            return False
        if member.stage != HybridStage.ACTIVE:
            member.stage = HybridStage.READY
        return True

    def record_lease(self, instance: str) -> None:
        """Record that a member leased a round, which makes it ACTIVE."""
        self._members[instance].stage = HybridStage.ACTIVE

    def record_result(self, instance: str, generation: int, now_s: float) -> None:
        """Record that a member returned a result; raise Fenced if its join has ended."""
        self._get_member(instance, generation).last_contact_s = now_s

    def leave(self, instance: str, generation: int) -> bool:
        """End a join; return False if it had already ended."""
        member = self._members.get(instance)
        if member is None or member.generation != generation:
            return False
        del self._members[instance]
        return True

    def remove_silent(self, now_s: float) -> list[str]:
        """Remove and return the instances that sent nothing for too long."""
        failed = [
            g for g, m in self._members.items() if now_s - m.last_contact_s > self._max_silence_s
        ]
        for helper in failed:
            del self._members[helper]
        return failed

    def get_stages(self) -> dict[str, str]:
        """Return the stage of each hybrid by instance."""
        return {helper: str(member.stage) for helper, member in self._members.items()}

    def _get_member(self, instance: str, generation: int) -> HybridMember:
        member = self._members.get(instance)
        if member is None or member.generation != generation:
            now = f"generation {member.generation}" if member else "no member"
            raise Fenced(
                f"hybrid {instance} called with generation {generation}, but is registered as "
                f"{now}",
                where="trainer",
                fix="Join again",
            )
        return member
