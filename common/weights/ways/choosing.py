"""Chooses the way by which a host receives versions, by what ways have measured there, and goes
back when a change has not paid.

The way in use stays until another is predicted to take a quarter less. One that was never measured
is tried once the way in use is known. What a change takes is then held against what the way before
was predicted to take: unless it was a tenth faster it is undone, and that way rests for some
versions, for twice as many after each change of its own that failed. So a host that the wrong way
is tried at loses less and less by it, and one whose network has changed finds the right way again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LEAST_BYTES = 1 << 20  # below, what is measured is the time of a few calls
KNOWN = 2  # measurements before a way is believed to be known
WEIGHT = 0.3  # of the last measurement in the mean: networks change within versions
GAIN = 0.25  # share of the time that a change must promise to save
PAID = 0.1  # and that it must have saved
REST, LONGEST_REST = 4, 256  # versions that a way rests after a change that did not pay


@dataclass(frozen=True)
class Choice:
    """The way of one version. `instead_of`: the way in use, where this one is a change."""

    way: str
    why: str
    predicted_s: float | None = None  # None: it was never measured
    instead_of: str = ""
    otherwise_s: float = 0.0  # what the way in use is predicted to take


@dataclass
class _Known:
    s_per_byte: float = 0.0
    count: int = 0
    rests_until: int = 0  # the number of a choice
    failures: int = 0  # changes to it that did not pay, one after the other

    def predicted(self, size: int) -> float | None:
        return self.s_per_byte * size if self.count else None


@dataclass
class Choosing:
    """What one host knows of its ways; plain state, asked before each version and told after it."""

    usual: str = ""  # the way in use; empty: the first that is possible
    choices: int = 0
    _known: dict[str, _Known] = field(default_factory=dict)

    def choose(self, size: int, able: Sequence[str]) -> Choice:
        """The way of `size` bytes; `able` are those that are possible now, the plainest first."""
        self.choices += 1
        usual = self.usual if self.usual in able else able[0]
        now = self._of(usual).predicted(size)
        others = [way for way in able if way != usual]
        if not others:
            return Choice(usual, "no other way is possible", now)
        if size < LEAST_BYTES:
            return Choice(usual, "too little to gain by another way", now)
        if now is None or self._of(usual).count < KNOWN:
            return Choice(usual, f"how fast {usual} is, is not known yet", now)
        awake = [way for way in others if self._of(way).rests_until < self.choices]
        for way in awake:
            if not self._of(way).count:
                return Choice(way, "it was never measured", None, usual, now)
        best = min(awake, key=lambda way: self._of(way).s_per_byte, default=None)
        then = self._of(best).predicted(size) if best is not None else None
        if best is not None and then is not None and then <= (1 - GAIN) * now:
            why = f"{then:.3g} s are predicted, {now:.3g} s by {usual}"
            return Choice(best, why, then, usual, now)
        return Choice(usual, self._stays(usual, now, size, others), now)

    def _stays(self, usual: str, now: float, size: int, others: Sequence[str]) -> str:
        said = []
        for way in others:
            known, then = self._of(way), self._of(way).predicted(size)
            rests = known.rests_until - self.choices
            told = f"{then:.3g} s by {way}" if then is not None else f"{way} is not known"
            said.append(told + (f", which rests for {rests} versions more" if rests >= 0 else ""))
        return f"{now:.3g} s are predicted, " + "; ".join(said)

    def happened(self, choice: Choice, size: int, seconds: float) -> str:
        """Takes in what the way of a choice took; what follows from it, for people."""
        known = self._of(choice.way)
        if size >= LEAST_BYTES and seconds > 0:
            measured = seconds / size
            known.count += 1
            weight = WEIGHT if known.count > 1 else 1.0
            known.s_per_byte += weight * (measured - known.s_per_byte)
        if not choice.instead_of:
            return f"it took {seconds:.3g} s"
        told = f"it took {seconds:.3g} s instead of {choice.otherwise_s:.3g} s"
        if seconds <= (1 - PAID) * choice.otherwise_s:
            self.usual, known.failures = choice.way, 0
            return f"{told}: it stays"
        self._rest(choice.way)
        return f"{told}: undone"

    def failed(self, choice: Choice, why: str) -> str:
        """Takes in that the way of a choice did not bring all of it; what follows."""
        self._rest(choice.way)
        return f"it failed ({why}), and rests"

    def rates(self) -> Mapping[str, float]:
        """Bytes per second, of the ways that were measured."""
        return {way: 1 / known.s_per_byte for way, known in self._known.items() if known.count}

    def _rest(self, way: str) -> None:
        known = self._of(way)
        known.rests_until = self.choices + min(REST << known.failures, LONGEST_REST)
        known.failures += 1
        if self.usual == way:
            self.usual = ""

    def _of(self, way: str) -> _Known:
        return self._known.setdefault(way, _Known())
