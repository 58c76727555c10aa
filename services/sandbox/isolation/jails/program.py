"""Program of a jail, and the report of its init process on its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JailProgram:
    """Program that a guest runs; `guests.guest` implements the modes."""

    source: str | None = None
    mode: str = "program"  # | shell | cells | calls | objects | tests | suite
    function: str = ""  # function to call: `calls`
    is_graded: bool = False  # a judge's memory and stack limits
    tests: str = ""  # tests to run beside the source, or to collect without one: `suite`
    shares_files: bool = False  # the scratch directories of both sides have one path: `tests`
    unreported_wait_s: float = (
        0.0  # of waiting for the solution, before the tests report it: `tests`
    )

    @property
    def has_guest_channel(self) -> bool:
        """True if the guest has a pipe to the sandbox, beside its init process's."""
        return self.mode in ("cells", "calls", "tests", "suite")

    @property
    def starts_clock_paused(self) -> bool:
        """True if the wall clock stands until the first lap, or until it is set running."""
        return self.mode in ("cells", "calls", "objects", "suite")

    def to_frame(self, nonce: str) -> dict[str, Any]:
        """Return the program as a frame; isolated tests sign their messages with `nonce`."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found | ({"nonce": nonce} if self.mode == "tests" else {})


@dataclass(frozen=True)
class InitReport:
    """Report of an init process on its guest's end; the defaults stand for a missing report."""

    exit_code: int = -9
    timeout: str = ""  # cpu | wall | starved; empty: none
    cpu_s: float = 0.0
    wall_s: float = 0.0
    laps: int = 0  # that had begun
    out_of_memory: bool = False  # it exceeded its limit
    denied_calls: tuple[int, ...] = ()  # numbers of system calls

    @classmethod
    def from_frame(cls, frame: dict[str, Any]) -> InitReport:
        """Parse a report; KeyError, TypeError or ValueError if it is invalid."""
        return cls(
            int(frame["exit_code"]),
            str(frame.get("timeout", "")),
            float(frame.get("cpu_s", 0.0)),
            float(frame.get("wall_s", 0.0)),
            int(frame.get("laps", 0)),
            frame.get("out_of_memory") is True,
            tuple(each for each in frame.get("denied_calls") or () if type(each) is int),
        )
