"""Policy for a job's adapters in an engine: merge each version into the model, or compute it
beside.

It is pure except for the clock that it receives.
"""

from __future__ import annotations

from typing import Literal

from meshrl.common.base.clock import Clock

AdapterMode = Literal["auto", "merged", "beside"]  # `lora.engine_mode`

# Share of an engine's time that adapters beside a model take: some 9 % of a native step of 16 rows
# at rank 8 in a model of 4 M parameters, 12 % of 8 rows at rank 16; less in wider models.
OVERHEAD_SHARE = 0.1
# gain that justifies a change of the mode, because a change aborts running requests
SWITCH_MARGIN = 2.0


def is_merging_worthwhile(is_merging: bool, merge_s: float, version_interval_s: float) -> bool:
    """Return True if adapters are to be merged from now on.

    `merge_s`: extra seconds that merging took for the last version. `version_interval_s`: seconds
    since the version before; 0: not measured, and then they are merged.
    """
    if not merge_s or not version_interval_s:
        return True
    saved_s = OVERHEAD_SHARE * version_interval_s
    return saved_s * (SWITCH_MARGIN if is_merging else 1.0) >= merge_s * (
        1.0 if is_merging else SWITCH_MARGIN
    )


class MergePolicy:
    """Choice of one engine, from the intervals of its job's versions."""

    def __init__(self, mode: AdapterMode, clock: Clock) -> None:
        self.is_merging = mode != "beside"
        self._mode, self._clock = mode, clock
        self._arrived_s = self._version_interval_s = self._merge_s = 0.0
        self._manifest = ""  # of the last version

    def observe_version(self, manifest: str) -> bool:
        """Record a new version, or the last one again; return True if it is to be merged."""
        if manifest == self._manifest:
            return self.is_merging
        self._manifest, now = manifest, self._clock.monotonic()
        if self._arrived_s:
            self._version_interval_s = now - self._arrived_s
        self._arrived_s = now
        if self._mode == "auto":
            self.is_merging = is_merging_worthwhile(
                self.is_merging, self._merge_s, self._version_interval_s
            )
        return self.is_merging

    def record_merge_time(self, seconds: float) -> None:
        """Record the seconds that the engine was paused to merge a version."""
        self._merge_s = seconds
