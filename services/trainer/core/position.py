"""Position of a core: the version of its weights, and the progress since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrl.common.state import jobs
from meshrl.services.trainer.versions.publishing import NO_VERSION, VersionIdentity


@dataclass(frozen=True)
class CommittedVersion:
    """Committed version that a core resumes from, and the checkpoint that covers it."""

    version: int
    lineage: int
    weights: VersionIdentity
    origin_lineage: int  # in which the version was made, by its manifest
    checkpoint: str
    checkpoint_step: int


@dataclass
class TrainingPosition:
    """Last committed version, and the state of the current step."""

    version: int = 0  # committed steps
    lineage: int = 0
    weights: VersionIdentity = NO_VERSION  # of this version
    # version of the committed checkpoint, as far as this process knows
    checkpointed_version: int = -1
    origin_lineage: int = 0  # in which the version was made
    is_complete: bool = False  # the weights are those of a step, and not being restored
    updating_step: int = 0  # last step that has changed the weights
    computed_step: int = 0  # last step with all its updates
    staged_version: tuple[int, VersionIdentity] = (0, NO_VERSION)  # last one in the store

    @property
    def manifest(self) -> str:
        return self.weights.manifest

    def resume_from(self, committed: CommittedVersion) -> None:
        """Move to a committed version, without any later computed step."""
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
        """Describe the weights for a process that resumes; version -1, without `manifest`: none."""
        version, origin_lineage, manifest = -1, self.lineage, ""
        if self.is_complete and self.updating_step <= self.version:
            version, origin_lineage, manifest = self.version, self.origin_lineage, self.manifest
        elif self.is_complete and self.updating_step == self.computed_step:
            version = self.computed_step
            manifest = self.staged_version[1].manifest if self.staged_version[0] == version else ""
        return {
            "lineage": self.lineage,
            "version": version,
            "manifest": manifest,
            "born": origin_lineage,
        }


def build_committed_version(row: jobs.JobRow, saved_state: dict[str, Any]) -> CommittedVersion:
    """Return the job's committed version, for weights saved with `saved_state`."""
    weights = VersionIdentity(row.manifest, row.image, row.masters)
    checkpoint = saved_state["checkpoint"], saved_state["checkpoint_step"]
    return CommittedVersion(row.version, row.lineage, weights, saved_state["born"], *checkpoint)
