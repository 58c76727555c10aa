"""Between one jail's descriptors and its container: carries its channels, bounds it from outside,
and ends it.

A process of its own, forked for each call. The keeper inside measures and reports as in any jail;
what it says is believed within what is seen from here: the wall clock, less what the runner's
processes have waited for a core, their CPU time and their memory. It ends with the call, when the
sandbox closes the keeper's channel (also by dying), or by SIGTERM when its spawner has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from meshrl.common.job.isolation.runners import Runner
from meshrl.services.sandbox.isolation.jails.program import KeeperReport
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.runners import leftovers
from meshrl.services.sandbox.jail.confinement import kernel
from meshrl.services.sandbox.jail.guests import guest
from meshrl.services.sandbox.jail.metering import watch
from meshrl.services.sandbox.jail.wire import frames, mux

START_S = 60.0  # for a container to start, on a busy host
LOOK_S = 0.1  # between two looks at what it uses
MEMORY_LOOK_S = 0.5  # the same for memory, which takes the kernel longer to add up
CPU_FACTOR, CPU_MORE_S = 2.0, 1.0  # times a limit of CPU time, and more: a runner's own
IDLE_CPU_S, IDLE_SHARE = 1.0, 0.1  # CPU time that a paused session may use, and per second of it
SLACK_BYTES = 64 << 20  # memory beside the guest's and its files
LEAVING_S = 2.0  # for a container to end by itself when its jail has
SAID_BYTES = 4096  # kept of what the runner says on its standard error
REPORT_BYTES = 1 << 16
TIMEOUTS = ("cpu", "wall", "starved")  # that a report may name
TEXT, CALLS = 2000, 512  # characters, and system calls by name, that a report may have


class BridgeEnded(BaseException):
    """SIGTERM has come, or the sandbox wants no more of this."""


class NoContainer(Exception):
    """There is no jail: why, in words."""


class Bridge:
    """One call's. `fds` are the jail's descriptors, by name; `place` is its directory; `request`
    says to the inside what it is; `limits` are held from here.
    """

    def __init__(
        self,
        runner: Runner,
        place: Path,
        inside: list[str],
        carried: bytes,
        limits: JailLimits,
        request: dict[str, Any],
        fds: dict[str, int],
        nice: int,
    ) -> None:
        self._runner, self._place, self._fds = runner, place, fds
        self._name = f"{place.parent.name}-{place.name}"
        self._inside, self._carried = inside, carried
        self._limits, self._request, self._nice = limits, request, nice
        self._process: subprocess.Popen[bytes] | None = None
        self._said = bytearray()
        self._asked, self._reported, self._hello = bytearray(), bytearray(), bytearray()
        self._nonce = ""
        self._laps = 0
        self._stands = bool(request.get("stands", False))
        self._report: dict[str, Any] | None = None

    def run(self) -> NoReturn:
        signal.signal(signal.SIGTERM, _raise)
        keeper = self._fds["keeper"]
        os.set_blocking(keeper, False)
        try:
            self._start()
            report = self._carry(keeper)
        except BridgeEnded:
            report = None
        except (NoContainer, mux.Garbage) as error:
            text = str(error)
            if isinstance(error, mux.Garbage):
                text = f"what it says is no jail's: {error.args[0][:100]!r}"
            said = self._said.decode("utf-8", "replace").strip()[-300:]
            report = {"failed": f"{self._runner.name}: {text}{': ' if said else ''}{said}"}
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if report is None or "failed" in report:
            self._kill()
        if self._process is not None:
            for name in self._fds.keys() - {"keeper"}:
                self._link.finish(mux.NAMED[name])
        if report is not None:
            os.set_blocking(keeper, True)
            with contextlib.suppress(frames.Closed):
                frames.send(keeper, report)
        os.close(keeper)
        self._end()
        os._exit(0)

    # ---- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        if "usage" in self._fds:
            os.close(self._fds.pop("usage"))
        lists = [self._fds.pop(name) for name in list(self._fds) if name.startswith("group")]

        def become() -> None:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            for fd in lists:
                os.write(fd, b"0")
            os.nice(self._nice)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        delete = self._runner.delete(self._place, self._name)
        (self._place / leftovers.DELETE).write_text(json.dumps(delete))
        try:
            self._process = subprocess.Popen(
                self._runner.start(self._place, self._name, self._inside),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=leftovers.environment()
                | {leftovers.MARK: self._name, "HOME": str(self._place)},
                start_new_session=True,
                pass_fds=lists,
                preexec_fn=become,
            )
        except OSError as error:
            raise NoContainer(f"it does not start: {error.strerror}") from error
        finally:
            for fd in lists:
                os.close(fd)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._errors = self._process.stderr.fileno()
        os.set_blocking(self._errors, False)
        link = mux.Mux(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._link = link
        link.outbox += self._carried + frames.pack(self._request)
        link.attach(mux.CONTROL, took=self._hello.extend)
        link.attach(mux.KEEPER, took=self._reported.extend)
        for name, fd in self._fds.items():
            if name == "keeper":
                continue
            reading = -1 if name in ("stdout", "stderr") else fd
            link.attach(mux.NAMED[name], reading, -1 if name == "stdin" else fd)

    # ---- the way of a call --------------------------------------------------------------------

    def _carry(self, keeper: int) -> dict[str, Any] | None:
        """The report to hand on; None when there is none: the container has ended by itself."""
        started = time.monotonic()
        clock: ContainerClock | None = None
        others = [keeper, self._errors]
        while True:
            ready = self._link.step(LOOK_S, others)
            if self._errors in ready and not self._hear():
                others.remove(self._errors)
            if keeper in ready:
                clock = self._told(keeper, clock)
            if self._finished():
                return self._report
            if self._link.over and self._report is None:
                if self._hello:
                    return None
                raise NoContainer(f"the container ended at its start{self._how()}")
            if not self._hello and time.monotonic() - started > START_S:
                raise NoContainer(f"the container has not started after {START_S:g} s")
            if clock is None and self._hello and self._nonce:
                clock = ContainerClock(self._limits, stands=self._stands)
            if clock is not None and (end := clock.look()):
                return self._stopped(end, clock)

    def _told(self, keeper: int, clock: ContainerClock | None) -> ContainerClock | None:
        """Hands on what the sandbox says to the keeper, and follows it."""
        part = frames.read_now(keeper, 1 << 16)
        if part is None:
            return clock
        if not part:
            raise BridgeEnded
        self._link.send(mux.KEEPER, part)
        self._asked += part
        while (frame := _taken(self._asked)) is not None:
            if "mode" not in frame:
                self._nonce = str(frame.get("nonce", self._nonce))
            if "lap" in frame:
                self._laps += 1
                if clock is not None:
                    clock.lap(bool(frame.get("pause")))
            if "turn" in frame:
                self._stands = not frame["turn"]
                if clock is not None:
                    clock.turn(bool(frame["turn"]))
        return clock

    def _finished(self) -> bool:
        """Whether the keeper has reported, and all that was printed before is handed on."""
        if max(len(self._reported), len(self._hello)) > REPORT_BYTES:
            raise NoContainer("the keeper's report is none")
        if self._report is None and (report := _taken(self._reported)) is not None:
            self._report = plain(report)
        return self._report is not None and all(map(self._link.passed_on, mux.OUTPUTS))

    def _stopped(self, end: str, clock: ContainerClock) -> dict[str, Any]:
        """The report of one that was ended from here."""
        self._kill()
        until = time.monotonic() + LEAVING_S
        while not self._link.over and time.monotonic() < until:
            self._link.step(LOOK_S)
        memory = end == "memory"
        return {
            "nonce": self._nonce,
            "exit": guest.OUT_OF_MEMORY if memory else -signal.SIGKILL,
            "timeout": "" if memory else end,
            "cpu_s": clock.cpu_s,
            "wall_s": clock.wall_s,
            "laps": self._laps,
        }

    def _hear(self) -> bool:
        """Keeps the last words of the runner; False at their end."""
        part = frames.read_now(self._errors, SAID_BYTES)
        self._said += part or b""
        del self._said[:-SAID_BYTES]
        return part != b""

    def _how(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            return ""
        self._hear()
        return f" by signal {-code}" if code < 0 else f" with status {code}"

    # ---- end ----------------------------------------------------------------------------------

    def _kill(self) -> None:
        """All processes of the container that are seen from here."""
        while self._process and (pids := list(filter(leftovers.runs, leftovers.tree(os.getpid())))):
            leftovers.kill_all(pids)
            time.sleep(0.002)

    def _end(self) -> None:
        """Leaves nothing: no process, nothing that its runtime keeps of it, no file."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if self._report is None else LEAVING_S)
            unended = self._process.poll() != 0
            self._kill()
            if unended:
                leftovers.delete(self._place)
        shutil.rmtree(os.path.join(tempfile.gettempdir(), self._name), ignore_errors=True)
        shutil.rmtree(self._place, ignore_errors=True)


class ContainerClock:
    """The time of a container, seen from outside; each lap begins it anew."""

    def __init__(self, limits: JailLimits, stands: bool) -> None:
        """`stands`: until the first lap, or until a turn begins."""
        self._limits = limits
        self._memory_most = limits.memory_bytes + limits.scratch_bytes + SLACK_BYTES
        use = self._use(memory=True)
        self._base_bytes = use.memory_bytes
        self._begun = self._memory_at = time.monotonic()
        self._paused = False
        self.cpu_s = self.wall_s = 0.0
        self._lap(use)
        self.turn(not stands)

    def lap(self, pause: bool) -> None:
        self._paused = pause
        self._lap(self._use(memory=False))

    def _lap(self, use: leftovers.Use) -> None:
        self._at, self._before, self._stolen = time.monotonic(), use, watch.stolen()
        self._last: tuple[float, leftovers.Use] = (self._at, use)
        self._unseen_s = 0.0
        self._stood_s, self._stands_since = 0.0, 0.0

    def turn(self, ours: bool) -> None:
        """Lets the clock run, or stand."""
        now = time.monotonic()
        if not ours:
            self._stands_since = self._stands_since or now
        elif self._stands_since:
            self._stood_s += now - self._stands_since
            self._stands_since = 0.0

    def _use(self, memory: bool) -> leftovers.Use:
        return leftovers.use_of(leftovers.tree(os.getpid()), memory)

    def look(self) -> str:
        """What limit it is over: `wall`, `cpu` or `memory`; empty: none."""
        now = time.monotonic()
        memory = now - self._memory_at >= MEMORY_LOOK_S
        use = self._use(memory)
        # The kernel counts a wait for a core when it ends: one that goes on is seen by a process
        # that would run and does not.
        last, self._last = self._last, (now, use)
        if use.runnable:
            moved = use.cpu_s - last[1].cpu_s + use.queued_s - last[1].queued_s
            self._unseen_s += max(0.0, now - last[0] - moved)
        counted = use.queued_s - self._before.queued_s + watch.stolen() - self._stolen
        elapsed, cpu = now - self._at, use.cpu_s - self._before.cpu_s
        self.cpu_s, self.wall_s = cpu, now - self._begun
        if memory:
            self._memory_at = now
            if use.memory_bytes - self._base_bytes > self._memory_most:
                return "memory"
        if self._paused:
            return "cpu" if cpu > IDLE_CPU_S + IDLE_SHARE * elapsed else ""
        limits = self._limits
        if cpu > CPU_FACTOR * limits.cpu_s + CPU_MORE_S:
            return "cpu"
        if elapsed <= limits.wall_s:
            return ""
        if cpu > limits.cpu_s + CPU_MORE_S:
            return "cpu"
        if elapsed > watch.SLOWEST * limits.wall_s + watch.SLOWEST_S:
            return "starved"
        ran_s = elapsed - counted - self._unseen_s - self._stood_s
        return "wall" if not self._stands_since and ran_s > limits.wall_s else ""


def plain(report: dict[str, Any]) -> dict[str, Any]:
    """A report with nothing in it but what one has: a kernel inside may have made it."""
    if "failed" in report:
        return {"failed": str(report["failed"])[:TEXT]}
    try:
        found = KeeperReport.of(report)
        timeout = found.timeout if found.timeout in TIMEOUTS else ""
        found = replace(found, timeout=timeout, refused=found.refused[:CALLS])
        return {"nonce": str(report["nonce"]), **asdict(found)}
    except (KeyError, TypeError, ValueError) as error:
        raise NoContainer(f"the keeper's report is none: {error}") from None


def _taken(buffer: bytearray) -> dict[str, Any] | None:
    try:
        return frames.taken(buffer, frames.LIMIT)
    except frames.Closed as error:
        raise NoContainer(str(error)) from None


def _raise(*_: Any) -> None:
    raise BridgeEnded
