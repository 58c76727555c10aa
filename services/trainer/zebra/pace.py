"""A zebra gang slowed down to the pace of declared accelerators: its numbers are the same, its
tasks and transfers padded, so that mixed generations can be run on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.job.pace import LATE
from common.zebra.costs import BACKWARD
from common.zebra.profile import Curve, Kind, Profile
from common.zebra.schedule import Work


@dataclass
class ZebraPace:
    """That of one rank, which stands for an accelerator of `kind`. A real token stands for `tokens`
    of the declared model, and a declared second takes `scale` real ones.
    """

    profile: Profile
    kind: Kind
    tokens: float = 1.0
    scale: float = 1.0
    paced: int = field(default=0, init=False)  # tasks and transfers so far
    late: int = field(default=0, init=False)  # of them, that took longer than their pace

    def task_s(self, work: Work, backward: bool, sizes: Sequence[float]) -> float:
        """Seconds of a task: of attention on sequences of these lengths, or of experts that get so
        many rows each.
        """
        curve = self.kind.attention if work is Work.ATTENTION else self.kind.experts
        assert curve is not None, "a rank with attention stands for a kind of which it is known"
        times = self.profile.backward if backward else 1.0
        return times * self._of(curve, sizes)

    def head_s(self, tokens: float, goes_back: bool) -> float:
        """Of the last piece, which goes back at once if it does."""
        assert self.kind.head is not None
        return (1.0 + BACKWARD * goes_back) * self._of(self.kind.head, [tokens])

    def transfer_s(self, rows: int) -> float:
        """Of a transfer in which a rank gives so many rows."""
        seconds = rows * self.tokens * self.profile.row_bytes / self.profile.link_bytes_per_s
        return self.scale * (self.profile.link_latency_s + seconds)

    def took(self, wanted_s: float, took_s: float) -> None:
        """Something that was to take so long has ended."""
        self.paced += 1
        self.late += took_s > (1.0 + LATE) * wanted_s

    def _of(self, curve: Curve, sizes: Sequence[float]) -> float:
        return self.scale * sum(curve.of(self.tokens * size) for size in sizes)
