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

SILENT_S = 60.0  # a hybrid asks every few seconds, but while it computes or fetches


class HelperStage(StrEnum):
    """How far a hybrid is on its way to computing rounds."""

    REQUESTED = "requested"
    FETCHING = "fetching"
    READY = "ready"
    ACTIVE = "active"


@dataclass(slots=True)
class Helper:
    """What the core knows of one hybrid."""

    generation: int
    stage: HelperStage
    manifest: str  # digest of the weights that it has
    heard_s: float


class HybridMembership:
    """The hybrids of one incarnation of a core; those of the next one join again."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._members: dict[str, Helper] = {}
        self._generations = 0

    def join(self, helper: str, now: float) -> int:
        """The generation of a new join, which ends an earlier one of the helper."""
        self._generations += 1
        self._members[helper] = Helper(self._generations, HelperStage.REQUESTED, "", now)
        return self._generations

    def wanted(self, manifest: str) -> None:
        """Take in that rounds will need these weights, so that who has others is not ready."""
        for member in self._members.values():
            if member.manifest != manifest:
                member.stage = HelperStage.FETCHING

    def asks(self, helper: str, generation: int, manifest: str, wanted: str, now: float) -> bool:
        """Whether a member with `manifest` may lease rounds that need `wanted`; or Fenced."""
        member = self._member(helper, generation)
        member.heard_s, member.manifest = now, manifest
        if not manifest or manifest != wanted:
            member.stage = HelperStage.READY if manifest and not wanted else HelperStage.FETCHING
            return False
        if member.stage != HelperStage.ACTIVE:
            member.stage = HelperStage.READY
        return True

    def leased(self, helper: str) -> None:
        """Takes in that a member was given a round, which makes it ACTIVE."""
        self._members[helper].stage = HelperStage.ACTIVE

    def gives(self, helper: str, generation: int, now: float) -> None:
        """Takes in that a member brings a result; Fenced if its join has ended."""
        self._member(helper, generation).heard_s = now

    def leave(self, helper: str, generation: int) -> bool:
        """Ends a join; False if it has ended before."""
        member = self._members.get(helper)
        if member is None or member.generation != generation:
            return False
        del self._members[helper]
        return True

    def silent(self, now: float) -> list[str]:
        """Gangs that have failed: not heard of for long. Their joins end."""
        failed = [g for g, m in self._members.items() if now - m.heard_s > self._silent_s]
        for helper in failed:
            del self._members[helper]
        return failed

    def stages(self) -> dict[str, str]:
        """The stage of each hybrid, by helper."""
        return {helper: str(member.stage) for helper, member in self._members.items()}

    def _member(self, helper: str, generation: int) -> Helper:
        member = self._members.get(helper)
        if member is None or member.generation != generation:
            now = f"generation {member.generation}" if member else "no member"
            raise Fenced(
                f"hybrid {helper} speaks for generation {generation}, and is {now}",
                where="trainer",
                fix="it joins again",
            )
        return member
