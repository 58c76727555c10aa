"""The position of a core: which version its weights are, and what has been computed since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrl.common.state import jobs
from meshrl.services.trainer.versions.publishing import NO_VERSION, VersionIdentity


@dataclass(frozen=True)
class CommittedVersion:
    """A committed version that a core goes on from, and the checkpoint that it covers."""

    version: int
    lineage: int
    weights: VersionIdentity
    origin_lineage: int  # the lineage that the version was made in, as its manifest says
    checkpoint: str
    checkpoint_step: int


@dataclass
class TrainingPosition:
    """The last committed version, and the state of the step under way."""

    version: int = 0  # steps that are committed
    lineage: int = 0
    weights: VersionIdentity = NO_VERSION  # of this version
    checkpointed_version: int = (
        -1
    )  # version of the committed checkpoint, as far as this process knows
    origin_lineage: int = 0  # the lineage that the version was made in
    is_complete: bool = False  # the weights are those of a step, and not being restored
    updating_step: int = 0  # the last step that has changed the weights
    computed_step: int = 0  # the last step whose updates were all made
    staged_version: tuple[int, VersionIdentity] = (0, NO_VERSION)  # the last of these in the store

    @property
    def manifest(self) -> str:
        return self.weights.manifest

    def resume_from(self, committed: CommittedVersion) -> None:
        """The weights are those of a committed version; no later step has been computed."""
        self.version, self.lineage, self.weights = (
            committed.version,
            committed.lineage,
            committed.weights,
        )
        self.origin_lineage, self.checkpointed_version, self.is_complete = (
            committed.origin_lineage,
            committed.checkpoint_step,
            True,
        )
        self.updating_step, self.computed_step, self.staged_version = 0, 0, (0, NO_VERSION)

    def commit(self, version: int, weights: VersionIdentity, checkpointed_version: int) -> None:
        self.version, self.weights, self.origin_lineage = version, weights, self.lineage
        self.checkpointed_version, self.is_complete = checkpointed_version, True

    def describe(self) -> dict[str, Any]:
        """Describe the weights for who goes on from them; version -1 and no `manifest`: of none."""
        version, born, manifest = -1, self.lineage, ""
        if self.is_complete and self.updating_step <= self.version:
            version, born, manifest = self.version, self.origin_lineage, self.manifest
        elif self.is_complete and self.updating_step == self.computed_step:
            version = self.computed_step
            manifest = self.staged_version[1].manifest if self.staged_version[0] == version else ""
        return {"lineage": self.lineage, "version": version, "manifest": manifest, "born": born}


def build_committed_version(row: jobs.JobRow, saved_state: dict[str, Any]) -> CommittedVersion:
    """Return the job's committed version, for weights that were saved as `about` says."""
    weights = VersionIdentity(row.manifest, row.image, row.masters)
    checkpoint = saved_state["checkpoint"], saved_state["checkpoint_step"]
    return CommittedVersion(row.version, row.lineage, weights, saved_state["born"], *checkpoint)
