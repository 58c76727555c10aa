"""Ranks all alike, whose whole bins are padded to the pace of declared accelerators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshrl.common.base.clock import Clock
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.zebra.lanes import Shared
from meshrl.services.trainer.zebra.pace import ZebraPace


class PacedBins:
    """Those of one rank, with experts over `degree` of them."""

    def __init__(self, pace: ZebraPace, degree: int, clock: Clock) -> None:
        self.pace, self._degree = pace, degree
        self._waiting = Shared(clock, 0.0)

    @contextmanager
    def of(self, bins: Sequence[Bin], back: bool) -> Iterator[None]:
        """Passes over bins, forward and with `back` backward, take no less than their pace."""
        began_s = self._waiting.now()
        yield
        wanted_s = sum(self.pace.bin_s(bin.lengths.tolist(), self._degree, back) for bin in bins)
        self._waiting.rest(began_s + wanted_s)
        self.pace.took(wanted_s, self._waiting.now() - began_s)
