"""The membership of hybrids: who helps the core of a training gang, and how far each is.

A hybrid is REQUESTED when it asks to join, FETCHING while it gets the weights that the core names,
READY when it has them, and ACTIVE from its first lease on; weights of a new version make it
FETCHING again. None of it stops a step: a hybrid without the step's weights is not given a round.

Each join has a generation. Leaving, being silent for long or joining again ends it, and whatever
comes under it afterwards is refused: the hybrid rolls back and joins anew.

Pure: times are told, nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshrl.common.base.errors import Fenced

MAX_SILENCE_S = 60.0  # a hybrid asks every few seconds, but while it computes or fetches


class HybridStage(StrEnum):
    """How far a hybrid is on its way to computing rounds."""

    REQUESTED = "requested"
    FETCHING = "fetching"
    READY = "ready"
    ACTIVE = "active"


@dataclass(slots=True)
class HybridMember:
    """What the core knows of one hybrid."""

    generation: int
    stage: HybridStage
    manifest: str  # digest of the weights that it has
    last_contact_s: float


class HybridMembership:
    """The hybrids of one incarnation of a core; those of the next one join again."""

    def __init__(self, max_silence_s: float = MAX_SILENCE_S) -> None:
        self._max_silence_s = max_silence_s
        self._members: dict[str, HybridMember] = {}
        self._last_generation = 0

    def join(self, instance: str, now_s: float) -> int:
        """The generation of a new join, which ends an earlier one of the helper."""
        self._last_generation += 1
        self._members[instance] = HybridMember(
            self._last_generation, HybridStage.REQUESTED, "", now_s
        )
        return self._last_generation

    def require_weights(self, manifest: str) -> None:
        """Take in that rounds will need these weights, so that who has others is not ready."""
        for member in self._members.values():
            if member.manifest != manifest:
                member.stage = HybridStage.FETCHING

    def can_lease_round(
        self, instance: str, generation: int, manifest: str, required_manifest: str, now_s: float
    ) -> bool:
        """Whether a member with `manifest` may lease rounds that need `wanted`; or Fenced."""
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
        """Takes in that a member was given a round, which makes it ACTIVE."""
        self._members[instance].stage = HybridStage.ACTIVE

    def record_result(self, instance: str, generation: int, now_s: float) -> None:
        """Takes in that a member brings a result; Fenced if its join has ended."""
        self._get_member(instance, generation).last_contact_s = now_s

    def leave(self, instance: str, generation: int) -> bool:
        """Ends a join; False if it has ended before."""
        member = self._members.get(instance)
        if member is None or member.generation != generation:
            return False
        del self._members[instance]
        return True

    def remove_silent(self, now_s: float) -> list[str]:
        """Gangs that have failed: not heard of for long. Their joins end."""
        failed = [
            g for g, m in self._members.items() if now_s - m.last_contact_s > self._max_silence_s
        ]
        for helper in failed:
            del self._members[helper]
        return failed

    def get_stages(self) -> dict[str, str]:
        """The stage of each hybrid, by helper."""
        return {helper: str(member.stage) for helper, member in self._members.items()}

    def _get_member(self, instance: str, generation: int) -> HybridMember:
        member = self._members.get(instance)
        if member is None or member.generation != generation:
            now = f"generation {member.generation}" if member else "no member"
            raise Fenced(
                f"hybrid {instance} speaks for generation {generation}, and is {now}",
                where="trainer",
                fix="it joins again",
            )
        return member
