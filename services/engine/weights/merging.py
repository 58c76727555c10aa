"""Decides what an engine does with its job's adapters: merge each version into the model's tensors,
or compute them beside these. Pure, but for the clock that it is given.
"""

from __future__ import annotations

from typing import Literal

from meshrl.common.base.clock import Clock

Wish = Literal["auto", "merged", "beside"]  # `lora.engines`

# Of an engine's time, that adapters beside a model take: some 9 % of a native step of 16 rows at
# rank 8 in a model of 4 M parameters, 12 % of 8 rows at rank 16; less, the wider the model.
OVERHEAD = 0.1
MARGIN = 2.0  # by which the other way must be better: a change of ways ends what runs


def merging_pays(merging: bool, merge_s: float, between_s: float) -> bool:
    """Whether adapters are merged from now on: `merge_s` is what that has taken longer for the last
    version, `between_s` the time since the version before; 0: not measured, and then they are.
    """
    if not merge_s or not between_s:
        return True
    saved_s = OVERHEAD * between_s
    return saved_s * (MARGIN if merging else 1.0) >= merge_s * (1.0 if merging else MARGIN)


class Merging:
    """The choice of one engine, from what it sees of its job's versions."""

    def __init__(self, wish: Wish, clock: Clock) -> None:
        self.merging = wish != "beside"
        self._wish, self._clock = wish, clock
        self._came_s = self._between_s = self._merge_s = 0.0
        self._manifest = ""  # of the version that came last

    def came(self, manifest: str) -> bool:
        """There is another version, or the last one again; whether it is to be merged."""
        if manifest == self._manifest:
            return self.merging
        self._manifest, now = manifest, self._clock.monotonic()
        if self._came_s:
            self._between_s = now - self._came_s
        self._came_s = now
        if self._wish == "auto":
            self.merging = merging_pays(self.merging, self._merge_s, self._between_s)
        return self.merging

    def took(self, seconds: float) -> None:
        """A version was merged, and the engine stood while it took it, for so long."""
        self._merge_s = seconds
