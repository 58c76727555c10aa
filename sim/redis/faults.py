"""What can be wrong with a simulated Redis, set by whoever runs the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Full(StrEnum):
    """Why writes are refused; reads go on."""

    NO = ""
    MEMORY = "OOM"
    DISK = "MISCONF"


@dataclass
class RedisFaults:
    """Set any of them at any time; what is set holds from the next command on. A client meets them
    as the real one does: it sends again a few times, and raises what it met last.
    """

    away: bool = False  # no connection; nothing runs
    lost_replies: int = 0  # so many commands to come run, and their clients are not answered
    delay_s: float = 0.0  # from a command, which runs at once, to its reply
    full: Full = Full.NO

    @property
    def on_the_way(self) -> bool:
        """Whether commands or replies may be lost or late."""
        return self.away or self.lost_replies > 0 or self.delay_s > 0
