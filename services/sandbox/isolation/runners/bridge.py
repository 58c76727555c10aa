"""Bridge between one jail's descriptors and its container, in a process forked for each call.

It carries the container's channels, bounds it from outside, and ends it. The init process inside
measures and reports as in any jail. Its report is accepted within what this process measures: the
wall clock, less the time that the runner's processes have waited for a core, their CPU time and
their memory. The bridge ends with the call, when the sandbox closes the init process's channel
(also by dying), or by SIGTERM when its spawner has ended.
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

from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.services.sandbox.isolation.jails.program import InitReport
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.runners import container_cleanup
from meshrl.services.sandbox.jail.confinement import syscalls
from meshrl.services.sandbox.jail.guests import guest
from meshrl.services.sandbox.jail.metering import watch
from meshrl.services.sandbox.jail.wire import frames, mux

START_S = 60.0  # for a container to start, on a busy host
POLL_S = 0.1  # between two checks of its usage
MEMORY_POLL_S = 0.5  # the same for memory, which takes the kernel longer to add up
CPU_FACTOR, CPU_MORE_S = 2.0, 1.0  # times a limit of CPU time, and more: a runner's own
IDLE_CPU_S, IDLE_SHARE = 1.0, 0.1  # CPU time that a paused session may use, and per second of it
SLACK_BYTES = 64 << 20  # memory beside the guest's and its files
EXIT_GRACE_S = 2.0  # for a container to end by itself after its jail
MAX_STDERR_BYTES = 4096  # retained of the runner's standard error
REPORT_BYTES = 1 << 16
TIMEOUTS = ("cpu", "wall", "starved")  # limits that a report may name
TEXT, CALLS = 2000, 512  # characters, and system calls by name, that a report may have


class BridgeStopped(BaseException):
    """Error raised at SIGTERM, or when the sandbox cancels the call."""


class NoContainer(Exception):
    """Error raised when there is no jail, with the reason."""


class Bridge:
    """Bridge of one call.

    `fds` are the jail's descriptors, by name. The request describes the call to the container, and
    its limits are enforced from here.
    """

    def __init__(
        self,
        runner: ContainerRunner,
        directory: Path,
        command: list[str],
        package_frame: bytes,
        limits: JailLimits,
        request: dict[str, Any],
        fds: dict[str, int],
        nice: int,
    ) -> None:
        self._runner, self._directory, self._fds = runner, directory, fds
        self._name = f"{directory.parent.name}-{directory.name}"
        self._command, self._package_frame = command, package_frame
        self._limits, self._request, self._nice = limits, request, nice
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr_tail = bytearray()
        self._command_buffer, self._report_buffer, self._hello = (
            bytearray(),
            bytearray(),
            bytearray(),
        )
        self._nonce = ""
        self._laps = 0
        self._clock_paused = bool(request.get("stands", False))
        self._report: dict[str, Any] | None = None

    def run(self) -> NoReturn:
        signal.signal(signal.SIGTERM, _raise_stopped)
        keeper = self._fds["keeper"]
        os.set_blocking(keeper, False)
        try:
            self._start_container()
            report = self._forward(keeper)
        except BridgeStopped:
            report = None
        except (NoContainer, mux.MuxProtocolError) as error:
            text = str(error)
            if isinstance(error, mux.MuxProtocolError):
                text = f"its output is not that of a jail: {error.args[0][:100]!r}"
            stderr_text = self._stderr_tail.decode("utf-8", "replace").strip()[-300:]
            report = {
                "failed": f"{self._runner.name}: {text}{': ' if stderr_text else ''}{stderr_text}"
            }
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if report is None or "failed" in report:
            self._kill_processes()
        if self._process is not None:
            for name in self._fds.keys() - {"keeper"}:
                self._mux.close_writer(mux.CHANNELS_BY_NAME[name])
        if report is not None:
            os.set_blocking(keeper, True)
            with contextlib.suppress(frames.FrameChannelClosed):
                frames.send(keeper, report)
        os.close(keeper)
        self._clean_up()
        os._exit(0)

    # ---- start --------------------------------------------------------------------------------

    def _start_container(self) -> None:
        if "usage" in self._fds:
            os.close(self._fds.pop("usage"))
        lists = [self._fds.pop(name) for name in list(self._fds) if name.startswith("group")]

        def become() -> None:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            for fd in lists:
                os.write(fd, b"0")
            os.nice(self._nice)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        delete = self._runner.build_delete_command(self._directory, self._name)
        (self._directory / container_cleanup.DELETE_COMMAND_FILE).write_text(json.dumps(delete))
        try:
            self._process = subprocess.Popen(
                self._runner.build_start_command(self._directory, self._name, self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=container_cleanup.runner_environment()
                | {container_cleanup.CONTAINER_ENV: self._name, "HOME": str(self._directory)},
                start_new_session=True,
                pass_fds=lists,
                preexec_fn=become,
            )
        except OSError as error:
            raise NoContainer(f"the runner cannot be started: {error.strerror}") from error
        finally:
            for fd in lists:
                os.close(fd)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stderr_fd = self._process.stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
        link = mux.Mux(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._mux = link
        link.outbox += self._package_frame + frames.pack(self._request)
        link.attach(mux.CONTROL, on_data=self._hello.extend)
        link.attach(mux.INIT, on_data=self._report_buffer.extend)
        for name, fd in self._fds.items():
            if name == "keeper":
                continue
            reading = -1 if name in ("stdout", "stderr") else fd
            link.attach(mux.CHANNELS_BY_NAME[name], reading, -1 if name == "stdin" else fd)

    # ---- forwarding ---------------------------------------------------------------------------

    def _forward(self, init_fd: int) -> dict[str, Any] | None:
        """Forward data until the end, and return the report; None when the container ended by
        itself.
        """
        started = time.monotonic()
        clock: ContainerClock | None = None
        others = [init_fd, self._stderr_fd]
        while True:
            ready = self._mux.step(POLL_S, others)
            if self._stderr_fd in ready and not self._read_stderr():
                others.remove(self._stderr_fd)
            if init_fd in ready:
                clock = self._forward_commands(init_fd, clock)
            if self._is_finished():
                return self._report
            if self._mux.is_closed and self._report is None:
                if self._hello:
                    return None
                raise NoContainer(f"the container exited during its start{self._describe_exit()}")
            if not self._hello and time.monotonic() - started > START_S:
                raise NoContainer(f"the container has not started within {START_S:g} s")
            if clock is None and self._hello and self._nonce:
                clock = ContainerClock(self._limits, paused=self._clock_paused)
            if clock is not None and (end := clock.find_exceeded_limit()):
                return self._kill_over_limit(end, clock)

    def _forward_commands(
        self, init_fd: int, clock: ContainerClock | None
    ) -> ContainerClock | None:
        """Forward the sandbox's commands to the init process, and apply them here."""
        part = frames.read_available(init_fd, 1 << 16)
        if part is None:
            return clock
        if not part:
            raise BridgeStopped
        self._mux.send(mux.INIT, part)
        self._command_buffer += part
        while (frame := _take_frame(self._command_buffer)) is not None:
            if "mode" not in frame:
                self._nonce = str(frame.get("nonce", self._nonce))
            if "lap" in frame:
                self._laps += 1
                if clock is not None:
                    clock.start_lap(bool(frame.get("pause")))
            if "turn" in frame:
                self._clock_paused = not frame["turn"]
                if clock is not None:
                    clock.set_running(bool(frame["turn"]))
        return clock

    def _is_finished(self) -> bool:
        """Return whether the init process has reported, and all earlier output is forwarded."""
        if max(len(self._report_buffer), len(self._hello)) > REPORT_BYTES:
            raise NoContainer("the init process sent an invalid report")
        if self._report is None and (report := _take_frame(self._report_buffer)) is not None:
            self._report = sanitize_report(report)
        return self._report is not None and all(map(self._mux.is_delivered, mux.OUTPUTS))

    def _kill_over_limit(self, limit: str, clock: ContainerClock) -> dict[str, Any]:
        """Kill a container that exceeds a limit, and return its report."""
        self._kill_processes()
        until = time.monotonic() + EXIT_GRACE_S
        while not self._mux.is_closed and time.monotonic() < until:
            self._mux.step(POLL_S)
        memory = limit == "memory"
        return {
            "nonce": self._nonce,
            "exit_code": guest.OUT_OF_MEMORY_EXIT if memory else -signal.SIGKILL,
            "timeout": "" if memory else limit,
            "cpu_s": clock.cpu_s,
            "wall_s": clock.wall_s,
            "laps": self._laps,
        }

    def _read_stderr(self) -> bool:
        """Read the runner's standard error and retain its end; False when it is closed."""
        part = frames.read_available(self._stderr_fd, MAX_STDERR_BYTES)
        self._stderr_tail += part or b""
        del self._stderr_tail[:-MAX_STDERR_BYTES]
        return part != b""

    def _describe_exit(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return ""
        self._read_stderr()
        return f" by signal {-code}" if code < 0 else f" with status {code}"

    # ---- end ----------------------------------------------------------------------------------

    def _kill_processes(self) -> None:
        """Kill all processes of the container that are visible from here."""
        while self._process and (
            pids := list(
                filter(
                    container_cleanup.is_running, container_cleanup.list_descendants(os.getpid())
                )
            )
        ):
            container_cleanup.kill_all(pids)
            time.sleep(0.002)

    def _clean_up(self) -> None:
        """Remove all processes, runtime state and files of the container."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if self._report is None else EXIT_GRACE_S)
            unended = self._process.poll() != 0
            self._kill_processes()
            if unended:
                container_cleanup.delete_container(self._directory)
        shutil.rmtree(os.path.join(tempfile.gettempdir(), self._name), ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)


class ContainerClock:
    """Clock of a container, measured from outside; each lap restarts it."""

    def __init__(self, limits: JailLimits, paused: bool) -> None:
        """Create a clock; `paused`: until the first lap, or until it is set running."""
        self._limits = limits
        self._max_memory_bytes = limits.memory_bytes + limits.scratch_bytes + SLACK_BYTES
        use = self._read_usage(memory=True)
        self._base_bytes = use.memory_bytes
        self._started_at = self._memory_checked_at = time.monotonic()
        self._session_paused = False
        self.cpu_s = self.wall_s = 0.0
        self._reset(use)
        self.set_running(not paused)

    def start_lap(self, pause: bool) -> None:
        self._session_paused = pause
        self._reset(self._read_usage(memory=False))

    def _reset(self, usage: container_cleanup.ContainerUsage) -> None:
        self._lap_started_at, self._lap_usage, self._lap_steal_s = (
            time.monotonic(),
            usage,
            watch.read_steal_s(),
        )
        self._last_sample: tuple[float, container_cleanup.ContainerUsage] = (
            self._lap_started_at,
            usage,
        )
        self._uncounted_wait_s = 0.0
        self._paused_s, self._paused_since = 0.0, 0.0

    def set_running(self, running: bool) -> None:
        """Start or stop the clock."""
        now = time.monotonic()
        if not running:
            self._paused_since = self._paused_since or now
        elif self._paused_since:
            self._paused_s += now - self._paused_since
            self._paused_since = 0.0

    def _read_usage(self, memory: bool) -> container_cleanup.ContainerUsage:
        return container_cleanup.read_usage(container_cleanup.list_descendants(os.getpid()), memory)

    def find_exceeded_limit(self) -> str:
        """Return the exceeded limit: `wall`, `cpu` or `memory`; empty: none."""
        now = time.monotonic()
        memory = now - self._memory_checked_at >= MEMORY_POLL_S
        use = self._read_usage(memory)
        # The kernel counts a wait for a core when it ends: a current one shows as a process
        # that is runnable and does not run.
        last, self._last_sample = self._last_sample, (now, use)
        if use.is_runnable:
            moved = use.cpu_s - last[1].cpu_s + use.queued_s - last[1].queued_s
            self._uncounted_wait_s += max(0.0, now - last[0] - moved)
        counted = use.queued_s - self._lap_usage.queued_s + watch.read_steal_s() - self._lap_steal_s
        elapsed, cpu = now - self._lap_started_at, use.cpu_s - self._lap_usage.cpu_s
        self.cpu_s, self.wall_s = cpu, now - self._started_at
        if memory:
            self._memory_checked_at = now
            if use.memory_bytes - self._base_bytes > self._max_memory_bytes:
                return "memory"
        if self._session_paused:
            return "cpu" if cpu > IDLE_CPU_S + IDLE_SHARE * elapsed else ""
        limits = self._limits
        if cpu > CPU_FACTOR * limits.cpu_s + CPU_MORE_S:
            return "cpu"
        if elapsed <= limits.wall_s:
            return ""
        if cpu > limits.cpu_s + CPU_MORE_S:
            return "cpu"
        if elapsed > watch.MAX_SLOWDOWN * limits.wall_s + watch.MAX_SLOWDOWN_EXTRA_S:
            return "starved"
        ran_s = elapsed - counted - self._uncounted_wait_s - self._paused_s
        return "wall" if not self._paused_since and ran_s > limits.wall_s else ""


def sanitize_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with valid fields only: a kernel inside may have forged it."""
    if "failed" in report:
        return {"failed": str(report["failed"])[:TEXT]}
    try:
        found = InitReport.from_frame(report)
        timeout = found.timeout if found.timeout in TIMEOUTS else ""
        found = replace(found, timeout=timeout, denied_calls=found.denied_calls[:CALLS])
        return {"nonce": str(report["nonce"]), **asdict(found)}
    except (KeyError, TypeError, ValueError) as error:
        raise NoContainer(f"the init process sent an invalid report: {error}") from None


def _take_frame(buffer: bytearray) -> dict[str, Any] | None:
    try:
        return frames.take_frame(buffer, frames.MAX_FRAME_BYTES)
    except frames.FrameChannelClosed as error:
        raise NoContainer(str(error)) from None


def _raise_stopped(*_: Any) -> None:
    raise BridgeStopped
