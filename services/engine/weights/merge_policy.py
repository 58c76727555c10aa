"""Decides what an engine does with its job's adapters: merge each version into the model's tensors,
or compute them beside these. Pure, but for the clock that it is given.
"""

from __future__ import annotations

from typing import Literal

from meshrl.common.base.clock import Clock

AdapterMode = Literal["auto", "merged", "beside"]  # `lora.engines`

# Of an engine's time, that adapters beside a model take: some 9 % of a native step of 16 rows at
# rank 8 in a model of 4 M parameters, 12 % of 8 rows at rank 16; less, the wider the model.
OVERHEAD_SHARE = 0.1
SWITCH_MARGIN = 2.0  # by which the other way must be better: a change of ways ends what runs


def is_merging_worthwhile(is_merging: bool, merge_s: float, version_interval_s: float) -> bool:
    """Whether adapters are merged from now on: `merge_s` is what that has taken longer for the last
    version, `between_s` the time since the version before; 0: not measured, and then they are.
    """
    if not merge_s or not version_interval_s:
        return True
    saved_s = OVERHEAD_SHARE * version_interval_s
    return saved_s * (SWITCH_MARGIN if is_merging else 1.0) >= merge_s * (
        1.0 if is_merging else SWITCH_MARGIN
    )


class MergePolicy:
    """The choice of one engine, from what it sees of its job's versions."""

    def __init__(self, mode: AdapterMode, clock: Clock) -> None:
        self.is_merging = mode != "beside"
        self._mode, self._clock = mode, clock
        self._arrived_s = self._version_interval_s = self._merge_s = 0.0
        self._manifest = ""  # of the version that came last

    def observe_version(self, manifest: str) -> bool:
        """There is another version, or the last one again; whether it is to be merged."""
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
        """A version was merged, and the engine stood while it took it, for so long."""
        self._merge_s = seconds
