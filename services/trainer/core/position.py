"""The position of a core: which version its weights are, and what has been computed since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrl.common.state import jobs
from meshrl.services.trainer.versions.publishing import NOBODY, VersionIdentity


@dataclass(frozen=True)
class CommittedVersion:
    """A committed version that a core goes on from, and the checkpoint that it covers."""

    version: int
    lineage: int
    weights: VersionIdentity
    born: int  # the lineage that the version was made in, as its manifest says
    checkpoint: str
    checkpoint_step: int


@dataclass
class Position:
    """The last committed version, and the state of the step under way."""

    version: int = 0  # steps that are committed
    lineage: int = 0
    weights: VersionIdentity = NOBODY  # of this version
    covered: int = -1  # version of the committed checkpoint, as far as this process knows
    born: int = 0  # the lineage that the version was made in
    whole: bool = False  # the weights are those of a step, and not being restored
    updating: int = 0  # the last step that has changed the weights
    computed: int = 0  # the last step whose updates were all made
    staged: tuple[int, VersionIdentity] = (0, NOBODY)  # the last of these in the store

    @property
    def manifest(self) -> str:
        return self.weights.manifest

    def go_on_from(self, there: CommittedVersion) -> None:
        """The weights are those of a committed version; no later step has been computed."""
        self.version, self.lineage, self.weights = there.version, there.lineage, there.weights
        self.born, self.covered, self.whole = there.born, there.checkpoint_step, True
        self.updating, self.computed, self.staged = 0, 0, (0, NOBODY)

    def commit(self, version: int, weights: VersionIdentity, covered: int) -> None:
        self.version, self.weights, self.born = version, weights, self.lineage
        self.covered, self.whole = covered, True

    def described(self) -> dict[str, Any]:
        """Describe the weights for who goes on from them; version -1 and no `manifest`: of none."""
        version, born, manifest = -1, self.lineage, ""
        if self.whole and self.updating <= self.version:
            version, born, manifest = self.version, self.born, self.manifest
        elif self.whole and self.updating == self.computed:
            version = self.computed
            manifest = self.staged[1].manifest if self.staged[0] == version else ""
        return {"lineage": self.lineage, "version": version, "manifest": manifest, "born": born}


def committed_of(row: jobs.JobRow, about: dict[str, Any]) -> CommittedVersion:
    """Return the job's committed version, for weights that were saved as `about` says."""
    weights = VersionIdentity(row.manifest, row.image, row.masters)
    checkpoint = about["checkpoint"], about["checkpoint_step"]
    return CommittedVersion(row.version, row.lineage, weights, about["born"], *checkpoint)
