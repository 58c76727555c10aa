"""Trial of `make test-slurm`: a job on a mesh whose head and workers are Slurm jobs.

The head and an array of workers are submitted as by a user. While the job trains, one worker is
requeued without notice and one reaches its time limit. Then the head reaches its own limit,
continues at another node, and is requeued without notice. Prints one line of JSON; exits with 1 if
the job or its account is not right.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.namespaces.hosts import CODE, list_missing_tools
from tests.deploy.slurm import cluster
from tests.deploy.slurm.cluster import Cluster
from tests.load import scaled

SCRIPTS = CODE / "compose" / "slurm"
ROOT = f"{cluster.HOME}/mesh"
RUN = "mesh/runs/calculator"
NODES = 5  # the head's, three for workers, and one for the head after its node is taken
WORKERS = 3
STEPS = 40  # the job must outlast all faults: about 20 steps on two idle cores
# Few and short trajectories, no evaluation: minutes on two cores.
SHORT = (
    *("rollout.slots=16", f"budget.steps={STEPS}", "algorithm.groups_per_step=4"),
    *("algorithm.group_size=4", "algorithm.filter_zero_variance=false", "warm_start.steps=20"),
    *("evaluation.before=false", "evaluation.after=false", "evaluation.every=0"),
)
START_S = 300.0
MOVE_S = 420.0  # end of a job (KillWait), its restart, and admission
STEP_S = 600.0
LOOK_S = 1.0
LOG_CHARS = 8000  # characters of each log that are printed if the trial fails


@dataclass
class Trial:
    """Trial of a mesh in Slurm jobs while it trains."""

    cluster: Cluster
    head: str = ""
    workers: str = ""
    took_s: dict[str, float] = field(default_factory=dict)

    async def begin(self) -> None:
        """Create the secrets and start the head and the workers."""
        user = self.cluster.user
        await user("meshrl", "secrets", f"{cluster.HOME}/meshrl-secrets", "--head", "head")
        self.head = await self._submit("head.sbatch", "--time=4:00:00")
        size = (f"--array=1-{WORKERS}", "--cpus-per-task=4", "--time=4:00:00")
        self.workers = await self._submit("workers.sbatch", *size)
        await self.until("the head runs", self._is_listening, START_S)

    async def train(self) -> None:
        """Submit a job from the login node."""
        job = str(CODE / "examples" / "calculator.toml")
        sets = [word for change in SHORT for word in ("--set", change)]
        await self.cluster.user(str(SCRIPTS / "at-head.sh"), "submit", job, *sets)
        await self.step(1)

    async def restart_workers(self) -> None:
        """Requeue one worker's job without notice, and shorten the time limit of another.

        The second worker drains, leaves and requests to be requeued.
        """
        known = self._count_admitted_hosts()
        requeued, limited = (f"{self.workers}_{task}" for task in (1, 2))
        await self.cluster.user("scontrol", "requeue", requeued)
        await self._shorten_time_limit(limited)
        await asyncio.gather(self.await_restart(requeued), self.await_restart(limited))

        async def has_rejoined() -> bool:
            return self._count_admitted_hosts() >= known + 2

        await self.until("both are in the mesh again", has_rejoined, MOVE_S)
        await self._await_next_step()

    async def time_out_head(self) -> None:
        """Shorten the head's time limit while other jobs request its node."""
        node = (await self._read_job_row(self.head))["BatchHost"]
        await self.cluster.admin(
            *("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=wanted")
        )
        await self._shorten_time_limit(self.head)
        await self.await_restart(self.head)
        assert (await self._read_job_row(self.head))["BatchHost"] != node, (
            "the head is where it was"
        )
        await self._await_next_step()

    async def requeue_head(self) -> None:
        """Requeue the head's job without notice."""
        await self.cluster.user("scontrol", "requeue", self.head)
        await self.await_restart(self.head)
        await self._await_next_step()

    async def end(self) -> dict[str, Any]:
        """Return the account of the job, once it has finished."""
        await self.until("the job is over", self._has_finished, STEP_S)
        said = await self.cluster.user("meshrl", "audit", "--json", f"{cluster.HOME}/{RUN}")
        account: dict[str, Any] = json.loads(said)
        summary = json.loads(self.cluster.home(f"{RUN}/summary.json").read_text())
        return {"phase": summary["phase"], "steps": self._read_steps(), **account}

    async def close(self) -> None:
        """Cancel the jobs so that they are not requeued."""
        await self.cluster.user("scancel", self.workers)
        await self.cluster.user("scancel", self.head)
        await self.until("no job is left", self._has_no_jobs, MOVE_S)

    async def await_restart(self, job: str) -> None:
        """Wait until a requeued job runs again, without the usual two minutes of delay."""
        started_s = time.monotonic()
        first = int((await self._read_job_row(job))["Restarts"])

        async def is_pending() -> bool:
            row = await self._read_job_row(job)
            return row["JobState"] == "PENDING"

        await self.until(f"{job} is in the queue again", is_pending, MOVE_S)
        self.took_s[f"{job}_ended"] = time.monotonic() - started_s
        for change in ("TimeLimit=4:00:00", "StartTime=now"):
            await self.cluster.admin("scontrol", "update", f"JobId={job}", change)

        async def is_running() -> bool:
            row = await self._read_job_row(job)
            return row["JobState"] == "RUNNING" and int(row["Restarts"]) >= first

        await self.until(f"{job} runs again", is_running, MOVE_S)

    async def step(self, least: int) -> None:
        """Wait until the job has made at least this many steps."""

        async def has_reached_step() -> bool:
            assert self._read_steps() >= least or not await self._has_finished(), (
                "the job has ended too soon"
            )
            return self._read_steps() >= least

        await self.until(f"step {least}", has_reached_step, STEP_S)

    async def until(self, what: str, holds: Callable[[], Awaitable[bool]], most_s: float) -> None:
        """Wait until the condition holds; TimeoutError otherwise."""
        started_s, most_s = time.monotonic(), scaled(most_s)
        while not await holds():
            if time.monotonic() - started_s > most_s:
                raise TimeoutError(f"{what}: not within {most_s:g} s")
            await asyncio.sleep(LOOK_S)
        print(f"{time.monotonic() - started_s:6.1f} s until {what}", file=sys.stderr, flush=True)

    def count_matches(self, pattern: str) -> int:
        """Return the number of matches of `pattern` in the logs of the jobs."""
        return sum(len(re.findall(pattern, path.read_text())) for path in self.logs())

    def logs(self) -> list[Path]:
        """Return the logs of Slurm's jobs."""
        return sorted(self.cluster.home(".").glob("meshrl-*.log"))

    async def _submit(self, script: str, *words: str) -> str:
        settings = f"MESHRL_ROOT={ROOT}"
        submit = ("sbatch", "--parsable", *words, str(SCRIPTS / script))
        return (await self.cluster.user("env", settings, "MESHRL_LOOK_S=5", *submit)).strip()

    async def _shorten_time_limit(self, job: str) -> None:
        """Set a time limit three minutes from now, so that its signal comes immediately."""
        days, _, clock = (await self._read_job_row(job))["RunTime"].rpartition("-")
        hours, minutes, _ = map(int, clock.split(":"))
        limit = f"{(int(days or 0) * 24 + hours) * 60 + minutes + 3}"
        await self.cluster.user("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")

    async def _read_job_row(self, job: str) -> dict[str, str]:
        return next(iter((await self.cluster.jobs(job)).values()))

    async def _is_listening(self) -> bool:
        ran = await self.cluster.user(str(SCRIPTS / "at-head.sh"), "status", check=False)
        return bool(ran) and "error" not in ran

    async def _await_next_step(self) -> None:
        """Wait for one more step; fail if the job has finished."""
        await self.step(self._read_steps() + 1)

    def _count_admitted_hosts(self) -> int:
        """Return the number of hosts that the gateway has admitted."""
        log = self.cluster.home(f"meshrl-head-{self.head}.log").read_text()
        return log.count('"a host has joined"')

    async def _has_finished(self) -> bool:
        """Return True if the job has finished; a head that stops writes a summary, too."""
        path = self.cluster.home(f"{RUN}/summary.json")
        return path.is_file() and json.loads(path.read_text())["phase"] in ("finished", "failed")

    async def _has_no_jobs(self) -> bool:
        return not (await self.cluster.user("squeue", "-h")).strip()

    def _read_steps(self) -> int:
        path = self.cluster.home(f"{RUN}/metrics.jsonl")
        return len(path.read_text().splitlines()) if path.exists() else 0


async def run_trial() -> dict[str, Any]:
    """Run each part; return the job's result."""
    started_s = time.monotonic()
    async with Cluster(NODES) as made:
        trial = Trial(made)
        try:
            for part in (
                *(trial.begin, trial.train, trial.restart_workers),
                *(trial.time_out_head, trial.requeue_head),
            ):
                since = time.monotonic()
                await part()
                trial.took_s[part.__name__] = time.monotonic() - since
            account = await trial.end()
            await trial.close()
        except BaseException:
            for log in trial.logs():
                print(f"== {log.name}\n{log.read_text()[-LOG_CHARS:]}", file=sys.stderr)
            raise
        return {
            "phase": account["phase"],
            "steps": account["steps"],
            "lost": account["lost"],
            "trained_twice": account["trained_twice"],
            "requeued": trial.count_matches("DUE TO JOB REQUEUE"),
            "timed_out": trial.count_matches("the time limit is near"),
            "seconds": round(time.monotonic() - started_s, 1),
            "parts_s": {name: round(took, 1) for name, took in trial.took_s.items()},
        }


def main() -> None:
    """Run the trial; exit with 77 if this machine lacks a prerequisite."""
    if absent := cluster.list_missing_programs() or list_missing_tools():
        print(f"this machine lacks {absent}: apt-get install slurmctld slurmd munge iproute2")
        sys.exit(77)
    found = asyncio.run(run_trial())
    print(json.dumps(found))
    right = found["phase"] == "finished" and found["steps"] >= STEPS
    right = right and (found["lost"], found["trained_twice"]) == (0, 0)
    sys.exit(0 if right and (found["requeued"], found["timed_out"]) == (4, 2) else 1)


if __name__ == "__main__":
    main()
