"""Running jail: exchanges frames, watches the jail to its end, and classifies that end."""

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
from meshrl.services.sandbox.isolation.jails.program import InitReport
from meshrl.services.sandbox.isolation.resources.cgroups import Cgroup
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.jail.confinement import syscall_table
from meshrl.services.sandbox.jail.guests import guest

GRACE_S = 60.0  # past its limits, until a jail counts as stuck: init should have ended it
MAX_SLOWDOWN = 10.0  # times its wall clock limit that a jail may take, waits for cores included
DRAIN_S = 5.0  # for a killed jail's output to end


class JailFailed(MeshError):
    """Error raised when no jail could be made; the sandbox's fault, not the code's."""

    code = "jail_failed"


@dataclass(frozen=True)
class ProgramResult:
    """End of a program, and its output."""

    status: str
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    error: str = ""
    laps: int = 0  # laps that had begun before it ended
    denied_calls: tuple[str, ...] = ()  # system calls that were denied, each once
    is_wall_timeout: bool = False  # the wall clock ended it
    is_starved: bool = False  # by the clock, though it waited for the host and not by itself


def describe_denial(denied_calls: tuple[str, ...]) -> str:
    """Describe why calls of a program were denied.

    `denied_calls` may be empty: writing to a read-only path, for example, needs no denied call.
    """
    text = "the program attempted an operation that the sandbox denies"
    return f"{text}: {', '.join(denied_calls)}" if denied_calls else text


class Jail:
    """Jail from its start to `finish`."""

    def __init__(
        self,
        clock: Clock,
        limits: JailLimits,
        init_channel: Pipe,
        guest_channel: Pipe | None,
        output: JailOutput,
        cgroup: Cgroup | None,
        on_close: Callable[[], None],
    ) -> None:
        """Wrap a started jail; `on_close` is called once, when it has been closed."""
        self._clock, self.limits = clock, limits
        self.init_channel, self.guest_channel, self.output = init_channel, guest_channel, output
        self._cgroup, self._on_close = cgroup, on_close
        self._is_closed = False
        self._early_report: dict[str, Any] = {}  # its last frame, if it came while no call waited
        self.laps = 0  # laps that its init process was sent
        self._oom_kills_before = cgroup.read_oom_kills() if cgroup else 0
        self.nonce = secrets.token_hex(16)

    @property
    def stdout(self) -> bytes:
        return self.output.streams[0].take()

    @property
    def stderr(self) -> bytes:
        return self.output.streams[1].take()

    def start_lap(self, clock_paused: bool = False) -> None:
        """Restart the jail's clocks, and resume what was paused.

        With `clock_paused` the wall clock stands until `set_clock_running` starts it.
        """
        self.laps += 1
        self.init_channel.send_now({"lap": True, "turn": not clock_paused})
        if self._cgroup is not None and self._cgroup.can_freeze:
            self._cgroup.set_frozen(False)

    def set_clock_running(self, running: bool) -> None:
        self.init_channel.send_now({"turn": running})

    def pause(self) -> None:
        """Stop the jail, and then its clocks, until the next lap.

        Its control group freezes it, or its init process stops it.
        """
        self.laps += 1
        frozen = self._cgroup is not None and self._cgroup.can_freeze
        if self._cgroup is not None and frozen:
            self._cgroup.set_frozen(True)
        self.init_channel.send_now({"lap": True, "pause": True, "stop": not frozen})

    def take_denied_calls(self) -> tuple[str, ...]:
        """Return the names of system calls denied for the first time since the last call."""
        found = []
        for frame in self.init_channel.take_frames():
            if "refuses" in frame:
                found.append(syscall_table.get_name(int(frame["refuses"])))
            else:
                self._early_report = frame
        return tuple(found)

    def has_ended(self) -> bool:
        """Return whether its init process has reported its end, or is gone."""
        self.take_denied_calls()
        return bool(self._early_report) or self.init_channel.is_eof

    async def receive_report(self, deadline_s: float) -> InitReport:
        frame = self._early_report
        while not frame or "refuses" in frame:
            frame = await self.init_channel.receive(self._clock, deadline_s)
        if "failed" in frame:
            raise JailFailed(str(frame["failed"]), where="sandbox")
        if frame.get("nonce") != self.nonce:
            raise BadMessage("a report lacks the nonce of its call")
        try:
            return InitReport.from_frame(frame)
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"a report is invalid: {error}") from None

    async def finish(self) -> ProgramResult:
        """Wait for the jail's end, which limits bound, and clean up after it."""
        report = InitReport()
        missing = ""
        deadline_s = MAX_SLOWDOWN * self.limits.wall_s + GRACE_S
        waited = asyncio.ensure_future(self.receive_report(deadline_s))
        try:
            await asyncio.wait(
                {waited, self.output.over_limit}, return_when=asyncio.FIRST_COMPLETED
            )
            if waited.done():
                try:
                    report = waited.result()
                except (PeerLost, BadMessage, DeadlineExceeded) as error:
                    missing = error.message
            self.init_channel.close()
            await self.output.drain(self._clock, DRAIN_S)
            over = self.output.over_limit.done()
            if missing and not over and not self._is_out_of_memory():
                # No guest can end its init process: the zygote was killed, or it hangs.
                raise JailFailed(f"a jail ended without a report: {missing}", where="sandbox")
            return self._build_result(report, over)
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)
            self.close()

    def close(self) -> None:
        self.init_channel.close()
        if self.guest_channel is not None:
            self.guest_channel.close()
        self.output.close()
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def _build_result(self, report: InitReport, over_output_limit: bool) -> ProgramResult:
        status, error = self._classify_exit(report, over_output_limit)
        refused = tuple(syscall_table.get_name(number) for number in report.denied_calls)
        if status == REFUSED:
            error = describe_denial(refused)
        used = report.exit_code, report.cpu_s, report.wall_s
        starved = report.timeout == "starved"
        by_clock = starved or report.timeout == "wall"
        out, err = self.stdout, self.stderr
        return ProgramResult(
            status, out, err, *used, error, report.laps, refused, by_clock, starved
        )

    def _classify_exit(self, report: InitReport, over_output_limit: bool) -> tuple[str, str]:
        limits, code = self.limits, report.exit_code
        if over_output_limit:
            return OUTPUT_LIMIT, f"over {limits.output_bytes} bytes of output"
        if report.timeout == "wall":
            return TIMEOUT, f"over {limits.wall_s:g} s of wall clock time"
        if report.timeout == "starved":
            return TIMEOUT, "the jail waited too long for a core, the disk or a question"
        if report.timeout:
            return TIMEOUT, f"over {limits.cpu_s:g} s of CPU time"
        out = code == guest.OUT_OF_MEMORY_EXIT or (code == -9 and self._is_out_of_memory())
        if report.out_of_memory or out:
            return OUT_OF_MEMORY, f"over {limits.memory_bytes >> 20} MiB of memory"
        if code == guest.DENIED_EXIT:
            return REFUSED, describe_denial(())
        if code < 0:
            return CRASHED, f"ended by signal {-code}"
        return OK, ""

    def _is_out_of_memory(self) -> bool:
        return self._cgroup is not None and self._cgroup.read_oom_kills() > self._oom_kills_before
