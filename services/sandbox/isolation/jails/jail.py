"""A running jail: it is spoken to, watched to its end, and that end is given a type."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshrl.common.api.sandbox import CRASHED, OK, OUT_OF_MEMORY, OUTPUT_LIMIT, REFUSED, TIMEOUT
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, MeshError, PeerLost
from meshrl.services.sandbox.isolation.jails.pipes import JailOutput, Pipe
from meshrl.services.sandbox.isolation.jails.program import KeeperReport
from meshrl.services.sandbox.isolation.resources.cgroups import Cgroup
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.jail.confinement import calls
from meshrl.services.sandbox.jail.guests import guest

GRACE_S = 60.0  # past its limits, until a jail counts as stuck: its keeper must have ended it
SLOWEST = 10.0  # times its wall clock limit that a jail may take, waiting for cores included
DRAIN_S = 5.0  # for a killed jail's output to end


class JailFailed(MeshError):
    """No jail could be made: ours, not the code's, to answer for."""

    code = "jail_failed"


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what it wrote."""

    status: str
    stdout: bytes = b""
    stderr: bytes = b""
    exit: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    error: str = ""
    laps: int = 0  # laps that had begun before it ended
    refused: tuple[str, ...] = ()  # system calls that it asked for and did not get, each once
    by_clock: bool = False  # it was ended by the wall clock
    starved: bool = False  # by the clock, though it had waited for the host and not by itself


def wanted(refused: tuple[str, ...]) -> str:
    """Why a program was refused; `refused` are system calls, of which there may be none: a file
    that cannot be written, say, is refused by its place.
    """
    text = "it asked for what the sandbox refuses"
    return f"{text}: {', '.join(refused)}" if refused else text


class Jail:
    """One jail, from its start to `finish`."""

    def __init__(
        self,
        clock: Clock,
        limits: JailLimits,
        keeper: Pipe,
        cells: Pipe | None,
        output: JailOutput,
        group: Cgroup | None,
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called once, when it has been closed."""
        self._clock, self.limits = clock, limits
        self.keeper, self.cells, self.output = keeper, cells, output
        self._group, self._ended = group, ended
        self._closed = False
        self._came: dict[str, Any] = {}  # its last frame, where it came while nobody waited
        self.laps = 0  # laps that its keeper was told to begin
        self._killed_before = group.killed() if group else 0
        self.nonce = secrets.token_hex(16)

    @property
    def stdout(self) -> bytes:
        return self.output.streams[0].taken()

    @property
    def stderr(self) -> bytes:
        return self.output.streams[1].taken()

    def lap(self, waits: bool = False) -> None:
        """Starts the jail's clocks anew, and what was paused goes on. With `waits` the wall clock
        stands until it is the jail's turn.
        """
        self.laps += 1
        self.keeper.send_now({"lap": True, "turn": not waits})
        if self._group is not None and self._group.freezes:
            self._group.freeze(False)

    def turn(self, begins: bool) -> None:
        self.keeper.send_now({"turn": begins})

    def pause(self) -> None:
        """Stops the jail, and then its clocks, until the next lap: frozen by its control group, or
        stopped by its keeper.
        """
        self.laps += 1
        frozen = self._group is not None and self._group.freezes
        if self._group is not None and frozen:
            self._group.freeze(True)
        self.keeper.send_now({"lap": True, "pause": True, "stop": not frozen})

    def refuses(self) -> tuple[str, ...]:
        """What was refused in it for the first time since the last call: system calls by name."""
        found = []
        for frame in self.keeper.arrived():
            if "refuses" in frame:
                found.append(calls.name(int(frame["refuses"])))
            else:
                self._came = frame
        return tuple(found)

    def over(self) -> bool:
        """Whether its keeper has said how it ended, or is gone."""
        self.refuses()
        return bool(self._came) or self.keeper.ended

    async def report(self, deadline_s: float) -> KeeperReport:
        frame = self._came
        while not frame or "refuses" in frame:
            frame = await self.keeper.receive(self._clock, deadline_s)
        if "failed" in frame:
            raise JailFailed(str(frame["failed"]), where="sandbox")
        if frame.get("nonce") != self.nonce:
            raise BadMessage("a report without the nonce of its call")
        try:
            return KeeperReport.of(frame)
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"a report that is none: {error}") from None

    async def finish(self) -> Ran:
        """Waits for its end, which limits bound, and cleans up behind it."""
        report = KeeperReport()
        missing = ""
        deadline_s = SLOWEST * self.limits.wall_s + GRACE_S
        waited = asyncio.ensure_future(self.report(deadline_s))
        try:
            await asyncio.wait({waited, self.output.over}, return_when=asyncio.FIRST_COMPLETED)
            if waited.done():
                try:
                    report = waited.result()
                except (PeerLost, BadMessage, DeadlineExceeded) as error:
                    missing = error.message
            self.keeper.close()
            await self.output.drained(self._clock, DRAIN_S)
            over = self.output.over.done()
            if missing and not over and not self._out_of_memory():
                # No guest can end its keeper: somebody has killed the zygote, or it hangs.
                raise JailFailed(f"a jail ended without a report: {missing}", where="sandbox")
            return self._typed(report, over)
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)
            self.close()

    def close(self) -> None:
        self.keeper.close()
        if self.cells is not None:
            self.cells.close()
        self.output.close()
        if not self._closed:
            self._closed = True
            self._ended()

    def _typed(self, report: KeeperReport, over: bool) -> Ran:
        status, error = self._status(report, over)
        refused = tuple(calls.name(number) for number in report.refused)
        if status == REFUSED:
            error = wanted(refused)
        used = report.exit, report.cpu_s, report.wall_s
        starved = report.timeout == "starved"
        by_clock = starved or report.timeout == "wall"
        out, err = self.stdout, self.stderr
        return Ran(status, out, err, *used, error, report.laps, refused, by_clock, starved)

    def _status(self, report: KeeperReport, over: bool) -> tuple[str, str]:
        limits, code = self.limits, report.exit
        if over:
            return OUTPUT_LIMIT, f"over {limits.output_bytes} bytes of output"
        if report.timeout == "wall":
            return TIMEOUT, f"over {limits.wall_s:g} s of wall clock time"
        if report.timeout == "starved":
            return TIMEOUT, "the host gave it no core, disk or question for too long"
        if report.timeout:
            return TIMEOUT, f"over {limits.cpu_s:g} s of CPU time"
        out = code == guest.OUT_OF_MEMORY or (code == -9 and self._out_of_memory())
        if report.memory or out:
            return OUT_OF_MEMORY, f"over {limits.memory_bytes >> 20} MiB of memory"
        if code == guest.REFUSED:
            return REFUSED, wanted(())
        if code < 0:
            return CRASHED, f"ended by signal {-code}"
        return OK, ""

    def _out_of_memory(self) -> bool:
        return self._group is not None and self._group.killed() > self._killed_before
