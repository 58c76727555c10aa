"""Grading of one answer: state that its styles of tests share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from meshrl.common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from meshrl.services.sandbox.grading.code.comparison import Tolerance
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import (
    GRACE_S,
    MAX_SLOWDOWN,
    Jail,
    JailFailed,
    ProgramResult,
)
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots

DEFAULT_CASE_CPU_S = 4.0  # CPU time for one case
SEND_S = 30.0  # for a jail to take a frame
MAX_JAIL_ENDING_CASES = 5  # cases that end their jail, mostly by time; later ones fail
MAX_EARLY_EXITS = 3  # for jails that ended before their first request
MAX_STARVED_JAILS = 1  # for jails that the host starved of time


class GradingAttempt:
    """Jails and limits of an answer's tests, and the number of tests that ended their jail."""

    def __init__(
        self, launcher: JailLauncher, slots: JailSlots, limits: JailLimits, options: dict[str, Any]
    ) -> None:
        self.launcher, self.clock, self.slots = launcher, launcher.clock, slots
        self.options = options
        self.gives_partial_credit = bool(options.get("partial", True))
        self.tolerance = Tolerance.from_options(options)
        self.jail_ending_cases = 0  # cases that ended their jail
        self._early_exits = self._starved_jails = 0  # jails that ended unused, or starved
        case_s = float(options.get("case_s", DEFAULT_CASE_CPU_S))
        memory = int(options.get("memory_mb", 0)) * MIB
        self.limits = limits.lower(wall_s=case_s, cpu_s=case_s, memory_bytes=memory)

    def is_finished(self, verdicts: list[bool]) -> bool:
        """Return whether to skip the remaining cases: none can raise the score, or time is up."""
        return self.jail_ending_cases >= MAX_JAIL_ENDING_CASES or not (
            self.gives_partial_credit or all(verdicts)
        )

    async def is_program_at_fault(self, jail: Jail) -> bool:
        """Return whether the program caused the end of a jail that does not answer.

        False: another jail is to be used. JailFailed if the jail has ended without its init
        process's report, or if too many jails of this answer were starved or ended before a
        request.
        """
        if not (
            jail.init_channel.is_eof
            or (jail.guest_channel is not None and jail.guest_channel.is_eof)
        ):
            return True
        ran = await jail.finish()
        if ran.is_starved:
            self.count_starved(ran)
            return False
        if ran.laps >= jail.laps:
            return True
        self._early_exits += 1
        if self._early_exits > MAX_EARLY_EXITS and ran.is_wall_timeout:
            raise JailFailed(
                f"{self._early_exits} jails exceeded their wall clock time before they "
                "received a question",
                where="sandbox",
                fix="Run fewer jails at once (`--jails`): this host is too slow for them",
            )
        return self._early_exits > MAX_EARLY_EXITS

    def count_starved(self, result: ProgramResult) -> None:
        """Count a jail that the host starved of time. JailFailed if there were too many."""
        self._starved_jails += 1
        if self._starved_jails > MAX_STARVED_JAILS:
            raise JailFailed(
                f"the host gave {self._starved_jails} jails of one answer no time to run: the "
                "last had "
                f"{result.cpu_s:.2f} s of CPU time in {result.wall_s:.0f} s, and did not sleep "
                "by choice",
                where="sandbox",
                fix="Run fewer jails at once on this host (`--jails`), or raise options.case_s",
            )

    # ---- messages to a jail -------------------------------------------------------------------

    def start_lap(self, jail: Jail, clock_paused: bool = False) -> None:
        jail.start_lap(clock_paused)
        jail.output.remaining_bytes = self.limits.output_bytes

    async def send(self, jail: Jail, frame: dict[str, Any]) -> bool:
        """Send a frame to the guest; False if its jail has ended."""
        assert jail.guest_channel is not None
        try:
            await jail.guest_channel.send(self.clock, frame, SEND_S)
        except PeerLost:
            return False
        return True

    async def receive(self, jail: Jail, extra_timeout_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next frame of the guest; None if its jail has ended or sends invalid data.

        JailFailed where a jail is silent for longer than its init process permits.
        """
        assert jail.guest_channel is not None
        try:
            timeout_s = MAX_SLOWDOWN * self.limits.wall_s + extra_timeout_s + GRACE_S
            frame: dict[str, Any] = await jail.guest_channel.receive(self.clock, timeout_s)
        except (PeerLost, BadMessage):
            return None
        except DeadlineExceeded as error:
            raise JailFailed(f"a jail hangs: {error.message}", where="sandbox") from error
        return frame


class JailedTrial(ABC):
    """Jails in which tests run one after the other, until one of them ends."""

    def __init__(self, attempt: GradingAttempt, *jails: Jail) -> None:
        self.attempt, self.jails = attempt, jails

    @abstractmethod
    async def start(self, next_test: int) -> int | None:
        """Return the number of tests, of which `next_test` is the next.

        None if a jail has ended; 0 if the solution does not load.
        """

    @abstractmethod
    async def run_test(self, number: int) -> bool | None:
        """Return whether that test is passed; None if a jail has ended."""

    async def is_program_at_fault(self) -> bool:
        return all([await self.attempt.is_program_at_fault(jail) for jail in self.jails])


async def run_trials(
    attempt: GradingAttempt, open_trial: Callable[[], Awaitable[JailedTrial]], count: int = 1
) -> list[bool]:
    """Return which tests are passed.

    One trial runs all tests. When its jails end in a test, another trial continues after that test.
    `count`: number of tests, as far as it is known before.
    """
    found: list[bool] = []
    while len(found) < count and not attempt.is_finished(found):
        trial = await open_trial()
        try:
            num_tests = await trial.start(len(found))
            if num_tests is None and not await trial.is_program_at_fault():
                continue
            if not num_tests:
                break
            count = num_tests
            while len(found) < count and not attempt.is_finished(found):
                verdict = await trial.run_test(len(found))
                if verdict is None and not await trial.is_program_at_fault():
                    break  # other jails are used
                found.append(verdict is True)
                if verdict is None:
                    attempt.jail_ending_cases += 1
                    break
        finally:
            for jail in trial.jails:
                jail.close()
    return found + [False] * (count - len(found))
