"""Emulation of uniform ranks: passes over bins, padded to a declared accelerator's speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshrl.common.base.clock import Clock
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.zebra.exchange_lanes import RoundSync
from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation


class EmulatedBins:
    """Emulation of one rank's bins, with experts over `expert_parallel` ranks."""

    def __init__(self, emulation: ZebraEmulation, expert_parallel: int, clock: Clock) -> None:
        self.emulation, self._expert_parallel = emulation, expert_parallel
        self._sync = RoundSync(clock, 0.0)

    @contextmanager
    def emulate(self, bins: Sequence[Bin], with_backward: bool) -> Iterator[None]:
        """Pad passes over bins, and backward passes if `with_backward`, to their emulated time."""
        began_s = self._sync.now()
        yield
        wanted_s = sum(
            self.emulation.predict_bin_s(bin.lengths.tolist(), self._expert_parallel, with_backward)
            for bin in bins
        )
        self._sync.sleep_until(began_s + wanted_s)
        self.emulation.record(wanted_s, self._sync.now() - began_s)
