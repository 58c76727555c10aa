"""Choice of the transport by which a host receives versions, based on its measurements.

The current transport stays until another is predicted to take a quarter less time. A transport
without measurements is tried once the current one is known. The duration of a change is compared
with the prediction for the previous transport: unless it was a tenth faster, the change is undone.
The tried transport then pauses for some versions, twice as many after each consecutive failed
change. A host thus loses less and less time to a bad transport, and still adapts to a changed
network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIN_MEASURED_BYTES = 1 << 20  # below that, the fixed cost of calls dominates
MIN_MEASUREMENTS = 2  # before a transport counts as known
EMA_WEIGHT = 0.3  # of the last measurement in the mean: networks change within versions
MIN_PREDICTED_GAIN = 0.25  # fraction of the time that a change must be predicted to save
MIN_ACTUAL_GAIN = 0.1  # fraction that it must have saved
INITIAL_COOLDOWN_VERSIONS, MAX_COOLDOWN_VERSIONS = (
    4,
    256,
)  # versions that a transport pauses after a failed change


@dataclass(frozen=True)
class TransportChoice:
    """Transport of one version. `replaced_transport`: the current one, if this is a change."""

    transport: str
    reason: str
    predicted_s: float | None = None  # None: it was never measured
    replaced_transport: str = ""
    replaced_predicted_s: float = 0.0  # prediction for the current transport


@dataclass
class _TransportRecord:
    s_per_byte: float = 0.0
    count: int = 0
    cooldown_until: int = 0  # the number of a choice
    consecutive_failures: int = 0  # failed changes to it in a row

    def predict_s(self, size_bytes: int) -> float | None:
        return self.s_per_byte * size_bytes if self.count else None


@dataclass
class TransportSelector:
    """Transport measurements of one host; consult it before each version and update it
    afterwards.
    """

    current_transport: str = ""  # the current one; empty: the first available one
    choice_count: int = 0
    _records: dict[str, _TransportRecord] = field(default_factory=dict)

    def choose(self, size_bytes: int, available: Sequence[str]) -> TransportChoice:
        """Choose the transport of `size_bytes` bytes.

        Args:
            available: Transports that are possible now, the default one first.
        """
        self.choice_count += 1
        usual = self.current_transport if self.current_transport in available else available[0]
        now = self._record_of(usual).predict_s(size_bytes)
        others = [way for way in available if way != usual]
        if not others:
            return TransportChoice(usual, "no other transport is available", now)
        if size_bytes < MIN_MEASURED_BYTES:
            return TransportChoice(usual, "the size is too small for a gain", now)
        if now is None or self._record_of(usual).count < MIN_MEASUREMENTS:
            return TransportChoice(usual, f"the rate of {usual} is unknown", now)
        awake = [way for way in others if self._record_of(way).cooldown_until < self.choice_count]
        for way in awake:
            if not self._record_of(way).count:
                return TransportChoice(way, "it was never measured", None, usual, now)
        best = min(awake, key=lambda way: self._record_of(way).s_per_byte, default=None)
        then = self._record_of(best).predict_s(size_bytes) if best is not None else None
        if best is not None and then is not None and then <= (1 - MIN_PREDICTED_GAIN) * now:
            why = f"{then:.3g} s are predicted, {now:.3g} s by {usual}"
            return TransportChoice(best, why, then, usual, now)
        return TransportChoice(usual, self._explain_no_change(usual, now, size_bytes, others), now)

    def _explain_no_change(self, usual: str, now: float, size: int, others: Sequence[str]) -> str:
        reasons = []
        for way in others:
            known, then = self._record_of(way), self._record_of(way).predict_s(size)
            rests = known.cooldown_until - self.choice_count
            prediction = (
                f"{then:.3g} s by {way}" if then is not None else f"the rate of {way} is unknown"
            )
            reasons.append(
                prediction + (f", which is paused for {rests} more versions" if rests >= 0 else "")
            )
        return f"{now:.3g} s are predicted, " + "; ".join(reasons)

    def record_success(self, choice: TransportChoice, size_bytes: int, duration_s: float) -> str:
        """Record the duration of a choice; return the consequence as text."""
        known = self._record_of(choice.transport)
        if size_bytes >= MIN_MEASURED_BYTES and duration_s > 0:
            measured = duration_s / size_bytes
            known.count += 1
            weight = EMA_WEIGHT if known.count > 1 else 1.0
            known.s_per_byte += weight * (measured - known.s_per_byte)
        if not choice.replaced_transport:
            return f"it took {duration_s:.3g} s"
        comparison = f"it took {duration_s:.3g} s instead of {choice.replaced_predicted_s:.3g} s"
        if duration_s <= (1 - MIN_ACTUAL_GAIN) * choice.replaced_predicted_s:
            self.current_transport, known.consecutive_failures = choice.transport, 0
            return f"{comparison}: kept"
        self._start_cooldown(choice.transport)
        return f"{comparison}: undone"

    def record_failure(self, choice: TransportChoice, reason: str) -> str:
        """Record that the chosen transport left chunks missing; return the consequence as text."""
        self._start_cooldown(choice.transport)
        return f"it failed ({reason}) and is paused"

    def rates_bytes_per_s(self) -> Mapping[str, float]:
        """Return the measured rates by transport."""
        return {way: 1 / known.s_per_byte for way, known in self._records.items() if known.count}

    def _start_cooldown(self, transport: str) -> None:
        known = self._record_of(transport)
        known.cooldown_until = self.choice_count + min(
            INITIAL_COOLDOWN_VERSIONS << known.consecutive_failures, MAX_COOLDOWN_VERSIONS
        )
        known.consecutive_failures += 1
        if self.current_transport == transport:
            self.current_transport = ""

    def _record_of(self, transport: str) -> _TransportRecord:
        return self._records.setdefault(transport, _TransportRecord())
