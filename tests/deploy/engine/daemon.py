"""Docker daemon, its network namespace and the namespace's uplink, started and stopped directly."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy.engine import packages
from tests.deploy.engine.packages import EngineError, run
from tests.load import scaled

READY_S = 60.0
END_S = 60.0  # containers are given ten seconds of it
PAUSE_S = 0.1
SHARES = 20 * 1024  # the weight of twenty processes, about as many as a mesh has
SHORT_S = 30.0


class Engine:
    """Engine whose state is in one directory; `start` and `stop` may be repeated."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        # Names of namespaces and control groups are global on the machine.
        self.name = "meshrl-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        self.socket = self.state / "docker.sock"

    def variables(self) -> dict[str, str]:
        """Environment variables of programs that use the engine."""
        return {
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_CONFIG": str(self.state / "config"),
            "MESHRL_ENGINE_ENTER": f"nsenter --net=/run/netns/{self.name}",
        }

    def docker(self, *arguments: str, timeout: float = packages.INSTALL_S) -> str:
        """Return the output of a docker command."""
        given = [f"{name}={value}" for name, value in self.variables().items()]
        return run("env", *given, "docker", *arguments, timeout=timeout)

    def start(self) -> None:
        """Start the engine and wait until it answers; EngineError names missing parts."""
        if self._is_answering():
            return
        if os.geteuid() != 0:
            raise EngineError("an engine started by hand needs root, or a service that runs")
        self.stop()  # remains of a killed engine
        self.state.mkdir(parents=True, exist_ok=True)
        packages.install()
        packages.add_plugins(self.state / "config", self.state)
        run("ip", "netns", "add", self.name, timeout=SHORT_S)
        self._enter("ip", "link", "set", "lo", "up")
        space = f"/run/netns/{self.name}"
        self._spawn("slirp", "slirp4netns", "--configure", "--disable-host-loopback",
                    "--netns-type=path", space, "tap0")  # fmt: skip
        self._wait("the namespace has no way out", self._has_uplink)
        # Not `ip netns exec`, which mounts another /sys without control groups.
        self._spawn(
            "dockerd", "nsenter", f"--net={space}", "dockerd",
            "--data-root", str(self.state / "data"), "--exec-root", str(self.state / "exec"),
            "--pidfile", str(self.state / "docker.pid"), "--host", f"unix://{self.socket}",
            "--cgroup-parent", f"/{self.name}", "--config-file", str(self._settings()),
        )  # fmt: skip
        self._wait("the daemon does not answer", self._is_answering)
        self._set_cpu_shares()

    def _set_cpu_shares(self) -> None:
        """Set the weight of all containers, which version 1 of control groups treats as one
        process.
        """
        shares = Path("/sys/fs/cgroup/cpu") / self.name / "cpu.shares"
        if shares.parent.parent.joinpath("cpu.shares").exists():
            shares.parent.mkdir(exist_ok=True)
            shares.write_text(str(SHARES))

    def stop(self) -> None:
        """Stop everything that `start` has started, containers first; images and volumes stay."""
        for name in ("dockerd", "slirp"):
            self._end(name)
        if Path(f"/run/netns/{self.name}").exists():
            run("ip", "netns", "delete", self.name, timeout=SHORT_S)

    def _settings(self) -> Path:
        path = self.state / "daemon.json"
        path.write_text('{"log-driver": "json-file"}\n')
        return path

    def _enter(self, *command: str) -> str:
        return run("nsenter", f"--net=/run/netns/{self.name}", *command, timeout=SHORT_S)

    def _has_uplink(self) -> bool:
        return "default" in self._enter("ip", "route")

    def _is_answering(self) -> bool:
        if not self.socket.exists():
            return False
        try:
            self.docker("info", timeout=SHORT_S)
        except EngineError:
            return False
        return True

    def _spawn(self, name: str, *command: str) -> None:
        with (self.state / f"{name}.log").open("ab") as log:
            begun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.state / f"{name}.owned").write_text(f"{begun.pid} {_read_start_time(begun.pid)}")

    def _wait(self, failed: str, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + scaled(READY_S)
        while not ready():
            if time.monotonic() > until:
                logs = sorted(self.state.glob("*.log"), key=lambda path: path.stat().st_mtime)
                raise EngineError(f"{failed}: {logs[-1].read_text()[-1500:] if logs else ''}")
            time.sleep(PAUSE_S)

    def _end(self, name: str) -> None:
        note = self.state / f"{name}.owned"
        if not note.exists():
            return
        pid, born = note.read_text().split()
        for number in (signal.SIGTERM, signal.SIGKILL):
            started_s = time.monotonic()
            until = started_s + scaled(END_S)
            while _read_start_time(int(pid)) == born and time.monotonic() < until:
                if time.monotonic() - PAUSE_S > started_s:  # once, at the beginning
                    os.kill(int(pid), number)
                time.sleep(PAUSE_S)
        note.unlink()


def _read_start_time(pid: int) -> str:
    """Return the start time of a process, which distinguishes reused pids; "" if it has exited."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if stat[0] == "Z" else stat[19]
