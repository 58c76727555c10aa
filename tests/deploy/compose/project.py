"""Project of compose/compose.yaml: started, queried, restarted in parts, removed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.deploy.compose.images.building import CODE, STAND_INS
from tests.load import scaled

FOLDER = CODE / "compose"
OURS = ("head", "workers", "sandbox")
RUNS = "/var/lib/meshrl/runs"  # on the head
DEMO = "calculator"
UP_S = 900.0
BUILD_S = 3600.0  # downloads included
ASK_S = 300.0
PAUSE_S = 2.0


@dataclass
class Project:
    """Services of compose.yaml without Grafana, for which Debian has no packages."""

    environment: dict[str, str]  # variables of the engine
    name: str = "meshrl-test"
    workers: int = 2
    demo: str = ""  # words of `meshrl submit`; empty: the whole demo
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings |= {f"{name.upper()}_IMAGE": image for name, image in STAND_INS.items()}
        self.settings["MESHRL_WORKERS"] = str(self.workers)
        if self.demo:
            self.settings["MESHRL_DEMO"] = self.demo

    def up(self, *services: str, build: dict[str, str] | None = None) -> Callable[[], float]:
        """Start these services (or all that can run here) and their dependencies; return the
        clock of the seconds since then.

        `build`: variables with which the image is built first.
        """
        started_s = time.monotonic()
        chosen = services or ("prometheus", "demo")
        options = ("--detach",) if build is None else ("--build", "--detach")
        self.compose("up", *options, *chosen, most_s=UP_S if build is None else BUILD_S, more=build)
        return lambda: round(time.monotonic() - started_s, 1)

    def compose(
        self,
        *arguments: str,
        most_s: float = UP_S,
        files: tuple[str, ...] = (),
        more: dict[str, str] | None = None,
    ) -> str:
        """Return the output of `docker compose`; AssertionError with the end of it if it fails.

        `more`: further variables.
        """
        named = [word for file in ("compose.yaml", *files) for word in ("-f", str(FOLDER / file))]
        command = ["docker", "compose", "-p", self.name, *named, *arguments]
        return self._run_command(command, most_s, more)

    def docker(self, *arguments: str, most_s: float = ASK_S) -> str:
        return self._run_command(["docker", *arguments], most_s)

    def containers(self, service: str) -> list[str]:
        """Return the ids of all containers of a service by number, including exited ones."""
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={self.name}"
        found = self.docker("ps", "-aq", "--filter", project, "--filter", label).split()
        return sorted(found, key=lambda one: self.inspect(one)["Name"])

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("inspect", container))[0]
        return found

    def image_mb(self, name: str) -> int:
        """Return the size of all layers of an image, as the engine counts them."""
        return round(int(self.docker("image", "inspect", "-f", "{{.Size}}", name)) / 1e6)

    def has_exited(self, service: str) -> bool:
        """Return True if the service's container exited with 0; AssertionError at another
        status.
        """
        state = self.inspect(self.containers(service)[0])["State"]
        assert state["Status"] != "exited" or state["ExitCode"] == 0, self.format_logs()
        return bool(state["Status"] == "exited")

    def is_healthy(self, container: str) -> bool:
        return bool(self.inspect(container)["State"]["Health"]["Status"] == "healthy")

    def run_inside(self, service: str, *command: str, number: int = 0) -> str:
        """Return the output of a command in a container of the service."""
        return self.docker("exec", self.containers(service)[number], *command)

    def run_rejected(self, service: str, *command: str) -> str:
        """Return the output of a command that must fail in a container of the service."""
        container = self.containers(service)[0]
        done = self._run(["docker", "exec", container, *command], ASK_S)
        assert done.returncode, f"{command} did not fail: {done.stdout}"
        return done.stdout + done.stderr

    def run_outside(self, *command: str, **settings: str) -> str:
        """Return the output of a command of this machine that connects to the project's published
        ports.
        """
        enter = shlex.split(self.environment.get("MESHRL_ENGINE_ENTER", ""))
        return self._run_command([*enter, *command], ASK_S, settings)

    def job(self, name: str) -> dict[str, Any]:
        """Return the head's status of a job; {} if there is none or the head does not answer."""
        command = ["docker", "exec", self.containers("head")[0], "meshrl", "status", "--json"]
        asked = self._run(command, ASK_S)
        jobs = [] if asked.returncode else json.loads(asked.stdout)["jobs"]
        return next((job for job in jobs if job["id"] == name), {})

    def has_finished(self, name: str) -> bool:
        """Return True if a job has finished; AssertionError if it has failed."""
        job = self.job(name)
        assert job.get("phase") not in ("failed", "stopped"), f"{job}\n{self.format_logs()}"
        return job.get("phase") == "finished"

    def restart_each(self) -> list[str]:
        """Restart each container in turn while a job trains; return all jobs.

        Workers are killed without notice. If a job finishes before all restarts, another is
        submitted.
        """
        killed = self.containers("workers")[0]
        jobs = [DEMO]
        for container in [one for name in ("redis", *OURS) for one in self.containers(name)]:
            self._keep_training(jobs)
            if container == killed:
                self.docker("kill", container)
                self.docker("start", container)
            else:
                self.docker("restart", "--time", "60", container)
            self.until("a container is well again", partial(self.is_healthy, container))
        return jobs

    def _keep_training(self, jobs: list[str]) -> None:
        if self.has_finished(jobs[-1]):
            jobs.append(f"{DEMO}-{len(jobs)}")
            words = shlex.split(self.demo)
            self.run_inside("head", "meshrl", "submit", *words, "--set", f"name={jobs[-1]}")
        self.until("it trains", lambda: self.has_trained(jobs[-1]))

    def has_trained(self, name: str) -> bool:
        """Return True if a job has made a step."""
        return bool(self.job(name).get("steps_done", 0))

    def read_accounting(self, name: str) -> dict[str, Any]:
        """Return the output of `meshrl audit` for a job; the command fails if it finds a
        problem.
        """
        found: dict[str, Any] = json.loads(
            self.run_inside("head", "meshrl", "audit", f"{RUNS}/{name}", "--json")
        )
        return found

    def until(self, what: str, true: Callable[[], bool], most_s: float = UP_S) -> float:
        """Wait until the condition holds and return the seconds; AssertionError with the last log
        lines.
        """
        started_s, most_s = time.monotonic(), scaled(most_s)
        while not true():
            if time.monotonic() - started_s > most_s:
                raise AssertionError(f"not within {most_s:.0f} s: {what}\n{self.format_logs()}")
            time.sleep(PAUSE_S)
        return time.monotonic() - started_s

    def format_logs(self) -> str:
        """Return the state of the containers and the last lines of each log."""
        return self.compose("ps", "--all") + self.compose("logs", "--tail", "15")

    def remove(self) -> None:
        """Remove everything, including volumes."""
        self.compose("down", "--volumes", "--timeout", "60")

    def _run_command(
        self, command: list[str], most_s: float, more: dict[str, str] | None = None
    ) -> str:
        done = self._run(command, most_s, more)
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def _run(
        self, command: list[str], most_s: float, more: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | self.environment | self.settings | (more or {})
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=scaled(most_s)
        )


def make_short_demo(steps: int) -> str:
    """Return words of `meshrl submit` for the demo with small steps, no evaluation and few
    workers.
    """
    settings = {
        "mesh.workers": "2",
        "rollout.slots": "16",
        "budget.steps": str(steps),
        "algorithm.groups_per_step": "4",
        "algorithm.group_size": "4",
        "algorithm.filter_zero_variance": "false",
        "warm_start.steps": "120",
        "evaluation.before": "false",
        "evaluation.after": "false",
        "evaluation.every": "0",
    }
    words = [f"--set {name}={value}" for name, value in settings.items()]
    return " ".join(["/usr/share/meshrl/examples/calculator.toml", *words])


def engine_here() -> dict[str, str] | None:
    """Return the variables of a running engine; None if there is none."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, timeout=scaled(ASK_S))
    except FileNotFoundError:
        return None
    names = ("DOCKER_HOST", "DOCKER_CONFIG", "MESHRL_ENGINE_ENTER")
    return None if done.returncode else {n: os.environ[n] for n in names if n in os.environ}


def state_folder() -> Path:
    """Return the directory in which our engine retains images between runs."""
    return Path(os.environ.get("MESHRL_ENGINE_STATE", CODE / ".venvs/engine"))
