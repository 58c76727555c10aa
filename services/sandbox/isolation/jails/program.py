"""What a jail is to run, and how its keeper says that it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JailProgram:
    """What a guest runs; `guests.guest` knows what each mode does with it."""

    source: str | None = None
    mode: str = "program"  # | shell | cells | calls | objects | tests | suite
    function: str = ""  # that is called: `calls`
    graded: bool = False  # it has the room that judges of such programs give it
    tests: str = ""  # that run beside the source, or without one are collected: `suite`
    files: bool = False  # the scratch directories of both sides have one path: `tests`
    patience_s: float = 0.0  # of waiting for the solution, until that is told: `tests`

    @property
    def has_guest_channel(self) -> bool:
        """True if the guest has a pipe to the sandbox, beside its keeper's."""
        return self.mode in ("cells", "calls", "tests", "suite")

    @property
    def starts_clock_paused(self) -> bool:
        """True if the wall clock stands until the first lap, or until it is the jail's turn."""
        return self.mode in ("cells", "calls", "objects", "suite")

    def to_frame(self, nonce: str) -> dict[str, Any]:
        """Return it as it travels; tests in a jail of their own sign their words with `nonce`."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found | ({"nonce": nonce} if self.mode == "tests" else {})


@dataclass(frozen=True)
class InitReport:
    """A keeper's word on how its guest ended; as it stands for a jail that ended without one."""

    exit: int = -9
    timeout: str = ""  # cpu | wall | starved; empty: none
    cpu_s: float = 0.0
    wall_s: float = 0.0
    laps: int = 0  # that had begun
    memory: bool = False  # it was over its limit
    refused: tuple[int, ...] = ()  # numbers of system calls

    @classmethod
    def from_frame(cls, frame: dict[str, Any]) -> InitReport:
        """Return what a frame says. KeyError, TypeError or ValueError if it is no report."""
        return cls(
            int(frame["exit"]),
            str(frame.get("timeout", "")),
            float(frame.get("cpu_s", 0.0)),
            float(frame.get("wall_s", 0.0)),
            int(frame.get("laps", 0)),
            frame.get("memory") is True,
            tuple(each for each in frame.get("refused") or () if type(each) is int),
        )
